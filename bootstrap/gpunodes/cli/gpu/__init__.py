"""``gpunodes gpu``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "plan": "Say what machines with GPUs have, what they get, and why.",
}


@click.group(cls=LazyGroup, listing=COMMANDS, where="gpunodes.cli.gpu")
def command() -> None:
    """Say what machines with GPUs get, and why."""
