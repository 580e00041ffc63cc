"""``gpunodes runtime``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "plan": "Show the pending versions of machines' container runtimes; nothing is changed.",
    "upgrade": "Upgrade the container runtimes of nodes, one node after the other.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.runtime")
def command() -> None:
    """Upgrade container runtimes and container toolkits, and show what is pending."""
