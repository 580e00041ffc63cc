"""gpunodes reset"""

from __future__ import annotations

from dataclasses import replace

import click

from gpunodes.cli import common, complete
from gpunodes.model import Role
from gpunodes.operations import checked
from gpunodes.operations.reset import OPERATION


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.run_options(OPERATION)
def command(machines: tuple[str, ...], yes: bool, flags: common.CommonOptions) -> int:
    """Undo everything that gpunodes changed on machines.

    MACHINES are names, addresses, groups or patterns of the inventory. Resetting all control planes destroys the
    cluster; a reset of one of several is refused, since the others depend on it. Nodes are not drained: use
    `gpunodes remove` for that. Each machine's node is shown before anything is changed. The inventory needs no control
    plane.
    """
    inventory = checked.inventory(flags.inventory)
    chosen = inventory.select(machines)
    consequence = "Everything that gpunodes installed on {} is removed, with the data of Kubernetes"
    # Machines that were only prepared may be in an inventory without a cluster.
    alone = not inventory.machines(Role.CONTROL_PLANE)
    operation = replace(OPERATION, without_cluster=True, ends_cluster=False) if alone else OPERATION
    # A broken cluster must not prevent its reset.
    return common.execute_confirmed(operation, inventory, chosen, flags, consequence, yes=yes, needs_cluster=False)
