"""gpunodes repair"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import complete, connections, options, repair_options
from gpunodes.errors import WrongInput
from gpunodes.model import Kubeconfig
from gpunodes.repair import escalation


@click.command()
@click.argument("machines", nargs=-1, shell_complete=complete.machines)
@click.option(
    "--from",
    "first",
    type=click.Choice([step.name for step in escalation.steps()]),
    help="The escalation step to start at; by default the mildest that the verdict allows.",
)
@click.option("--reason", default="", metavar="TEXT", help="The reason, for the node's annotation and the history.")
@click.option("--resume", is_flag=True, help="Resume all interrupted repairs; start no new one.")
@repair_options.options
@connections.options
@options.kubeconfig_option
@options.inventory_option
@options.json_option
def command(
    machines: tuple[str, ...],
    first: str | None,
    reason: str,
    resume: bool,
    repair_flags: repair_options.RepairOptions,
    connection: connections.Connection,
    inventory_path: Path,
    kubeconfig: Kubeconfig | None,
    as_json: bool,
) -> int:
    """Repair machines: drain, reset or reboot, verify, uncordon.

    MACHINES are names, addresses, groups or patterns of the inventory; with --user, --key or --port they are addresses,
    and no inventory is read. They are repaired whatever their verdict, within
    the budget and the loop guard (settings gpunodes_repair_guard_repairs and gpunodes_repair_guard_hours). Interrupted
    repairs are resumed. Exit code 3 when a machine is not healthy at the end.
    """
    if bool(machines) == resume:
        raise WrongInput(
            "machines and --resume exclude each other" if resume else "no machine is named",
            "the machines to repair, or --resume",
            "name them, as in `gpunodes repair gpu-3`",
        )
    if resume and repair_flags.dry_run:
        raise WrongInput("--resume continues repairs", "no --dry-run with it", "leave one out")
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked
    from gpunodes.operations.repair import commands

    inventory, addressed = connections.inventory(inventory_path, machines, connection, checked.Needs.REPAIR, kubeconfig)
    connections.check_cluster(addressed=addressed, kubeconfig=kubeconfig, without_cluster=repair_flags.without_cluster)
    fleet = InventoryFleet(inventory)
    if resume:
        request = repair_options.request(repair_flags, "repair", fleet, (), by_hand=True)
        return repair_options.show(commands.resume(fleet, request, repair_options.lines().report), as_json=as_json)
    chosen = inventory.select(machines)
    request = repair_options.request(
        repair_flags, "repair", fleet, machines, by_hand=True, first=first or "", reason=reason
    )
    return repair_options.carry_out(fleet, chosen, request, yes=repair_flags.yes, as_json=as_json)
