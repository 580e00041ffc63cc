"""gpunodes maintenance off"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import complete, options, terminal
from gpunodes.errors import ExitCode
from gpunodes.model import Kubeconfig


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@options.kubeconfig_option
@options.inventory_option
@options.json_option
def command(machines: tuple[str, ...], kubeconfig: Kubeconfig | None, inventory_path: Path, as_json: bool) -> int:
    """End maintenance: repairs are allowed again, and the cordon of `maintenance on` is removed.

    MACHINES are names, addresses, groups or patterns of the inventory. Cordons that existed before, or that a repair
    made, stay.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked, maintenance
    from gpunodes.views import maintenance as views

    inventory = checked.inventory(inventory_path, checked.Needs.NODES, kubeconfig)
    ended = maintenance.end(InventoryFleet(inventory), inventory.select(machines), terminal.progress)
    terminal.echo(views.document(ended) if as_json else views.ended(ended))
    return ExitCode.DONE
