"""gpunodes repair"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, repair_options
from gpunodes.errors import WrongInput
from gpunodes.repair import escalation


@click.command()
@click.argument("machines", nargs=-1)
@click.option(
    "--from",
    "first",
    type=click.Choice([step.name for step in escalation.steps()]),
    help="The rung to start at; by default what the verdict asks for.",
)
@click.option("--reason", default="", metavar="TEXT", help="Why, for the node's annotation and the history.")
@click.option("--resume", is_flag=True, help="Go on with all repairs that a command left behind, and begin none.")
@repair_options.options
@common.inventory_option
@common.json_option
def command(
    machines: tuple[str, ...],
    first: str | None,
    reason: str,
    resume: bool,
    repair_flags: repair_options.RepairOptions,
    inventory_path: Path,
    as_json: bool,
) -> int:
    """Repair machines by hand: empty, reboot by whatever it takes, prove well, give back.

    MACHINES are names, addresses, groups or patterns of the inventory; they are repaired whatever their verdict, within
    the budget and the loop guard. A repair that a command left behind is gone on with. Exit code 3 when a machine is
    not well at the end.
    """
    if bool(machines) == resume:
        raise WrongInput(
            "machines and --resume exclude each other" if resume else "no machine is named",
            "the machines to repair, or --resume",
            "name them, as in `gpunodes repair gpu-3`",
        )
    if resume and repair_flags.dry_run:
        raise WrongInput("--resume goes on with what was begun", "no --dry-run beside it", "leave one out")
    from gpunodes.inventory import Inventory
    from gpunodes.operations import repair

    inventory = Inventory(inventory_path)
    fleet = repair.Fleet(inventory)
    if resume:
        request = repair_options.request(repair_flags, "repair", fleet, (), by_hand=True)
        return repair_options.show(repair.resume(fleet, request, repair_options.lines().say), as_json=as_json)
    chosen = inventory.select(machines)
    request = repair_options.request(
        repair_flags, "repair", fleet, machines, by_hand=True, first=first or "", reason=reason
    )
    return repair_options.carry_out(fleet, chosen, request, yes=repair_flags.yes, as_json=as_json)
