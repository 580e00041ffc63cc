"""gpunodes gpu install"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from gpunodes.cli import common, complete
from gpunodes.operations import checked
from gpunodes.operations.gpu_install import OPERATION


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@common.gpu_options
@common.reboot_option
@common.run_options(OPERATION)
@common.unsupported_os_option
def command(machines: tuple[str, ...], flags: common.CommonOptions, requested: Mapping[str, Any]) -> int:
    """Install the GPU software of machines, with or without a cluster.

    MACHINES are names, addresses, groups or patterns of the inventory. An installed driver that meets the request is
    kept; a driver in use is never replaced: drain the node first.
    """
    inventory = checked.inventory(flags.inventory)
    return common.execute(OPERATION, inventory, inventory.select(machines), common.requesting(flags, requested))
