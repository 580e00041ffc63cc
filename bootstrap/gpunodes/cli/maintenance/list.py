"""gpunodes maintenance list"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import ExitCode
from gpunodes.model import Kubeconfig


@click.command()
@options.kubeconfig_option
@options.inventory_option
@options.json_option
def command(kubeconfig: Kubeconfig | None, inventory_path: Path, as_json: bool) -> int:
    """Show the nodes in maintenance: reason, user and end.

    Nodes whose maintenance has expired are shown until `maintenance off`.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked, maintenance
    from gpunodes.views import maintenance as views

    inventory = checked.inventory(inventory_path, checked.Needs.NODES, kubeconfig)
    kept = maintenance.listed(InventoryFleet(inventory), terminal.progress)
    terminal.echo(views.document(kept) if as_json else views.table(kept))
    return ExitCode.DONE
