"""gpunodes runtime plan"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, complete, terminal
from gpunodes.operations import checked, runtime_plan
from gpunodes.views import runtime_plan as view_of
from gpunodes.views import text


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@common.ansible_options
@common.output_option
def command(machines: tuple[str, ...], inventory_path: Path, output: str) -> int:
    """Show the pending versions of machines' container runtimes; nothing is changed.

    MACHINES are names, addresses, groups or patterns of the inventory. Installed packages are compared with those that
    the settings request, such as gpunodes_containerd_version. The package lists are read into a folder that is deleted
    again. Exit code 3 when an upgrade is not possible on some machines, 1 when on all.
    """
    from gpunodes.model import Role

    inventory = checked.inventory(inventory_path, checked.Needs.CLUSTER)
    chosen = inventory.select(machines, Role.CONTROL_PLANE, Role.WORKER)
    view = text.progress()
    try:
        found = runtime_plan.run(inventory, chosen, view)
    finally:
        view.close()
    common.show_output(output, lambda: view_of.plan_document(found), lambda columns: view_of.plan(found, columns))
    if found.interrupted:
        terminal.line(terminal.INTERRUPTED, err=True)
    return int(found.exit_code)
