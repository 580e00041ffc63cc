"""gpunodes gpu install"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from gpunodes.cli import common
from gpunodes.inventory import Inventory
from gpunodes.operations.gpu_install import OPERATION


@click.command()
@click.argument("machines", nargs=-1, required=True)
@common.gpu_options
@common.reboot_option
@common.run_options(OPERATION)
def command(machines: tuple[str, ...], flags: common.CommonOptions, requested: Mapping[str, Any]) -> int:
    """Install what machines with GPUs get, in a cluster or in none.

    MACHINES are names, addresses, groups or patterns of the inventory. A driver that is there and does what is wished
    stays; one that is loaded is never replaced.
    """
    inventory = Inventory(flags.inventory)
    return common.execute(OPERATION, inventory, inventory.select(machines), common.requesting(flags, requested))
