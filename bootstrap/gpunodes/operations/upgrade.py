"""Upgrades of a whole cluster's Kubernetes: roll-outs of its control planes, of its kubelets, then its add-ons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import WrongInput
from gpunodes.model import Machine, Role
from gpunodes.operations import addons
from gpunodes.operations.rolling import commands, following, status, upgrades
from gpunodes.operations.rolling.context import Report
from gpunodes.operations.rolling.work import Work
from gpunodes.planner.upgrade_model import Part, UpgradePlan
from gpunodes.rollout import state
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.record import RolloutOutcome
from gpunodes.rollout.result import MachineRollout, RolloutResult
from gpunodes.rollout.state import Following


def roll_out(
    fleet: InventoryFleet,
    plan: UpgradePlan,
    machines: Sequence[Machine],
    options: RolloutOptions,
    report: Report,
) -> list[RolloutResult]:
    """Upgrade those of ``machines`` that have a step in ``plan``: control planes, kubelets, then the add-ons.

    All of it is in the record of the first roll-out, so that ``following.resume`` continues to the end. What follows a
    roll-out that did not end well is not begun. Those of ``machines`` that the plan passes over are results, too.
    Raises GpunodesError as ``commands.roll_out`` and ``check_selection``, and if the add-ons cannot be updated.
    """
    check_selection(plan, machines)
    inventory, parts = fleet.inventory, list[tuple[Work, list[Machine]]]()
    for part, work in (
        (Part.CONTROL_PLANE, upgrades.ControlPlaneUpgrade(inventory, plan.target)),
        (Part.NODE, upgrades.KubeletUpgrade(inventory, plan.target)),
    ):
        names = {step.machine for step in plan.steps if step.part is part}
        if chosen := [machine for machine in machines if machine.name in names]:
            parts.append((work, chosen))
    names = {machine.name for machine in machines}
    skipped = [
        MachineRollout(each.machine, RolloutOutcome.SKIPPED, each.why)
        for each in plan.passed_over
        if each.machine in names
    ]
    has_addons = not plan.holds_addons and {step.machine for step in plan.steps} <= names
    if not parts:
        if has_addons:
            addons.upgrade(fleet, inventory, report)
        return _with_skipped([], skipped)
    (first, chosen), *later = parts
    then = [Following(each.name, dict(each.parameters), [machine.name for machine in of]) for each, of in later]
    then += [Following(state.ADDONS)] if has_addons else []
    result = commands.roll_out(fleet, chosen, first, options, report, "upgrade", then)
    return _with_skipped(following.follow(result, fleet, report, "upgrade"), skipped)


def _with_skipped(results: Sequence[RolloutResult], skipped: Sequence[MachineRollout]) -> list[RolloutResult]:
    """The same with machines that were passed over: in the result of the kubelets, or as one of their own."""
    if not skipped:
        return list(results)
    if any(each.work == upgrades.KUBELETS for each in results):
        return [
            replace(each, machines=[*each.machines, *skipped]) if each.work == upgrades.KUBELETS else each
            for each in results
        ]
    return [*results, RolloutResult("", upgrades.KUBELETS, skipped)]


def check_selection(plan: UpgradePlan, machines: Sequence[Machine]) -> None:
    """Raise WrongInput if kubelets among ``machines`` would get newer than a control plane that is left out."""
    chosen = {machine.name for machine in machines}
    left = [step for step in plan.steps if step.part is Part.CONTROL_PLANE and step.machine not in chosen]
    if left and any(step.machine in chosen for step in plan.steps):
        shown = state.names([f"{step.machine} ({step.present or 'of an unknown version'})" for step in left])
        raise WrongInput(
            f"--only leaves out control planes that do not have {plan.target} yet: {shown}",
            "all control planes before any kubelet: a kubelet is never newer than an API server",
            "upgrade them first, with --only control_plane, or leave out --only",
        )


def check_unfinished(fleet: InventoryFleet, report: Report) -> None:
    """Raise WrongInput unless an upgrade of Kubernetes stands unfinished in the cluster."""
    found = status.read(fleet, report).rollout
    if found is None or found.work not in {upgrades.CONTROL_PLANES, upgrades.KUBELETS, state.ADDONS}:
        what = f"the unfinished roll-out is of {found.work}" if found else "no roll-out is unfinished"
        raise WrongInput(what, "an upgrade of Kubernetes", "`gpunodes rollout status` shows it")


def check_workers(machines: Sequence[Machine]) -> None:
    """Raise WrongInput unless all machines are workers, whose kubelets alone can go back."""
    for machine in machines:
        if machine.role is not Role.WORKER:
            raise WrongInput(
                f"{machine.name} is a control plane",
                "workers: a control plane does not return to an older version",
                "name workers; a backup of etcd brings back objects, not versions: `gpunodes help --page backup`",
            )
