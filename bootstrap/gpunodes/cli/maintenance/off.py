"""gpunodes maintenance off"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, terminal
from gpunodes.errors import ExitCode


@click.command()
@click.argument("machines", nargs=-1, required=True)
@common.inventory_option
@common.json_option
def command(machines: tuple[str, ...], inventory_path: Path, as_json: bool) -> int:
    """Give machines back: repairs may begin, and the cordon that `on` made goes.

    MACHINES are names, addresses, groups or patterns of the inventory. A cordon that `maintenance on` found there, or
    that a repair made, stays.
    """
    from gpunodes.inventory import Inventory
    from gpunodes.operations import maintenance
    from gpunodes.operations.repair import Fleet
    from gpunodes.views import maintenance as views

    inventory = Inventory(inventory_path)
    ended = maintenance.end(Fleet(inventory), inventory.select(machines))
    terminal.echo(views.document(ended) if as_json else views.ended(ended))
    return ExitCode.DONE
