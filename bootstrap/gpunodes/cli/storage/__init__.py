"""``gpunodes storage``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "up": "Let pods on all nodes use shared storage.",
    "verify": "Check the shares from the server up to pods on two nodes.",
    "down": "Take shared storage away; the data stays.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.storage")
def command() -> None:
    """Share folders among pods on all nodes, by NFS."""
