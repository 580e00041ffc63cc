"""gpunodes init-master, and its other name init-control-plane"""

from __future__ import annotations

import click

from gpunodes.cli import common, complete, connections
from gpunodes.errors import WrongInput
from gpunodes.inventory import edit
from gpunodes.inventory.names import check_address, check_pattern
from gpunodes.model import Role
from gpunodes.operations import checked
from gpunodes.operations.init_master import OPERATION


@click.command()
@click.argument("machine", required=False, shell_complete=complete.machines)
@connections.options
@common.run_options(OPERATION)
@common.unsupported_os_option
def command(machine: str | None, flags: common.CommonOptions, connection: connections.Connection) -> int:
    """Make a machine the control plane of a new cluster.

    MACHINE is a name or address of the inventory; by default its first control plane. If there is no inventory yet,
    give the machine's address: the inventory is created, with this address, --user, --key and --port. Other control
    planes join by `gpunodes join`.
    """
    path = flags.inventory
    names = [machine] if machine else []
    if machine:
        check_pattern(machine)
    with edit.tentative(path, dry_run=flags.options.dry_run) as change:
        added: list[str] = []
        if machine and not path.exists():
            check_address(machine)
            common.check(OPERATION, flags)
            added = edit.add(path, Role.CONTROL_PLANE, names, connection.variables)
        elif connection.variables:
            edit.reconnect(path, checked.inventory(path).select(names, Role.CONTROL_PLANE), connection.variables)
        inventory = checked.inventory(path)
        first = inventory.control_plane()
        chosen = inventory.select(names, Role.CONTROL_PLANE) if names else [first]
        if len(chosen) > 1:
            raise WrongInput(f"{machine!r} names {len(chosen)} machines", "one control plane", "name one machine")
        if chosen[0] != first:
            raise WrongInput(
                f"{chosen[0].name} is not the first machine of the group control_plane",
                f"{first.name}, which creates the cluster",
                f"put it first in the inventory, or use `gpunodes join {chosen[0].name}` if the cluster exists",
            )
        return common.execute(OPERATION, inventory, chosen, flags, common.Added(change, added))
