"""``gpunodes maintenance``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "on": "Keep repairs and new pods from machines that somebody works on.",
    "off": "Give machines back: repairs may begin, and the cordon that `on` made goes.",
    "list": "Show which nodes are in maintenance: why, by whom, and until when.",
}


@click.group(cls=LazyGroup, listing=COMMANDS, where="gpunodes.cli.maintenance")
def command() -> None:
    """Keep repairs and new pods from machines that somebody works on."""
