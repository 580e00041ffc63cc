"""``gpunodes gpu upgrade``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import StartingGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "start": "Replace the driver of GPU nodes; `gpu upgrade gpu-1` is short for `gpu upgrade start gpu-1`.",
    "plan": "Show what the upgrade of a driver would do to machines; nothing is changed.",
}


@click.group(cls=StartingGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.gpu.upgrade")
def command() -> None:
    """Replace the driver of GPU nodes, one node after the other."""
