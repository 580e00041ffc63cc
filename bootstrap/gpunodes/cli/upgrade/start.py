"""gpunodes upgrade start"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpunodes.cli import common, options, rollout_options, terminal
from gpunodes.errors import WrongInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpunodes.inventory import Inventory
    from gpunodes.model import Machine
    from gpunodes.planner.upgrade_model import UpgradePlan


@click.command()
@click.argument("target", required=False)
@click.option("--no-backup", is_flag=True, help="Do not write a backup of etcd into the current folder first.")
@click.option("--resume", is_flag=True, help="Continue an unfinished upgrade as it began, to its end.")
@rollout_options.rollout_options
@common.ansible_options
@options.json_option
def command(
    target: str | None,
    no_backup: bool,
    resume: bool,
    rollout_flags: rollout_options.RolloutFlags,
    inventory_path: Path,
    as_json: bool,
) -> int:
    """Upgrade Kubernetes node by node.

    TARGET is the next minor, such as 1.37, or an exact version. First a backup of etcd is written; then the control
    planes are upgraded one after the other, then the kubelets within the budget: each node is drained, upgraded,
    verified and given back. It stops at the first failure; a worker whose upgrade failed gets its older kubelet back. A
    node that cannot be drained is given back as it was, and the others go on. Workers in maintenance, and those that
    are off, do not respond or are not ready, are passed over and named.

    Exit code 3 when it did not end well on all machines: `gpunodes upgrade --resume` continues. If nothing is left to
    resume, run the same command again for machines that were skipped.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked, upgrade
    from gpunodes.operations.rolling import following
    from gpunodes.rollout.state import ADDONS

    if bool(target) == resume or (resume and rollout_flags.changes):
        raise WrongInput(
            "--resume with a version or with other options" if resume else "upgrade without a version",
            "a version, or --resume alone",
            "`gpunodes upgrade 1.37` begins an upgrade, `gpunodes upgrade --resume` continues one as it began",
        )
    if not resume:
        terminal.check_confirmable("upgrade", yes=rollout_flags.yes)
    inventory, report = checked.inventory(inventory_path, checked.Needs.CLUSTER), rollout_options.lines()
    fleet = InventoryFleet(inventory)
    if resume:
        upgrade.check_unfinished(fleet, report)
        resumed = following.resume(fleet, report, "upgrade --resume")
        if all(each.work != ADDONS for each in resumed):
            # It stopped, or its --only left machines out, and the add-ons come after the last machine.
            terminal.line("run `gpunodes upgrade` with the version for what this roll-out left out", err=True)
        return rollout_options.show_all(resumed, as_json=as_json)
    wanted = rollout_options.request(rollout_flags, fleet.settings())
    machines = rollout_options.select(inventory, (), rollout_flags)
    rollout_options.wake(fleet, machines, rollout_flags, report, lambda: _plan(inventory, str(target), machines))
    plan = _plan(inventory, str(target), machines)
    if behind := {step.machine for step in plan.steps} & {machine.name for machine in machines}:
        many = f"{len(behind)} machines are" if len(behind) > 1 else f"{next(iter(behind))} is"
        what = f"{many} upgraded to {plan.target}; each node is drained, one after the other"
        terminal.confirm(what, yes=rollout_flags.yes)
        if not no_backup:
            _back_up(inventory)
    elif not plan.steps and not plan.holds_addons:
        others = "other " if plan.passed_over else ""
        what = (
            f"all {others}machines have {plan.target}; the add-ons get the versions of this gpunodes, if they are older"
        )
        terminal.confirm(what, yes=rollout_flags.yes)
    done = upgrade.roll_out(fleet, plan, machines, wanted, report)
    return rollout_options.show_all(done, as_json=as_json, none="nothing to upgrade")


def _plan(inventory: Inventory, target: str, machines: Sequence[Machine]) -> UpgradePlan:
    """The plan; raises WrongInput, after it was shown, if something is in the way of upgrading ``machines``."""
    from gpunodes.operations import upgrade, upgrade_plan
    from gpunodes.planner.upgrade import of_machines
    from gpunodes.views import text
    from gpunodes.views import upgrade as view_of

    view = text.progress()
    try:
        found = upgrade_plan.run(inventory, target, view).plan
    finally:
        view.close()
    plan = of_machines(found, [machine.name for machine in machines])
    terminal.report(view_of.table_of(plan), err=True)
    if not plan.possible:
        raise WrongInput(
            f"the upgrade to {target} is not possible yet", "a plan without findings", "see the plan above"
        )
    upgrade.check_selection(plan, machines)
    return plan


def _back_up(inventory: Inventory) -> None:
    from gpunodes.operations.etcd import backup

    saved = backup.run(inventory, None, "", lambda line: terminal.line(line, err=True))
    terminal.line(f"backup: {saved.path}", err=True)
