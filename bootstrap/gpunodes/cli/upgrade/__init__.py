"""``gpunodes upgrade``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {"plan": "Show the order of an upgrade, and what is in its way; nothing is changed."}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.upgrade")
def command() -> None:
    """Judge an upgrade of Kubernetes."""
