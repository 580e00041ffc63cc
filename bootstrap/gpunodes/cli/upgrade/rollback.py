"""gpunodes upgrade rollback"""

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
    """Return workers to the kubelet before their last upgrade.

    MACHINES are names, addresses, groups or patterns of the inventory. Their way back is checked, then each node is
    drained, gets the older kubelet, and must report it. A control plane does not return to an older version: a backup
    of etcd brings back its objects, not its version.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked, upgrade, upgrade_rollback
    from gpunodes.operations.rolling import commands, upgrades
    from gpunodes.rollout import state
    from gpunodes.views import text

    terminal.check_confirmable("upgrade rollback", yes=rollout_flags.yes)
    inventory, report = checked.inventory(inventory_path, checked.Needs.CLUSTER), rollout_options.lines()
    fleet = InventoryFleet(inventory)
    chosen = rollout_options.select(inventory, machines, rollout_flags)
    upgrade.check_workers(chosen)
    wanted = rollout_options.request(rollout_flags, fleet.settings())
    rollout_options.wake(fleet, chosen, rollout_flags, report)
    view = text.progress()
    try:
        back = upgrade_rollback.read(inventory, chosen, view)
    finally:
        view.close()
    if returning := [f"{name} ({version})" for name, version in back.items() if version]:
        what = f"{len(returning)} workers are drained and get their earlier kubelet: {state.names(returning)}"
        terminal.confirm(what, yes=rollout_flags.yes)
    work = upgrades.Rollback(inventory, back)
    return rollout_options.show(
        commands.roll_out(fleet, chosen, work, wanted, report, "upgrade rollback"), as_json=as_json
    )
