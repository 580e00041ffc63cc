"""``gpunodes rollout``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "apply": "Apply changed settings to control planes, one after the other.",
    "status": "Show the cluster's roll-out: what, by whom, how far, and what comes next.",
    "resume": "Continue an unfinished roll-out, on any controller.",
    "abandon": "Give the nodes of an unfinished roll-out back, and forget it.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.rollout")
def command() -> None:
    """Apply settings, and follow, continue or abandon the work that is rolled out node by node."""
