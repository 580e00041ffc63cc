"""gpunodes gpu upgrade plan"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, complete, terminal
from gpunodes.operations import checked, gpu_upgrade_plan
from gpunodes.planner import gpu
from gpunodes.views import gpu_upgrade as view_of
from gpunodes.views import text


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@common.ansible_options
@click.option(
    "--driver",
    required=True,
    metavar="BRANCH",
    help="Branch of the new driver, such as 590, or an exact version, such as 590.44.01.",
)
@common.output_option
def command(machines: tuple[str, ...], inventory_path: Path, driver: str, output: str) -> int:
    """Show what the upgrade of a driver would do to machines; nothing is changed.

    MACHINES are names, addresses, groups or patterns of the inventory. An older driver is a downgrade, which is
    possible too. Exit code 3 when the upgrade is not possible on some machines, 1 when on all.
    """
    gpu.check(gpu.RequestedSoftware("", driver))
    inventory = checked.inventory(inventory_path)
    chosen = inventory.select(machines)
    view = text.progress()
    try:
        found = gpu_upgrade_plan.run(inventory, chosen, view, {"gpunodes_driver_branch": driver})
    finally:
        view.close()
    common.show_output(output, lambda: view_of.plan_document(found), lambda columns: view_of.plan(found, columns))
    if found.interrupted:
        terminal.line(terminal.INTERRUPTED, err=True)
    return int(found.exit_code)
