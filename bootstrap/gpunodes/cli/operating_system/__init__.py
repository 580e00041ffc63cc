"""``gpunodes os``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {"plan": "Show the pending packages and kernels of machines; nothing is changed."}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.operating_system")
def command() -> None:
    """Show pending upgrades of machines' operating systems."""
