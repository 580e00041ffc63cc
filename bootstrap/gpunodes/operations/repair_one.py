"""The repair of one machine, step by step.

What a step is about to do is on the disk, and in the machine's lock, before it does it.
Every step can be done again without harm; so any command can go on from a record that another one left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpunodes.engine import evidence, history, records
from gpunodes.engine.cluster import Cluster, NoResponse
from gpunodes.engine.leases import Leases, Unsure
from gpunodes.engine.locks import Lock, Unresponsive
from gpunodes.engine.machine_control import Boot, StepResult
from gpunodes.engine.shell import Reached
from gpunodes.errors import GpunodesError
from gpunodes.health.facts import read
from gpunodes.health.model import Action, State, Verdict
from gpunodes.operations.drain import drain
from gpunodes.repair import escalation, flow
from gpunodes.repair.escalation import Channel, EscalationStep, VerifiedBy
from gpunodes.repair.flow import StepOutcome
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage

_LEFT_ALONE_S = 20.0
"""Seconds in which a machine is not looked at while its node comes back."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long things may take, in seconds."""

    drain: float = 300.0
    drain_hung: float = 30.0
    boot: float = 900.0
    verify: float = 300.0
    settle: float = 10.0
    poll: float = 2.0


class ControlsMachine(Protocol):
    """What can be done to a machine; engine/hands.py does it."""

    def boot(self) -> Boot:
        """Which boot it is in."""

    def collect(self, folder: Path, facts: Mapping[str, Any] | None, *, bug_report: bool) -> list[str]:
        """Keep the evidence."""

    def run_step(
        self, step: EscalationStep, boot_id: str, later: Sequence[tuple[float, str]], gpus: Sequence[str]
    ) -> StepResult:
        """Use a rung that needs a shell."""

    def has_power(self) -> bool:
        """Whether it has a BMC."""

    def reset(self) -> None:
        """Reset it by its BMC."""

    def cold_cycle(self) -> None:
        """Take its power away and give it back."""


Scan = Callable[[str], tuple[Verdict, Mapping[str, Any] | None]]
"""Look at a machine now: the verdict, and the probe's facts where they came."""
Report = Callable[[str, str], None]
"""Tell of a machine."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a repair works with. ``cluster`` and ``leases`` are None where the cluster is left out."""

    scan: Scan
    say: Report
    limits: TimeLimits
    by: str
    cluster: Cluster | None = None
    leases: Leases | None = None
    lock: Lock | None = None
    """What keeps those away who find no API, while the control plane is repaired."""
    control_plane: bool = False
    """The machine is the control plane: nobody can be asked for its lock while it starts."""
    stop: threading.Event = field(default_factory=threading.Event)


class Stopped(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The command was interrupted; the repair can be gone on with."""


class OneRepair:
    """Walks one record to its end."""

    def __init__(
        self,
        record: RepairRecord,
        machine_control: ControlsMachine,
        tools: Tools,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._record = record
        self._machine_control = machine_control
        self._tools = tools
        self._facts = facts
        self._began = time.monotonic()
        self._told_unsure = False
        self._steps: Mapping[Stage, Callable[[RepairRecord], RepairRecord]] = {
            Stage.COLLECT: self._collect,
            Stage.CORDON: self._cordon,
            Stage.DRAIN: self._drain,
            Stage.ESCALATE: self._escalate,
            Stage.VERIFY: self._verify,
            Stage.UNCORDON: self._give_back,
            Stage.UNDO: self._give_back,
            Stage.GIVE_UP: self._give_up,
            Stage.RELEASE: self._release,
        }

    def run(self) -> RepairRecord:
        """Go on from the record's step to the end; the last record.

        Raises GpunodesError when it cannot go on now (the control plane does not answer, the lock was lost, the
        command was interrupted): the record stays, and ``gpunodes repair --resume`` goes on.
        """
        record = self._record
        if record.stage in (Stage.SCAN, Stage.LOCK):
            record = record.to(Stage.COLLECT)
        while record.stage is not Stage.END:
            self._alive()
            self._keep(record)
            record = self._steps[record.stage](record)
        records.remove(record)
        return record

    # Steps

    def _collect(self, record: RepairRecord) -> RepairRecord:
        self._say("collecting the evidence")
        folder = evidence.open_folder(record.id)
        try:
            written = self._machine_control.collect(folder, self._facts, bug_report=record.bug_report)
        finally:
            evidence.close_folder(record.id)
        self._note(
            record, history.EntryKind.STAGE, "collect", detail=f"{folder}: {', '.join(written)}" if written else ""
        )
        return record.to(Stage.CORDON)

    def _cordon(self, record: RepairRecord) -> RepairRecord:
        if self._tools.cluster and record.node:
            ours = self._tools.cluster.cordon(record.node, record.id, record.reason)
            self._say("cordoned" if ours else "cordoned already, by somebody else: it will stay so")
            self._note(record, history.EntryKind.STAGE, "cordon", "ours" if ours else "somebody else's")
            node = None if ours or record.named else self._tools.cluster.node(record.node)
            if node and node.cordoned_by_others:
                why = "somebody cordoned its node meanwhile, and may be at work there"
                return record.to(Stage.RELEASE, outcome=RepairOutcome.NOT_REPAIRED, why=why)
            self._event(record, "RepairStarted", f"gpunodes repairs this machine: {record.reason}")
        return record.to(Stage.DRAIN)

    def _drain(self, record: RepairRecord) -> RepairRecord:
        if not self._tools.cluster or not record.node:
            return flow.drained(record, flow.DrainResult())
        limit = self._tools.limits.drain_hung if record.hung else self._tools.limits.drain
        self._say(f"emptying the node, {limit:.0f} s at most")
        force = record.force_drain and record.hung
        result = drain(self._tools.cluster, record.node, limit, force=force, alive=lambda: self._may_go_on(record))
        for pods, what in (
            (result.refused, "may not be evicted"),
            (result.ending, "do not end"),
            (result.deleted, "were deleted by force"),
            (result.alone, "stay"),
        ):
            if pods:
                self._say(f"pods that {what}: {flow.named(pods)}")
        outcome = "empty" if result.empty else "not empty"
        left = flow.named([*result.refused, *result.ending, *result.deleted, *result.alone])
        self._note(record, history.EntryKind.STAGE, "drain", outcome, left)
        return flow.drained(record, result)

    def _escalate(self, record: RepairRecord) -> RepairRecord:
        step = escalation.step(record.step)
        began = time.monotonic()
        if step.proof is VerifiedBy.BOOT and self._rebooted(record, self._machine_control.boot(), 0.0):
            return self._escalated(record, step, StepOutcome.SUCCEEDED, "the machine is in another boot", began)
        if not record.asked:
            result, why, record = self._ask(record, step)
            if result is not None:
                return self._escalated(record, step, result, why, began)
        if step.proof is VerifiedBy.GPU:
            return self._escalated(record, step, StepOutcome.SUCCEEDED, "nvidia-smi reports the reset", began)
        result, why, alone = self._watch(record, step)
        for higher in alone:
            record = self._escalated(record, step, StepOutcome.FAILED, "the machine climbed on by itself", began)
            step = higher
        return self._escalated(record, step, result, why, began)

    def _ask(self, record: RepairRecord, step: EscalationStep) -> tuple[StepOutcome | None, str, RepairRecord]:
        """Use a rung; a result when it ends there, and the record with the time when it was asked."""
        if step.over is Channel.POWER and not self._machine_control.has_power():
            return StepOutcome.SKIPPED, "no BMC is configured", record
        self._confirm(record)
        self._say(f"{step.title}")
        if step.over is Channel.POWER:
            try:
                self._machine_control.cold_cycle() if step.name == escalation.COLD else self._machine_control.reset()
            except GpunodesError as problem:
                return StepOutcome.FAILED, str(problem), record
            asked, armed = time.time(), record.armed
        else:
            later = escalation.armed(step.name, hung=record.hung) if step.proof is VerifiedBy.BOOT else []
            message = self._ask_over_ssh(record, step, later)
            asked, due = time.time(), dict(record.armed)
            if not message.done and step.name not in due:
                return StepOutcome.SKIPPED, message.message, record
            if not message.done:
                self._say(f"{step.title}: {message.message}; the machine was told before to do it by itself")
                asked = max(asked, due[step.name])
            # What it was told first it does first.
            armed = tuple(({name: asked + after for after, name in later if name in message.armed} | due).items())
        record = record.to(Stage.ESCALATE, asked=asked, armed=armed)
        self._keep(record)
        return None, "", record

    def _ask_over_ssh(
        self, record: RepairRecord, step: EscalationStep, later: Sequence[tuple[float, str]]
    ) -> StepResult:
        if step.proof is not VerifiedBy.GPU:
            return self._machine_control.run_step(step, record.boot_id, later, ())
        cluster = self._tools.cluster if record.node else None
        if cluster:
            cluster.taint_temporarily(record.node, record.id)
        try:
            return self._machine_control.run_step(step, record.boot_id, later, record.resets)
        finally:
            if cluster:
                cluster.untaint(record.node)

    def _watch(self, record: RepairRecord, step: EscalationStep) -> tuple[StepOutcome, str, Sequence[EscalationStep]]:
        """Wait until the machine is in another boot, or the rung's time is over; the rungs that it climbed by itself.

        A kernel that answers while no sshd does is a machine in its shutdown or start: going down must be over within
        the rung's limit. Silence is a machine that is down: it gets the time that a boot takes.
        """
        gone, silent, refused = False, 0, False
        while True:
            self._alive()
            seen = self._machine_control.boot()
            waited = time.time() - record.asked
            if self._rebooted(record, seen, waited):
                return (
                    StepOutcome.SUCCEEDED,
                    f"boot {seen.boot_id} after {waited:.0f} s",
                    self._alone(record, step, seen),
                )
            if seen.reached is Reached.NO_RESPONSE:
                silent += 1
                gone = gone or silent > 1
            else:
                silent = 0
                refused = seen.reached is not Reached.ENDED
                gone = gone and refused
            if waited > (self._tools.limits.boot if gone else step.limit(hung=record.hung)):
                break
            self._tools.stop.wait(self._tools.limits.poll)
        why = "the old boot still answers"
        if refused:
            why = "it hangs in its shutdown: the kernel answers and sshd does not,"
        if gone:
            why = "it went down and does not answer"
        return StepOutcome.FAILED, f"{why} {waited:.0f} s later", ()

    def _alone(self, record: RepairRecord, step: EscalationStep, seen: Boot) -> Sequence[EscalationStep]:
        """The rungs that a machine whose driver hangs climbed by itself before its new boot began.

        A machine may lose its address in its shutdown: nobody sees then that it hangs there, but a kernel that started
        after the next rung's time tells. Where a machine tests itself for minutes first, it tells only the highest rung
        that it can have been.
        """
        if not record.hung or not seen.uptime_s:
            return ()
        began = time.time() - seen.uptime_s
        escalated = {name for name, due in record.armed if due <= began}
        steps = escalation.steps()
        return [each for each in steps[steps.index(step) + 1 :] if each.name in escalated]

    def _rebooted(self, record: RepairRecord, seen: Boot, waited: float) -> bool:
        if not seen.boot_id:
            return False
        if record.boot_id:
            return seen.boot_id != record.boot_id
        # Nobody knows which boot it was in before: this one must have begun since we asked.
        return record.asked > 0 and 0 < seen.uptime_s < waited

    def _escalated(
        self, record: RepairRecord, step: EscalationStep, result: StepOutcome, why: str, began: float
    ) -> RepairRecord:
        self._say(f"{step.title}: {result.value}: {why}")
        self._note(record, history.EntryKind.STEP, step.name, result.value, why, time.monotonic() - began)
        if self._tools.cluster and record.node and result is not StepOutcome.SKIPPED:
            # For the loop guard of every operator. The control plane itself may be what was rebooted.
            with contextlib.suppress(NoResponse):
                self._tools.cluster.note_repair(record.node, record.started)
        return flow.escalated(record, result, why)

    def _verify(self, record: RepairRecord) -> RepairRecord:
        self._say("proving it well")
        began = time.monotonic()
        deadline = began + self._tools.limits.verify
        why, bad, healthy_since = "", 0, 0.0
        while True:
            # A machine that starts has better to do than to be looked at, and its node is up after it.
            self._await_node(record, min(deadline, time.monotonic() + _LEFT_ALONE_S))
            asked = time.monotonic()
            verdict, facts = self._tools.scan(record.machine)
            why, final = self._unproven(record, verdict, facts)
            now = time.monotonic()
            bad = bad + 1 if final else 0
            healthy_since = 0.0 if why else healthy_since or now
            why = why or self._unready(record, verdict.boot_id or "")
            # The machine settles while its node comes back; else half of its time at least is its own.
            rest = (
                max(self._tools.limits.poll, now - asked) if why else self._tools.limits.settle - (now - healthy_since)
            )
            # What a boot found twice it will find again; all else may yet come.
            if (not why and rest <= 0) or bad > 1 or now > deadline:
                break
            self._tools.stop.wait(rest)
        proof = why or _verified_state(verdict)
        self._say(f"not well: {why}" if why else f"well: {proof}")
        outcome = "failed" if why else "passed"
        self._note(record, history.EntryKind.VERIFICATION, record.step, outcome, proof, time.monotonic() - began)
        return flow.verified(record, why, verdict.boot_id or "")

    def _await_node(self, record: RepairRecord, until: float) -> None:
        """Wait for its node to be ready; until ``until`` (monotonic) at most."""
        while self._unready(record) and time.monotonic() < until:
            self._alive()
            self._tools.stop.wait(self._tools.limits.poll)
        self._alive()

    def _unproven(self, record: RepairRecord, verdict: Verdict, facts: Mapping[str, Any] | None) -> tuple[str, bool]:
        """What the machine lacks yet, "" for nothing; and whether waiting longer is no use."""
        if verdict.state in (State.UNREACHABLE, State.UNKNOWN):
            return f"it is {verdict.state.value}", False
        booted = escalation.step(record.step).proof is VerifiedBy.BOOT
        if booted and record.boot_id and verdict.boot_id == record.boot_id:
            return "it is still in the old boot", False
        if verdict.state is not State.HEALTHY:
            # What the log says, and a hang, will not pass; a driver that is still being loaded will.
            logged = any(finding.first for finding in verdict.findings if finding.state is not State.HEALTHY)
            found = f"{describe(verdict)} ({verdict.state.value})"
            return f"the {'new boot' if booted else 'GPU'} has findings: {found}", (logged or verdict.hung_in_driver)
        gpus = max(record.gpus or 0, verdict.gpus_expected or 0)
        if gpus and (verdict.gpus_seen or 0) < gpus:
            return f"{verdict.gpus_seen or 0} of {gpus} GPUs are seen", False
        smi = (facts or {}).get("smi", {})
        if gpus and smi.get("status") != "ok":
            message = " ".join(str(smi.get("message") or smi.get("status")).split())
            return f"nvidia-smi does not end with 0: {message[:200]}", False
        return "", False

    def _unready(self, record: RepairRecord, boot_id: str = "") -> str:
        """What its node lacks yet, "" for nothing, and where no cluster is asked; ``boot_id`` is its boot, if known."""
        if not self._tools.cluster or not record.node:
            return ""
        try:
            node = self._tools.cluster.node(record.node)
        except NoResponse as problem:
            return str(problem)
        if node is None:
            return "it is no node of the cluster any more"
        offered = node.allocatable or 0
        booted = escalation.step(record.step).proof is VerifiedBy.BOOT
        old = node.boot_id != boot_id if boot_id else booted and node.boot_id == record.boot_id
        lacks = (
            (not node.ready, "its kubelet is not ready"),
            (old, "its kubelet has not reported the new boot yet"),
            (offered < (record.capacity or 0), f"{offered} of {record.capacity} GPUs can be allocated"),
        )
        return next((why for lacking, why in lacks if lacking), "")

    def _give_back(self, record: RepairRecord) -> RepairRecord:
        good = record.outcome is not None and record.outcome.good
        if self._tools.cluster and record.node:
            free = self._tools.cluster.uncordon(record.node, record.id)
            self._say("uncordoned" if free else "its cordon is somebody else's: it stays")
            message = "is proven well" if good else f"was not repaired: {record.why}"
            self._event(record, "RepairEnded" if good else "RepairFailed", f"this machine {message}", warning=not good)
        return record.to(Stage.RELEASE)

    def _give_up(self, record: RepairRecord) -> RepairRecord:
        if self._tools.cluster and record.node:
            self._tools.cluster.give_up(record.node, record.id, record.why)
            message = (
                f"this machine needs repair by hand: {record.why}; `gpunodes uncordon {record.machine}` when it is done"
            )
            self._event(record, "NeedsRepair", message, warning=True)
        return record.to(Stage.RELEASE)

    def _release(self, record: RepairRecord) -> RepairRecord:
        # The history first: a repair that is in no lock and no history would be forgotten.
        outcome = record.outcome or RepairOutcome.NOT_NEEDED
        self._note(record, history.EntryKind.END, "repair", outcome.value, record.why, time.time() - record.started)
        if self._tools.leases and record.node:
            self._tools.leases.release(record.node)
        self._say(outcome.value + (f": {record.why}" if record.why else ""))
        return record.to(Stage.END)

    # Around the steps

    def _alive(self) -> None:
        if self._tools.stop.is_set():
            raise Stopped("interrupted", remedy="run the command again, or `gpunodes repair --resume`, to go on")

    def _may_go_on(self, record: RepairRecord) -> None:
        """For the middle of a step that does much: nobody has interrupted us, and the lock is still ours."""
        self._alive()
        if self._tools.leases and record.node:
            with contextlib.suppress(*((Unsure,) if self._tools.control_plane else ())):
                self._tools.leases.check(record.node)

    def _keep(self, record: RepairRecord) -> None:
        """Write the record before what it tells of; raises Lost when the lock is, or may be, somebody else's by now."""
        records.write(record)
        self._confirm(record)

    def _confirm(self, record: RepairRecord) -> None:
        """Be sure of the lock before something is done; the control plane alone is repaired without it if need be."""
        if not self._tools.leases or not record.node:
            return
        lost = self._tools.lock.lost() if self._tools.lock else None
        if lost and not isinstance(lost, Unresponsive):
            raise lost
        try:
            self._tools.leases.write(record.node, record.text(), wait=not self._tools.control_plane)
        except Unsure:
            if not self._tools.control_plane:
                raise
            if not self._told_unsure:
                self._say("the control plane is itself under repair: going on without its lock until it answers")
            self._told_unsure = True

    def _say(self, text: str) -> None:
        self._tools.say(self._record.machine, text)

    def _event(self, record: RepairRecord, reason: str, message: str, *, warning: bool = False) -> None:
        if self._tools.cluster:
            self._tools.cluster.event(record.node, reason, message, warning=warning)

    def _note(
        self,
        record: RepairRecord,
        kind: history.EntryKind,
        what: str,
        outcome: str = "",
        detail: str = "",
        seconds: float = 0.0,
    ) -> None:
        history.append(
            history.HistoryEntry(
                time=time.time(),
                machine=record.machine,
                kind=kind,
                what=what,
                outcome=outcome,
                detail=detail,
                seconds=round(seconds, 1),
                repair=record.id,
                cluster=record.cluster,
                by=self._tools.by,
            )
        )


def describe(verdict: Verdict) -> str:
    """A verdict's worst findings in one line."""
    parts = [
        " ".join(part for part in (finding.rule, str(finding.code or ""), finding.gpu) if part)
        for finding in verdict.findings[:3]
    ]
    return ", ".join(parts) or verdict.state.value


def resets(verdict: Verdict, facts: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The PCI addresses of the GPUs that a GPU reset is to name, none for all GPUs.

    Some are named only where nothing is wrong beside them, since a reset ends what the log says of all; and where no
    NVSwitch joins the GPUs: those are reset together (NVIDIA Fabric Manager user guide; nvidia-smi(1), --gpu-reset).
    """
    wrong = [finding for finding in verdict.findings if finding.state is not State.HEALTHY]
    functions = read(facts or {}).functions
    gpus = {function.address for function in functions if function.is_gpu}
    if any(function.is_switch for function in functions) or not all(
        finding.action is Action.RESET_GPU and finding.gpu in gpus for finding in wrong
    ):
        return ()
    return tuple(sorted({finding.gpu for finding in wrong}))


def first_lines(verdict: Verdict, most: int = 3) -> tuple[str, ...]:
    """The first lines that a verdict rests on."""
    lines = [line for finding in verdict.findings for line in finding.evidence[:1]]
    return tuple(lines[:most])


def faults(verdict: Verdict, facts: Mapping[str, Any] | None) -> Collection[str]:
    """What is known of a machine beside its findings, for the choice of the first rung."""
    rules = {finding.rule for finding in verdict.findings}
    booted = (facts or {}).get("expected") or {}
    began = booted.get("gpus") if booted.get("from") == "boot log" else None
    if "gpus-missing" in rules and isinstance(began, int) and began < (verdict.gpus_expected or 0):
        return {"missing-since-boot"}
    return ()


def _verified_state(verdict: Verdict) -> str:
    gpus = f", {verdict.gpus_seen} GPUs" if verdict.gpus_seen is not None else ""
    return f"{verdict.state.value}{gpus}, boot {verdict.boot_id or 'unknown'}"
