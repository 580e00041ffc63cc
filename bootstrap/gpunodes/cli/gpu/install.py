"""gpunodes gpu install"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from gpunodes.cli import common, complete, connections
from gpunodes.inventory import edit
from gpunodes.inventory.names import check_address, check_pattern, is_address
from gpunodes.model import Role
from gpunodes.operations import checked
from gpunodes.operations.gpu_install import OPERATION


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
    """Install the GPU software of machines, with or without a cluster.

    MACHINES are names, addresses, groups or patterns of the inventory. An installed driver that meets the request is
    kept; a driver in use is never replaced: drain the node first. Addresses that are not in the inventory are added to
    its group gpu_hosts, which is for machines without a cluster; if there is no inventory yet, it is created. On
    these machines `--runtime docker` installs Docker.
    """
    path = flags.inventory
    for pattern in machines:
        check_pattern(pattern)
    with edit.tentative(path, dry_run=flags.options.dry_run) as change:
        if path.exists():
            inventory = checked.inventory(path)
            new = inventory.unknown(pattern for pattern in machines if is_address(pattern))
            others = [pattern for pattern in machines if pattern not in new]
            known = inventory.select(others) if others else []
        else:
            known, new = [], list(dict.fromkeys(machines))
            for address in new:
                check_address(address)
        if new:
            common.check(OPERATION, flags)
            edit.add(path, Role.GPU_HOST, new, connection.variables)
        elif connection.variables:
            edit.reconnect(path, known, connection.variables)
        inventory = checked.inventory(path)
        chosen = inventory.select(machines)
        added = common.Added(change, new)
        return common.execute(OPERATION, inventory, chosen, common.requesting(flags, requested), added)
