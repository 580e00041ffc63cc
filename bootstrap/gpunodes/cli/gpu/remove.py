"""gpunodes gpu remove"""

from __future__ import annotations

import click

from gpunodes.cli import common
from gpunodes.inventory import Inventory
from gpunodes.operations.gpu_remove import OPERATION


@click.command()
@click.argument("machines", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@common.run_options(OPERATION)
def command(machines: tuple[str, ...], yes: bool, flags: common.CommonOptions) -> int:
    """Take the GPU software of machines away.

    MACHINES are names, addresses, groups or patterns of the inventory. What was there before us stays, and the kernel's
    own driver comes back. Refused while something uses a GPU: drain the node first. Each machine's node is shown
    before anything is changed.
    """
    inventory = Inventory(flags.inventory)
    question = "Remove the GPU software of {}?"
    return common.execute_confirmed(OPERATION, inventory, inventory.select(machines), flags, question, yes=yes)
