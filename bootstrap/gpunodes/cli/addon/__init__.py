"""``gpunodes addon``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "list": "List the optional add-ons, and which are installed.",
    "up": "Install an optional add-on, and wait until it runs.",
    "verify": "Verify that an optional add-on runs and answers.",
    "down": "Remove an optional add-on.",
    "plan": "Show which images the add-ons run, and which this gpunodes has; nothing is changed.",
    "upgrade": "Bring the network add-on and the device plugin to the versions of this gpunodes.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.addon")
def command() -> None:
    """Install, verify and remove optional add-ons; update the network add-on and the device plugin."""
