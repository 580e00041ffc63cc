"""``gpunodes etcd``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import LazyGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "backup": "Back the cluster up into one file.",
    "restore": "Replace the state of the cluster by that of a backup.",
    "timer": "Print a systemd service and timer that back the cluster up.",
}


@click.group(cls=LazyGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.etcd")
def command() -> None:
    """Back up and restore the cluster's state."""
