"""``gpunodes provision``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {"seed": "Print what makes a bare machine ready for gpunodes: cloud-init, preseed or kickstart."}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.provision")
def command() -> None:
    """Get bare machines ready for gpunodes."""
