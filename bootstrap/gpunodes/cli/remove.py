"""gpunodes remove"""

from __future__ import annotations

import dataclasses
import functools

import click

from gpunodes.cli import common, complete, options
from gpunodes.model import Role
from gpunodes.operations import checked
from gpunodes.operations.phases import RESET
from gpunodes.operations.remove import OPERATION, check_removable, check_responses
from gpunodes.operations.storage import findings


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
@click.option(
    "--dead",
    is_flag=True,
    help="Remove a control plane that is gone, through another one; it must be switched off and not respond.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common.run_options(OPERATION)
def command(
    machines: tuple[str, ...],
    drain_timeout: int | None,
    force_drain: bool,
    dead: bool,
    yes: bool,
    flags: common.CommonOptions,
) -> int:
    """Drain a node, delete it from the cluster and reset its machine.

    MACHINES are names, addresses, groups or patterns of the inventory. Each machine's node is shown before anything is
    changed. A control plane also leaves etcd, if enough of its members work without it; control planes are removed one
    at a time.
    """
    inventory = checked.inventory(flags.inventory)
    chosen = inventory.select(machines, Role.CONTROL_PLANE, Role.WORKER)
    check_removable(inventory, chosen, dead=dead)
    if not dead:  # what is gone serves nothing
        findings.check_leaving(inventory, chosen)
    variables: dict[str, object] = {"gpunodes_drain_timeout": drain_timeout} if drain_timeout else {}
    if force_drain:
        variables["gpunodes_drain_force"] = True
    skip = flags.options.skip_phases
    if dead:
        # Pods of a machine that is gone cannot be drained, and it cannot be reset.
        variables |= {"gpunodes_drain_force": True, "drain_dead": True}
        skip = [*skip, RESET.name]
    options = dataclasses.replace(flags.options, variables=variables, skip_phases=skip)
    flags = dataclasses.replace(flags, options=options)
    consequence = "The nodes are drained and deleted, and the data of Kubernetes on {} is lost"
    if dead:
        consequence = "The node of {} and its member of etcd are deleted: it must be switched off and not come back"
    return common.execute_confirmed(
        OPERATION,
        inventory,
        chosen,
        flags,
        consequence,
        yes=yes,
        check_seen=functools.partial(check_responses, chosen, dead=dead),
    )
