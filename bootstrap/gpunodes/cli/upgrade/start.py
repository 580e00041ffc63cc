"""gpunodes upgrade start"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpunodes.cli import common, options, rollout_options, terminal
from gpunodes.errors import ExitCode, WrongInput

if TYPE_CHECKING:
    from gpunodes.inventory import Inventory
    from gpunodes.planner.upgrade_model import UpgradePlan
    from gpunodes.rollout.result import RolloutResult


@click.command()
@click.argument("target", required=False)
@click.option("--no-backup", is_flag=True, help="Do not write a backup of etcd into the current folder first.")
@click.option("--resume", is_flag=True, help="Continue the unfinished roll-out of an upgrade as it began.")
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
    node that cannot be drained is given back as it was, and the others go on.

    Exit code 3 when it did not end well on all machines: run the same command again.
    """
    from gpunodes.engine.fleet import InventoryFleet
    from gpunodes.operations import checked, upgrade
    from gpunodes.operations.rolling import commands

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
        # Only its machines: --only may have left others out.
        upgrade.check_unfinished(fleet, report)
        resumed = commands.resume(fleet, report, "upgrade --resume")
        terminal.line("run `gpunodes upgrade` with the version for what this roll-out left out", err=True)
        return _show([resumed], as_json=as_json)
    wanted = rollout_options.request(rollout_flags, fleet.settings())
    machines = rollout_options.select(inventory, (), rollout_flags)
    plan = _plan(inventory, str(target))
    if behind := {step.machine for step in plan.steps} & {machine.name for machine in machines}:
        many = f"{len(behind)} machines are" if len(behind) > 1 else f"{next(iter(behind))} is"
        what = f"{many} upgraded to {plan.target}; each node is drained, one after the other"
        terminal.confirm(what, yes=rollout_flags.yes)
        if not no_backup:
            _back_up(inventory)
    elif not plan.steps:
        what = f"all machines have {plan.target}; the add-ons get the versions of this gpunodes, if they are older"
        terminal.confirm(what, yes=rollout_flags.yes)
    return _show(upgrade.roll_out(fleet, plan, machines, wanted, report), as_json=as_json)


def _plan(inventory: Inventory, target: str) -> UpgradePlan:
    """The plan; raises WrongInput, after it was shown, if something is in the way."""
    from gpunodes.operations import upgrade_plan
    from gpunodes.views import text
    from gpunodes.views import upgrade as view_of

    view = text.progress()
    try:
        plan = upgrade_plan.run(inventory, target, view).plan
    finally:
        view.close()
    terminal.line(view_of.table_of(plan), err=True)
    if not plan.possible:
        raise WrongInput(
            f"the upgrade to {target} is not possible yet", "a plan without findings", "see the plan above"
        )
    return plan


def _back_up(inventory: Inventory) -> None:
    from gpunodes.operations.etcd import backup

    saved = backup.run(inventory, None, "", lambda line: terminal.line(line, err=True))
    terminal.line(f"backup: {saved.path}", err=True)


def _show(results: list[RolloutResult], *, as_json: bool) -> int:
    from gpunodes.views import document
    from gpunodes.views import rollout as views

    code = next((result.exit_code for result in results if result.exit_code is not ExitCode.DONE), ExitCode.DONE)
    if as_json:
        rollouts = [views.document(result) for result in results]
        terminal.echo(document.dump({"schema": "gpunodes.upgrade/1", "exit_code": int(code), "rollouts": rollouts}))
        return int(code)
    for result in results:
        rollout_options.show(result, as_json=False)
    if not results:
        terminal.line("nothing to upgrade")
    return int(code)
