"""``gpunodes gpu``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "plan": "Show which GPU software machines get, and why.",
    "install": "Install the GPU software of machines, with or without a cluster.",
    "upgrade": "Plan the upgrade of GPU drivers.",
    "verify": "Verify GPUs level by level: host, container, kubelet, pod.",
    "burn-in": "Test the GPUs of machines before they take work.",
    "remove": "Remove the GPU software of machines.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.gpu")
def command() -> None:
    """Plan, install, verify and remove GPU software, and burn in GPUs."""
