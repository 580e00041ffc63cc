"""``gpunodes autoscale``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "up": "Switch machines on when pods wait for them, and off when they are idle.",
    "status": "Show the pools that scale, and what is done with each of their machines.",
    "down": "Remove the autoscaler; machines stay as they are.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.autoscale")
def command() -> None:
    """Scale pools by switching machines on and off."""
