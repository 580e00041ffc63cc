"""gpunodes join"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from gpunodes.cli import common, complete, connections
from gpunodes.inventory import edit
from gpunodes.inventory.names import check_pattern, is_address
from gpunodes.model import Role
from gpunodes.operations import checked
from gpunodes.operations.join import OPERATION


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@connections.options
@common.gpu_options
@common.reboot_option
@common.run_options(OPERATION)
@common.unsupported_os_option
def command(
    machines: tuple[str, ...],
    flags: common.CommonOptions,
    connection: connections.Connection,
    requested: Mapping[str, Any],
) -> int:
    """Join machines to the cluster, as workers or as control planes.

    MACHINES are names, addresses, groups or patterns of the inventory. Control planes join first, one after the other;
    if one fails, the workers do not join. On a machine that has joined already, only
    what differs from the settings is changed. If `init-master ADDRESS` created the inventory,
    new addresses are added to it.
    """
    for pattern in machines:
        check_pattern(pattern)
    inventory = checked.inventory(flags.inventory)
    new = inventory.unknown(pattern for pattern in machines if is_address(pattern))
    added_now = set(new)
    others = [pattern for pattern in machines if pattern not in added_now]
    known = inventory.select(others, Role.CONTROL_PLANE, Role.WORKER) if others else []
    with edit.tentative(flags.inventory, dry_run=flags.options.dry_run) as change:
        added_names: list[str] = []
        if new:
            common.check(OPERATION, flags)
            added_names = edit.add(flags.inventory, Role.WORKER, new, connection.variables)
        elif connection.variables:
            edit.reconnect(flags.inventory, known, connection.variables)
        if new or connection.variables:
            inventory = checked.inventory(flags.inventory)
        chosen = inventory.select(machines, Role.CONTROL_PLANE, Role.WORKER)
        chosen = common.without_off(inventory, chosen, machines)
        added = common.Added(change, added_names)
        return common.execute(OPERATION, inventory, chosen, common.requesting(flags, requested), added)
