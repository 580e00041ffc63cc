"""gpunodes os upgrade"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, complete, options, rollout_options, terminal


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@click.option("--security", is_flag=True, help="Only packages with a security update.")
@click.option(
    "--reboot",
    type=click.Choice(["never", "if-needed"]),
    default="never",
    show_default=True,
    help="Whether a machine is rebooted when its kernel or a running service needs it.",
)
@rollout_options.rollout_options
@common.ansible_options
@options.json_option
def command(
    machines: tuple[str, ...],
    security: bool,
    reboot: str,
    rollout_flags: rollout_options.RolloutFlags,
    inventory_path: Path,
    as_json: bool,
) -> int:
    """Upgrade the packages of nodes, one node after the other.

    MACHINES are names, addresses, groups or patterns of the inventory. First their pending packages are read, and
    nodes with nothing to do are left alone. Each other node is drained, upgraded, verified and given back. Packages
    that gpunodes installed stay as they are. A kernel for which the GPU driver does not build is held.

    Exit code 3 when it did not end well on all machines: `gpunodes rollout resume` continues.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.errors import Interrupted
    from gpunodes.operations import checked, os_plan
    from gpunodes.operations.rolling import commands, upgrades
    from gpunodes.views import os_plan as view_of
    from gpunodes.views import text

    terminal.check_confirmable("os upgrade", yes=rollout_flags.yes)
    inventory, report = checked.inventory(inventory_path, checked.Needs.CLUSTER), rollout_options.lines()
    fleet = InventoryFleet(inventory)
    chosen = rollout_options.select(inventory, machines, rollout_flags)
    wanted = rollout_options.request(rollout_flags, fleet.settings())
    rollout_options.wake(fleet, chosen, rollout_flags, report)
    reboots, view = reboot == "if-needed", text.progress()
    try:
        plan = os_plan.run(inventory, chosen, view, security=security)
    finally:
        view.close()
    if plan.interrupted:
        raise Interrupted
    terminal.report(view_of.plan(plan), err=True)
    if count := sum(bool(each.needed(reboot=reboots)) for each in plan.machines):
        rebooted = ", and rebooted if needed" if reboots else ""
        terminal.confirm(f"{count} nodes are drained, their packages upgraded{rebooted}", yes=rollout_flags.yes)
    work = upgrades.SystemUpgrade(inventory, security=security, reboot=reboots, plan=plan)
    done = commands.roll_out(fleet, chosen, work, wanted, report, "os upgrade")
    return rollout_options.show(done, as_json=as_json)
