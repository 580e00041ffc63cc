"""gpunodes init-master"""

from __future__ import annotations

import click

from gpunodes import inventory as inventories
from gpunodes.cli import common
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Role
from gpunodes.operations.init_master import OPERATION


@click.command()
@click.argument("machine", required=False)
@common.connection_options
@common.run_options(OPERATION)
def command(machine: str | None, flags: common.Flags, connection: common.Connection) -> int:
    """Make a machine the control plane of a new cluster.

    MACHINE is a name or address of the inventory; by default its control plane. Without an inventory an address
    begins one, with --user and --key as its connection.
    """
    path = flags.inventory
    if machine:
        inventories.check_pattern(machine)
        if not path.exists():
            inventories.check_address(machine)
            inventories.add(path, Role.CONTROL_PLANE, [machine], connection.variables)
    inventory = Inventory(path)
    chosen = inventory.select([machine] if machine else [], Role.CONTROL_PLANE)
    if len(chosen) > 1 or chosen[0] != inventory.control_plane():
        raise WrongInput(f"{machine!r} names {len(chosen)} machines", "one control plane", "name one machine")
    return common.execute(OPERATION, inventory, chosen, flags)
