"""gpunodes up"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from gpunodes.cli import common
from gpunodes.model import Role
from gpunodes.operations import checked
from gpunodes.operations.up import OPERATION


@click.command()
@common.gpu_options
@common.reboot_option
@common.run_options(OPERATION)
@common.unsupported_os_option
def command(flags: common.CommonOptions, requested: Mapping[str, Any]) -> int:
    """Set up the whole inventory: control planes and workers, prepared in parallel.

    The machines are those of the groups control_plane and workers. The first control plane creates the cluster, the
    others join it one after the other. Run it again after a change of the inventory or an
    interruption: only what differs from the settings is changed.
    """
    inventory = checked.inventory(flags.inventory)
    inventory.control_plane()
    nodes = inventory.machines(Role.CONTROL_PLANE, Role.WORKER)
    nodes = common.without_off(inventory, nodes)
    return common.execute(OPERATION, inventory, nodes, common.requesting(flags, requested))
