"""The stage that resets or reboots a machine: one escalation step is ordered, and its effect is awaited."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence

from gpunodes.engine.cluster.errors import NoResponse, Refused
from gpunodes.engine.history import EntryKind
from gpunodes.engine.locks import clock
from gpunodes.engine.machine_control import Boot, StepResult
from gpunodes.engine.remote.shell import Reached
from gpunodes.errors import GpunodesError
from gpunodes.operations.repair.tools import Tools
from gpunodes.repair import escalation, flow, resume
from gpunodes.repair.escalation import Channel, EscalationStep, VerifiedBy
from gpunodes.repair.flow import StepOutcome
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage


def escalate(tools: Tools, record: RepairRecord) -> RepairRecord:
    """Perform the record's escalation step; the record of the next stage."""
    step = escalation.step(record.step)
    began = time.monotonic()
    if step.verified_by is VerifiedBy.BOOT and _rebooted(record, tools.control.boot(), 0.0):
        return _ended(tools, record, step, StepOutcome.SUCCEEDED, "the machine is in another boot", began)
    if not record.ordered_at:
        tools.lock.confirm(record)
        # A machine performs an armed step by itself: the repair goes on until that boot is verified.
        if step.name not in dict(record.armed) and (why := _interrupted(tools, record)):
            return record.to(Stage.UNDO, outcome=RepairOutcome.NOT_REPAIRED, why=why)
        result, why, record = _order(tools, record, step)
        if result is not None:
            return _ended(tools, record, step, result, why, began)
    if step.verified_by is VerifiedBy.GPU:
        return _ended(tools, record, step, StepOutcome.SUCCEEDED, "nvidia-smi reports the reset", began)
    result, why, performed = _watch(tools, record, step)
    for higher in performed:
        record = _ended(tools, record, step, StepOutcome.FAILED, "the machine escalated by itself", began)
        step = higher
    return _ended(tools, record, step, result, why, began)


def _interrupted(tools: Tools, record: RepairRecord) -> str:
    """Why no step may be ordered, "" if one may: `kubectl` takes no lock, and the drain and the boots take minutes."""
    if not tools.cluster:
        return ""
    try:
        node = tools.cluster.node(record.node, wait=not tools.lock.stops_api)
    except (NoResponse, Refused):
        # etcd without its quorum is an error of the server.
        if not tools.lock.stops_api:
            raise
        return ""
    return resume.outdated(record, node) or resume.forbidden(record, node, tools.now())


def _order(tools: Tools, record: RepairRecord, step: EscalationStep) -> tuple[StepOutcome | None, str, RepairRecord]:
    """Order a step: its outcome, None while it takes effect; why; and the record with the time of the order."""
    if step.channel is Channel.POWER and not tools.control.has_power():
        return StepOutcome.SKIPPED, "no BMC is configured", record
    # The read of the node may have waited for the API.
    tools.lock.check(record)
    confirm = functools.partial(tools.lock.confirm, record)
    tools.report(f"{step.title}")
    if step.channel is Channel.POWER:
        try:
            # Confirmed again before each order: the BMC is compared with the machine first, which may take minutes.
            tools.control.cold_cycle(confirm) if step.name == escalation.COLD else tools.control.reset(confirm)
        except GpunodesError as problem:
            confirm()  # a lock that is lost is no failure of the step
            return StepOutcome.FAILED, str(problem), record
        ordered_at, armed = tools.now(), record.armed
    else:
        later = escalation.armed(step.name, hung=record.hung) if step.verified_by is VerifiedBy.BOOT else []
        ordered = _order_over_ssh(tools, record, step, later)
        ordered_at, due = tools.now(), dict(record.armed)
        if not ordered.done and step.name not in due:
            return StepOutcome.SKIPPED, ordered.message, record
        if not ordered.done:
            tools.report(
                f"{step.title}: {ordered.message}; the machine performs this step by itself, as ordered before"
            )
            ordered_at = max(ordered_at, due[step.name])
        # An earlier order takes effect first.
        new = {name: ordered_at + after for after, name in later if name in ordered.armed}
        armed = tuple((new | due).items())
    record = record.to(Stage.ESCALATE, ordered_at=ordered_at, armed=armed)
    tools.save(record)
    return None, "", record


def _order_over_ssh(
    tools: Tools, record: RepairRecord, step: EscalationStep, later: Sequence[tuple[float, str]]
) -> StepResult:
    if step.verified_by is not VerifiedBy.GPU:
        return tools.control.run_step(step, record.boot_id, later, ())
    if tools.cluster:
        tools.cluster.taint_temporarily(record.node, record.id)
    try:
        tools.lock.confirm(record)  # the API may have responded late
        return tools.control.run_step(step, record.boot_id, later, record.resets)
    finally:
        if tools.cluster:
            tools.cluster.untaint(record.node)


def _watch(
    tools: Tools, record: RepairRecord, step: EscalationStep
) -> tuple[StepOutcome, str, Sequence[EscalationStep]]:
    """Wait for another boot, or until the step's time limit; also the steps that the machine performed by itself.

    If the kernel responds but sshd does not, the machine is shutting down or booting: it must go down within the
    step's limit. If nothing responds, the machine is down: it gets the time of a boot.
    """
    down, silent, refused = False, 0, False
    # From here on by a clock that cannot be set. A step may be due later; a time far in the future is of a clock that
    # was set back.
    began = clock() - max(tools.now() - record.ordered_at, -tools.limits.boot)
    while True:
        tools.check_stop()
        seen = tools.control.boot()
        waited = clock() - began
        if _rebooted(record, seen, waited):
            why = f"boot {seen.boot_id} after {waited:.0f} s"
            return StepOutcome.SUCCEEDED, why, performed_by_itself(record, step, seen, waited)
        if seen.reached is Reached.NO_RESPONSE:
            silent += 1
            down = down or silent > 1
        else:
            silent = 0
            refused = seen.reached is not Reached.ENDED
            down = down and refused
        if waited > (tools.limits.boot if down else step.limit(hung=record.hung)):
            break
        tools.stop.wait(tools.limits.poll)
    why = "it is still running the old boot"
    if refused:
        why = "it hangs during shutdown (the kernel responds, sshd does not)"
    if down:
        why = "it went down and has not come back"
    return StepOutcome.FAILED, f"{why} after {waited:.0f} s", ()


def performed_by_itself(
    record: RepairRecord, step: EscalationStep, seen: Boot, waited: float
) -> Sequence[EscalationStep]:
    """The steps that a machine with a hung driver performed by itself before its new boot began.

    ``waited`` is how many seconds ago the step was ordered.

    A machine may lose its address during shutdown, so a hang there is not visible. But if the new kernel started
    after the next step was due, the machine performed that step. If the machine runs self-tests for minutes before
    it boots, this is only the highest step that is possible.
    """
    if not record.hung or not seen.uptime_s:
        return ()
    began = record.ordered_at + waited - seen.uptime_s
    escalated = {name for name, due in record.armed if due <= began}
    steps = escalation.steps()
    return [each for each in steps[steps.index(step) + 1 :] if each.name in escalated]


def _rebooted(record: RepairRecord, seen: Boot, waited: float) -> bool:
    if not seen.boot_id:
        return False
    if record.boot_id:
        return seen.boot_id != record.boot_id
    # The boot id before the step is unknown: the present boot must have begun after the order.
    return record.ordered_at > 0 and 0 < seen.uptime_s < waited


def _ended(
    tools: Tools, record: RepairRecord, step: EscalationStep, result: StepOutcome, why: str, began: float
) -> RepairRecord:
    tools.report(f"{step.title}: {result.value}: {why}")
    tools.note(record, EntryKind.STEP, step.name, result.value, why, time.monotonic() - began)
    if tools.cluster and result is not StepOutcome.SKIPPED:
        # For the loop guard of every controller. The control plane itself may have been rebooted.
        with contextlib.suppress(NoResponse, Refused):
            tools.cluster.note_repair(record.node, record.started)
    return flow.escalated(record, result, why)
