"""``gpunodes os``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "plan": "Show the pending packages and kernels of machines; nothing is changed.",
    "upgrade": "Upgrade the packages of nodes, one node after the other.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.operating_system")
def command() -> None:
    """Upgrade the operating systems of nodes, and show what is pending."""
