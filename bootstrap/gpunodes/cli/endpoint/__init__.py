"""``gpunodes endpoint``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "set": "Move an existing cluster to another endpoint, without a new cluster.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.endpoint")
def command() -> None:
    """Move the address at which all machines reach the API."""
