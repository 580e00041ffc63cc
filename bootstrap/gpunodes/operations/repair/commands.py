"""The commands that repair machines: each is told here from its first scan to its result."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from gpunodes.engine import evidence, records
from gpunodes.engine.fleet import Fleet, repair_settings
from gpunodes.engine.scans import MachineScan
from gpunodes.errors import WrongInput
from gpunodes.health.model import Action
from gpunodes.model import Machine
from gpunodes.operations.repair import deciding, scanning, starting, unfinished
from gpunodes.operations.repair.context import RepairCommand, Report, opened
from gpunodes.operations.repair.running import Repairs
from gpunodes.operations.repair.unfinished import Unfinished
from gpunodes.repair import policy
from gpunodes.repair.policy import RepairLimits
from gpunodes.repair.request import RepairRequest
from gpunodes.repair.result import RepairResult


def run(
    fleet: Fleet,
    machines: Sequence[Machine],
    request: RepairRequest,
    report: Report,
    verdicts: Mapping[str, MachineScan] | None = None,
) -> RepairResult:
    """Repair ``machines`` as the request allows; returns when all started repairs have ended and no more can start.

    ``verdicts`` are the results of an earlier scan. Raises GpunodesError before anything is changed if the control
    plane does not respond, or another command holds the decision lock for too long.
    """
    with opened(fleet, machines, request, report) as command:
        left = unfinished.find(command, command.machines)
        _prune_evidence(command, left)
        fresh = [machine for machine in machines if machine.name not in left.records]
        scans = scanning.scan(command, fresh, verdicts)
        with Repairs(command, scans) as repairs:
            starting.resume_all(command, repairs, left)
            choice = deciding.Choice(command, repairs, scans)
            starting.repair_all(choice, [machine.name for machine in fresh])
        return _result(command, repairs)


def resume(fleet: Fleet, request: RepairRequest, report: Report) -> RepairResult:
    """Resume every repair that a command left unfinished: on this controller, or in the cluster's locks."""
    with opened(fleet, fleet.all_machines(), request, report) as command:
        left = unfinished.find(command)
        _prune_evidence(command, left)
        with Repairs(command, {}) as repairs:
            starting.resume_all(command, repairs, left)
            repairs.finish()
        return _result(command, repairs)


def limits(given: Mapping[str, object], max_unavailable: str | None, actions: str, *, by_hand: bool) -> RepairLimits:
    """The limits set by the settings and the user; raises WrongInput."""
    numbers = repair_settings(given)
    allowed = (Action.RESET_GPU, Action.REBOOT)
    chosen = {name.strip() for name in actions.split(",")}
    if wrong := sorted(chosen - {action.value for action in allowed}):
        raise WrongInput(
            f"{wrong[0]!r} is not an action of repairs",
            f"some of {', '.join(action.value for action in allowed)}",
            "correct --actions",
        )
    return RepairLimits(
        actions=frozenset(Action(name) for name in chosen),
        max_unavailable=policy.budget(str(max_unavailable or numbers["gpunodes_repair_max_unavailable"])),
        unhealthy_percent=int(numbers["gpunodes_repair_unhealthy_percent"]),
        guard_repairs=int(numbers["gpunodes_repair_guard_repairs"]),
        guard_hours=float(numbers["gpunodes_repair_guard_hours"]),
        by_hand=by_hand,
    )


def _prune_evidence(command: RepairCommand, left: Unfinished) -> None:
    """Delete old evidence, except that of unfinished repairs, also of machines that the command is not about."""
    if not command.request.dry_run:
        days, mib = (command.settings[f"gpunodes_repair_evidence_{limit}"] for limit in ("days", "mib"))
        with contextlib.suppress(OSError):
            evidence.prune(days, mib, {*records.repairs(), *(record.id for record in left.records.values())})


def _result(command: RepairCommand, repairs: Repairs) -> RepairResult:
    order = list(command.machines)
    found = sorted(repairs.results.values(), key=lambda each: order.index(each.machine) if each.machine in order else 0)
    return RepairResult(command.request.command, found, command.request.dry_run, repairs.interrupted)
