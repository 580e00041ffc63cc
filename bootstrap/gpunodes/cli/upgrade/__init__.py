"""``gpunodes upgrade``: one command a file, loaded only when it is called."""

from __future__ import annotations

import click

from gpunodes.cli import StartingGroup

# Name -> one line of help, as in gpunodes.cli.
COMMANDS = {
    "start": "Upgrade Kubernetes node by node; `upgrade 1.37` is short for `upgrade start 1.37`.",
    "plan": "Show the order of an upgrade, and what is in its way; nothing is changed.",
    "rollback": "Return workers to the kubelet before their last upgrade.",
}


@click.group(cls=StartingGroup, listing={"Commands": COMMANDS}, where="gpunodes.cli.upgrade")
def command() -> None:
    """Upgrade Kubernetes, minor by minor and node by node."""
