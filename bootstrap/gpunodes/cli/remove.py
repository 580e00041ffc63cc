"""gpunodes remove"""

from __future__ import annotations

import dataclasses

import click

from gpunodes.cli import common, complete, options
from gpunodes.model import Role
from gpunodes.operations import checked
from gpunodes.operations.remove import OPERATION


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@click.option(
    "--drain-timeout",
    type=options.Whole(1),
    metavar="SECONDS",
    help="How long to wait for pods to end; by default the setting gpunodes_drain_timeout.",
)
@click.option(
    "--force-drain",
    is_flag=True,
    help="Delete pods that do not end, regardless of disruption budgets; also on a node that is not ready.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.run_options(OPERATION)
def command(
    machines: tuple[str, ...], drain_timeout: int | None, force_drain: bool, yes: bool, flags: common.CommonOptions
) -> int:
    """Drain a node, delete it from the cluster and reset its machine.

    MACHINES are names, addresses, groups or patterns of the inventory's workers. Each machine's node is shown before
    anything is changed.
    """
    inventory = checked.inventory(flags.inventory)
    chosen = inventory.select(machines, Role.WORKER)
    variables: dict[str, object] = {"gpunodes_drain_timeout": drain_timeout} if drain_timeout else {}
    if force_drain:
        variables["gpunodes_drain_force"] = True
    options = dataclasses.replace(flags.options, variables=variables)
    flags = dataclasses.replace(flags, options=options)
    consequence = "The nodes are drained and deleted, and the data of Kubernetes on {} is lost"
    return common.execute_confirmed(OPERATION, inventory, chosen, flags, consequence, yes=yes)
