"""``gpunodes gpu``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "plan": "Say what machines with GPUs have, what they get, and why.",
    "install": "Install what machines with GPUs get, in a cluster or in none.",
    "verify": "Prove GPUs level by level: host, container, kubelet, pod.",
    "remove": "Take the GPU software of machines away.",
}


@click.group(cls=LazyGroup, listing=COMMANDS, where="gpunodes.cli.gpu")
def command() -> None:
    """Plan, install, prove and remove what machines with GPUs get."""
