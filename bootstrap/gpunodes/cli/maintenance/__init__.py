"""``gpunodes maintenance``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "on": "Begin maintenance: no repairs, and the node is cordoned.",
    "off": "End maintenance: repairs are allowed again, and the cordon of `maintenance on` is removed.",
    "list": "Show the nodes in maintenance: reason, user and end.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.maintenance")
def command() -> None:
    """Keep repairs and new pods away from machines that people work on."""
