"""gpunodes runtime upgrade"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import common, complete, options, rollout_options, terminal


@click.command()
@click.argument("machines", nargs=-1, required=True, shell_complete=complete.machines)
@rollout_options.rollout_options
@common.ansible_options
@options.json_option
def command(
    machines: tuple[str, ...], rollout_flags: rollout_options.RolloutFlags, inventory_path: Path, as_json: bool
) -> int:
    """Upgrade the container runtimes of nodes, one node after the other.

    MACHINES are names, addresses, groups or patterns of the inventory. containerd and runc, or Docker and cri-dockerd,
    and on GPU machines the container toolkit, get the newest versions that the settings allow, such as
    gpunodes_containerd_version. Each node is drained, upgraded, verified and given back. If that fails, the old
    packages are put back, and the roll-out stops.

    Exit code 3 when it did not end well on all machines: `gpunodes rollout resume` continues.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.errors import Interrupted
    from gpunodes.operations import checked, runtime_plan
    from gpunodes.operations.rolling import commands, runtime
    from gpunodes.views import runtime_plan as view_of
    from gpunodes.views import text

    terminal.check_confirmable("runtime upgrade", yes=rollout_flags.yes)
    inventory, report = checked.inventory(inventory_path, checked.Needs.CLUSTER), rollout_options.lines()
    fleet = InventoryFleet(inventory)
    chosen = rollout_options.select(inventory, machines, rollout_flags)
    wanted = rollout_options.request(rollout_flags, fleet.settings())
    rollout_options.wake(fleet, chosen, rollout_flags, report)
    view = text.progress()
    try:
        plan = runtime_plan.run(inventory, chosen, view)
    finally:
        view.close()
    if plan.interrupted:
        raise Interrupted
    terminal.report(view_of.plan(plan), err=True)
    count = sum(bool(each.needed) for each in plan.machines)
    if count:
        what = f"{count} nodes are drained, and their container runtimes replaced and restarted"
        terminal.confirm(what, yes=rollout_flags.yes)
    work = runtime.RuntimeUpgrade(inventory, plan)
    done = commands.roll_out(fleet, chosen, work, wanted, report, "runtime upgrade")
    return rollout_options.show(done, as_json=as_json)
