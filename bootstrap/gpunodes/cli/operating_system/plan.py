"""gpunodes os plan"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, complete, terminal
from gpunodes.operations import checked, os_plan
from gpunodes.views import os_plan as view_of
from gpunodes.views import text


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@common.ansible_options
@click.option("--security", is_flag=True, help="Only packages with a security update.")
@common.output_option
def command(machines: tuple[str, ...], inventory_path: Path, security: bool, output: str) -> int:
    """Show the pending packages and kernels of machines; nothing is changed.

    MACHINES are names, addresses, groups or patterns of the inventory. The package lists are read into a folder that is
    deleted again. Packages that gpunodes installed are left out. Exit code 3 when some machines cannot be read, 1 when
    none can.
    """
    inventory = checked.inventory(inventory_path)
    chosen = inventory.select(machines)
    view = text.progress()
    try:
        found = os_plan.run(inventory, chosen, view, security=security)
    finally:
        view.close()
    common.show_output(output, lambda: view_of.plan_document(found), lambda columns: view_of.plan(found, columns))
    if found.interrupted:
        terminal.line(terminal.INTERRUPTED, err=True)
    return int(found.exit_code)
