"""``gpunodes addons``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "plan": "Show which images the add-ons run, and which this gpunodes has; nothing is changed.",
    "upgrade": "Bring the network add-on and the device plugin to the versions of this gpunodes.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.addons")
def command() -> None:
    """Update the network add-on and the device plugin."""
