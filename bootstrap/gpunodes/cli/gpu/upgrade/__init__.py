"""``gpunodes gpu upgrade``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {"plan": "Show what the upgrade of a driver would do to machines; nothing is changed."}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.gpu.upgrade")
def command() -> None:
    """Plan the upgrade of GPU drivers."""
