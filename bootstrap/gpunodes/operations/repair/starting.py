"""Starts repairs: those to resume, then those of the machines that are chosen, until no machine waits for one."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Iterator, Sequence

from gpunodes.engine import history
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.history import EntryKind, MachineHistory
from gpunodes.engine.leases.errors import Held, Lost
from gpunodes.errors import GpunodesError
from gpunodes.health.model import State
from gpunodes.operations.repair.context import RepairCommand
from gpunodes.operations.repair.deciding import Choice
from gpunodes.operations.repair.running import Repairs
from gpunodes.operations.repair.unfinished import Unfinished
from gpunodes.repair import escalation, findings
from gpunodes.repair.escalation import StartingStep
from gpunodes.repair.policy import Decision, MachineDecision
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage
from gpunodes.repair.result import MachineRepair

_CONTROL_PLANE_ALONE = "the control plane is never repaired at the same time as other machines"
_NOT_CONFIRMED = "it was not in the plan that was confirmed; run the command again"


# Unfinished repairs


def resume_all(command: RepairCommand, repairs: Repairs, left: Unfinished) -> None:
    """Resume unfinished repairs; that of a control plane comes last, and never together with others."""
    for name, record in sorted(left.records.items(), key=lambda item: command.is_control_plane(item[0])):
        while repairs.control_plane_busy(name):
            repairs.reap()
        if why := _not_resumable(command, record, left.mismatched.get(name, "")):
            repairs.add(MachineRepair(name, Decision.REFUSE, why, repair=record.id))
            continue
        if command.request.dry_run:
            why = f"its unfinished repair {record.id} is resumed at stage {record.stage.value}"
            repairs.add(MachineRepair(name, Decision.REPAIR, why, repair=record.id))
            continue
        try:
            command.report(name, f"resuming {record.id} at stage {record.stage.value}")
            repairs.start(command.machines[name], record)
        except Exception as problem:
            repairs.refuse(name, problem, record.id)


def _not_resumable(command: RepairCommand, record: RepairRecord, mismatched: str) -> str:
    if record.machine not in command.machines:
        return f"it has an unfinished repair ({record.id}) but is not in the inventory"
    if mismatched:
        return mismatched
    if record.node and not command.leases:
        return "its unfinished repair uses the cluster; omit --without-cluster to resume it"
    if command.leases and not record.node:
        # Its node has neither a cordon nor a Lease, and may have pods.
        return (
            "its unfinished repair was begun with --without-cluster; resume it with that option, or end it with "
            f"`gpunodes uncordon {record.machine} --without-cluster`"
        )
    return "" if command.request.allows(record.machine) else _NOT_CONFIRMED


# New repairs


def repair_all(choice: Choice, names: Sequence[str]) -> None:
    """Decide and start repairs, until no machine waits for a repair of this command."""
    repairs = choice.repairs
    waiting, decisions = list(names), list[MachineDecision]()
    # Resumed repairs that have ended took their time, too.
    waited = any(each.outcome is not None for each in repairs.results.values())
    while waiting or repairs.busy():
        outdated, before = False, len(waiting)
        try:
            if waited:
                choice.scan_again(waiting)
            decisions = _decide_and_start(choice, waiting) if waiting else []
        except Lost:
            outdated = True  # another command has decided in the meantime: decide again
        except GpunodesError as problem:
            # Started repairs go on.
            if not repairs.busy() and not repairs.results:
                raise
            decisions = _undecided(repairs, waiting, problem)
        waiting = [name for name in waiting if name not in repairs.results and name not in repairs.busy()]
        waited = True
        if outdated:
            continue
        if repairs.busy():
            repairs.reap()
        elif not waiting or len(waiting) == before:
            break
        # Otherwise the others may have waited for one that could not be started.
    repairs.finish()
    for decision in decisions:
        if decision.machine in waiting:
            with _own_result(repairs, decision.machine):
                _skip(choice, decision)


@contextlib.contextmanager
def _own_result(repairs: Repairs, machine: str) -> Iterator[None]:
    """An error inside is the result of this machine, and does not affect others; a lost decision is none."""
    try:
        yield
    except Lost:
        raise
    except Exception as problem:
        repairs.refuse(machine, problem)


def _undecided(repairs: Repairs, waiting: Sequence[str], problem: GpunodesError) -> list[MachineDecision]:
    """Decisions for machines without one: refused now, or later if the reason may still change."""
    if isinstance(problem, Held | NoResponse):
        # It is decided again when a running repair ends.
        return [MachineDecision(name, Decision.REFUSE, str(problem)) for name in waiting]
    for name in waiting:
        if name not in repairs.results and name not in repairs.busy():
            repairs.refuse(name, problem)
    return []


def _decide_and_start(choice: Choice, waiting: Sequence[str]) -> list[MachineDecision]:
    command, repairs = choice.command, choice.repairs
    with _deciding(command):
        decisions = choice.decide(waiting)
        for each in decisions:
            decision = _now(choice, each)
            with _own_result(repairs, decision.machine):
                if _starts(command, decision):
                    _start(choice, decision)
                elif decision.decision is not Decision.WAIT or command.request.dry_run:
                    _skip(choice, decision)
    return decisions


def _now(choice: Choice, decision: MachineDecision) -> MachineDecision:
    """A decision as it applies now: the repairs that this command has just started, and the user, limit it."""
    machine = decision.machine
    if decision.decision in (Decision.REPAIR, Decision.WAIT) and not choice.command.request.allows(machine):
        return dataclasses.replace(decision, decision=Decision.REFUSE, why=_NOT_CONFIRMED)
    if decision.decision is Decision.REPAIR and choice.repairs.control_plane_busy(machine):
        return dataclasses.replace(decision, decision=Decision.WAIT, why=_CONTROL_PLANE_ALONE)
    return decision


@contextlib.contextmanager
def _deciding(command: RepairCommand) -> Iterator[None]:
    # A plan changes nothing, and takes no lock.
    if command.leases and not command.request.dry_run:
        with command.leases.deciding():
            yield
    else:
        yield


def _starts(command: RepairCommand, decision: MachineDecision) -> bool:
    return (decision.decision is Decision.REPAIR or decision.give_up) and not command.request.dry_run


def _start(choice: Choice, decision: MachineDecision) -> None:
    command, name = choice.command, decision.machine
    confirm = command.leases.confirm_decision if command.leases else lambda: None
    # Before anything is noted of it, and again when the machine is locked.
    confirm()
    record = _new_record(choice, name)
    _note_verdict(choice, name, record.started, record.reason, record.id)
    if decision.give_up:
        record = record.to(Stage.GIVE_UP, outcome=RepairOutcome.NEEDS_REPAIR, why=decision.why)
    else:
        first = _first_step(choice, name)
        command.report(name, f"{record.reason}; first step: {first.step.title}")
        for step in first.skipped:
            command.report(name, f"{step.title}: skipped, {first.why}")
    choice.repairs.start(command.machines[name], record, confirm)


def _new_record(choice: Choice, name: str) -> RepairRecord:
    request, seen = choice.command.request, choice.scans[name]
    verdict = seen.verdict
    node = choice.nodes[name] if choice.command.cluster else None
    cause = "requested by the user" if request.limits.by_hand else verdict.action.value
    # An unreachable machine, or one without a ready kubelet, does not terminate pods gracefully either.
    hung = verdict.hung_in_driver or verdict.state is State.UNREACHABLE or (node is not None and not node.ready)
    # The loop guard of every controller compares it with the same clock.
    now = float(int(choice.command.now()))
    return RepairRecord(
        id=f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}-{name}-{secrets.token_hex(3)}",
        machine=name,
        cluster=choice.command.fleet.cluster_name,
        started=now,
        reason=request.reason or f"{cause}: {findings.describe(verdict)}",
        action=verdict.action.value,
        stage=Stage.LOCK,
        hung=hung,
        node=node.name if node else "",
        first_step=_first_step(choice, name).step.name,
        named=name in request.named,
        force_drain=request.force_drain,
        bug_report=request.bug_report,
        boot_id=verdict.boot_id or (node.boot_id if node else ""),
        gpus=verdict.gpus_expected,
        resets=findings.resets(verdict, seen.facts),
        capacity=node.expected if node else None,
    )


def _first_step(choice: Choice, name: str) -> StartingStep:
    seen = choice.scans[name]
    return escalation.start(seen.verdict, choice.command.request.first, findings.faults(seen.verdict, seen.facts))


# Machines without a repair


def _skip(choice: Choice, decision: MachineDecision) -> None:
    """Leave a machine as it is; the reason is added to the history once, until it changes."""
    choice.repairs.add(_unrepaired(choice, decision))
    why = f"{decision.decision.value}: {decision.why}"
    known = choice.histories.get(decision.machine, MachineHistory()).not_repaired
    if not choice.command.request.dry_run and decision.decision is not Decision.NOTHING and why != known:
        _note_verdict(choice, decision.machine, time.time(), why)


def _unrepaired(choice: Choice, decision: MachineDecision) -> MachineRepair:
    """The result for a machine that is not repaired now."""
    verdict = choice.scans[decision.machine].verdict
    plan = MachineRepair(decision.machine, decision.decision, decision.why, verdict=verdict)
    if decision.decision not in (Decision.REPAIR, Decision.WAIT):
        return plan
    first = _first_step(choice, decision.machine)
    skipped = [f"{step.title}: {first.why}" for step in first.skipped]
    return dataclasses.replace(plan, step=first.step.name, skipped=skipped)


def _note_verdict(choice: Choice, machine: str, moment: float, why: str, repair: str = "") -> None:
    verdict = choice.scans[machine].verdict
    history.note(
        machine,
        choice.command.fleet.cluster_name,
        EntryKind.VERDICT,
        verdict.action.value,
        verdict.state.value,
        why,
        moment=moment,
        repair=repair,
        evidence=findings.first_lines(verdict),
    )
