"""gpunodes status"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from gpunodes.cli import common, terminal
from gpunodes.errors import ExitCode
from gpunodes.inventory import Inventory
from gpunodes.operations import status
from gpunodes.views import document, text


@click.command()
@common.ansible_options
@common.json_option
def command(inventory_path: Path, as_json: bool) -> int:
    """Show the nodes of the cluster and their states.

    Exit code 3 when a node is not ready.
    """
    inventory = Inventory(inventory_path)
    view = text.progress()
    try:
        found = status.run(inventory, view)
    finally:
        view.close()
    if as_json:
        terminal.echo(document.dump({"schema": "gpunodes.status/1", **dataclasses.asdict(found)}))
    else:
        rows = [("NODE", "MACHINE", "ROLE", "STATE", "VERSION", "ADDRESS", "")]
        rows += [
            (
                node.name,
                node.machine or "-",
                node.role,
                "ready" if node.ready else "NOT READY",
                node.version,
                node.address,
                node.reason,
            )
            for node in found.nodes
        ]
        rows += [("-", name, "-", "no node", "-", "-", "") for name in found.missing]
        terminal.echo(f"Kubernetes {found.version} at {found.endpoint}\n\n{text.table(rows)}")
    return ExitCode.DONE if found.healthy else ExitCode.PARTLY
