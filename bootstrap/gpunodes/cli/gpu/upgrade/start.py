"""gpunodes gpu upgrade start"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpunodes.cli import common, complete, options, rollout_options, terminal
from gpunodes.errors import Interrupted, WrongInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpunodes.inventory import Inventory
    from gpunodes.model import Machine
    from gpunodes.planner.gpu_upgrade import Upgrades


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@click.option(
    "--driver",
    required=True,
    metavar="BRANCH",
    help="Branch of the new driver, such as 590, or an exact version, such as 590.44.01.",
)
@click.option(
    "--reboot",
    type=click.Choice(["never", "if-needed"]),
    default="never",
    show_default=True,
    help="Whether a machine may be rebooted when its old driver cannot be unloaded; then all pods leave first.",
)
@rollout_options.rollout_options
@common.ansible_options
@options.json_option
def command(
    machines: tuple[str, ...],
    driver: str,
    reboot: str,
    rollout_flags: rollout_options.RolloutFlags,
    inventory_path: Path,
    as_json: bool,
) -> int:
    """Replace the driver of GPU nodes, one node after the other.

    MACHINES are names, addresses, groups or patterns of the inventory. Pods that use GPUs leave, the driver is replaced
    and its GPUs are verified. If that fails, the old driver is put back, and the roll-out stops. Machines that are off,
    or do not respond, are skipped and named. Put the driver into gpunodes_driver_branch, too: the next `gpunodes up`
    compares with it.

    Exit code 3 when it did not end well on all machines: `gpunodes rollout resume` continues.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked
    from gpunodes.operations.rolling import commands, upgrades
    from gpunodes.planner import gpu
    from gpunodes.rollout.record import RolloutOutcome
    from gpunodes.rollout.result import MachineRollout, RolloutResult

    terminal.check_confirmable("gpu upgrade", yes=rollout_flags.yes)
    inventory, report = checked.inventory(inventory_path, checked.Needs.CLUSTER), rollout_options.lines()
    fleet = InventoryFleet(inventory)
    chosen = rollout_options.select(inventory, machines, rollout_flags)
    wanted = rollout_options.request(rollout_flags, fleet.settings())
    # Before a machine is switched on: it refuses a driver that cannot be requested.
    gpu.check(gpu.RequestedSoftware("", driver))
    rollout_options.wake(fleet, chosen, rollout_flags, report, lambda: _check(inventory, chosen, driver))
    plan, left = _plan(inventory, chosen, driver)
    names = {each.name for each in plan.machines if each.upgrade and each.upgrade.needed}
    work = upgrades.DriverUpgrade(inventory, driver, reboot=reboot == "if-needed", plan=plan)
    if not names:
        results = [
            MachineRollout(each.name, RolloutOutcome.UNCHANGED, "it has this driver")
            for each in chosen
            if each.name not in left
        ]
        results += [MachineRollout(name, RolloutOutcome.SKIPPED, why) for name, why in left.items()]
        return rollout_options.show(RolloutResult("", work.name, results), as_json=as_json)
    # Those that are off or silent are results of the roll-out: it skips them.
    chosen = [machine for machine in chosen if machine.name in names or machine.name in left]
    terminal.confirm(f"{len(names)} nodes get another driver", yes=rollout_flags.yes)
    done = commands.roll_out(fleet, chosen, work, wanted, report, "gpu upgrade")
    return rollout_options.show(done, as_json=as_json)


def _check(inventory: Inventory, chosen: Sequence[Machine], driver: str) -> None:
    """Raise as ``_plan`` before a machine is switched on; without any that is on there is nothing to plan."""
    from gpunodes.operations import switched_off

    if switched_off.split(inventory, chosen)[0]:
        _plan(inventory, chosen, driver)


def _plan(inventory: Inventory, chosen: Sequence[Machine], driver: str) -> tuple[Upgrades, dict[str, str]]:
    """The plan of the machines that are on, and why those that are off or do not respond are skipped.

    Raises WrongInput, after it was shown, if something is in the way of the others.
    """
    from gpunodes.operations import gpu_upgrade_plan, switched_off
    from gpunodes.views import gpu_upgrade as view_of
    from gpunodes.views import text

    view = text.progress()
    try:
        on, off = switched_off.split(inventory, chosen, is_rolled_out=True)
        plan = gpu_upgrade_plan.run(inventory, on, view, {"gpunodes_driver_branch": driver})
    finally:
        view.close()
    terminal.report(view_of.plan(plan), err=True)
    if plan.interrupted:
        raise Interrupted
    if not plan.possible:
        raise WrongInput(
            "the upgrade is not possible on all of these machines",
            "machines that can get this driver",
            "see the plan above; leave the others out",
        )
    return plan, {**off, **plan.silent}
