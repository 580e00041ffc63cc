"""gpunodes gpu remove"""

from __future__ import annotations

import click

from gpunodes.cli import common, complete
from gpunodes.operations import checked
from gpunodes.operations.gpu_remove import OPERATION


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.run_options(OPERATION)
def command(machines: tuple[str, ...], yes: bool, flags: common.CommonOptions) -> int:
    """Remove the GPU software of machines.

    MACHINES are names, addresses, groups or patterns of the inventory. Only software that gpunodes installed is
    removed; the kernel's own driver is enabled again. Refused while a GPU is in use: drain the node first. Each
    machine's node is shown before anything is changed.
    """
    inventory = checked.inventory(flags.inventory)
    consequence = "The GPU software of {} is removed"
    return common.execute_confirmed(OPERATION, inventory, inventory.select(machines), flags, consequence, yes=yes)
