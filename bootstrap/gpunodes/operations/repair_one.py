"""The repair of one machine, stage by stage.

Each stage is recorded on disk and in the machine's lock before it starts.
Every stage is idempotent, so any command can resume from the record of another command.
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
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.leases.errors import Unsure
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.locks import Lock, Unresponsive
from gpunodes.engine.machine_control import Boot, StepResult
from gpunodes.engine.remote.shell import Reached
from gpunodes.errors import GpunodesError
from gpunodes.health.facts import read
from gpunodes.health.model import Action, State, Verdict
from gpunodes.operations.drain import drain
from gpunodes.repair import escalation, flow
from gpunodes.repair.escalation import Channel, EscalationStep, VerifiedBy
from gpunodes.repair.flow import StepOutcome
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage

_SCAN_PAUSE_S = 20.0
"""Seconds without scans of a machine while its node becomes ready."""


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
    """What a repair can do to a machine; implemented by engine/machine_control.py."""

    def boot(self) -> Boot:
        """The boot it is in."""

    def collect(self, folder: Path, facts: Mapping[str, Any] | None, *, bug_report: bool) -> list[str]:
        """Save the evidence; the names of the files."""

    def run_step(
        self, step: EscalationStep, boot_id: str, later: Sequence[tuple[float, str]], gpus: Sequence[str]
    ) -> StepResult:
        """Perform a step that needs a shell."""

    def has_power(self) -> bool:
        """Whether it has a BMC."""

    def reset(self) -> None:
        """Reset it by its BMC."""

    def cold_cycle(self) -> None:
        """Switch it off, wait, and switch it on."""


Scan = Callable[[str], tuple[Verdict, Mapping[str, Any] | None]]
"""Scan a machine now: the verdict, and the probe's facts if it sent any."""
Report = Callable[[str, str], None]
"""Report a message about a machine: its name and the text."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a repair works with. ``cluster`` and ``leases`` are None with --without-cluster."""

    scan: Scan
    report: Report
    limits: TimeLimits
    by: str
    cluster: Cluster | None = None
    leases: Leases | None = None
    lock: Lock | None = None
    """The SSH lock that excludes commands that find no API while the control plane is repaired."""
    control_plane: bool = False
    """The machine is the control plane: its Lease cannot be checked while it boots."""
    stop: threading.Event = field(default_factory=threading.Event)


class Stopped(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The command was interrupted; the repair can be resumed."""


class OneRepair:
    """Runs one repair from its record's stage to the end."""

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
        self._reported_unsure = False
        self._stages: Mapping[Stage, Callable[[RepairRecord], RepairRecord]] = {
            Stage.COLLECT: self._collect,
            Stage.CORDON: self._cordon,
            Stage.DRAIN: self._drain,
            Stage.ESCALATE: self._escalate,
            Stage.VERIFY: self._verify,
            Stage.UNCORDON: self._uncordon,
            Stage.UNDO: self._uncordon,
            Stage.GIVE_UP: self._give_up,
            Stage.RELEASE: self._release,
        }

    def run(self) -> RepairRecord:
        """Continue from the record's stage to the end; the last record.

        Raises GpunodesError when it cannot continue now (the control plane does not respond, the lock was lost, the
        command was interrupted): the record stays, and ``gpunodes repair --resume`` continues.
        """
        record = self._record
        if record.stage in (Stage.SCAN, Stage.LOCK):
            record = record.to(Stage.COLLECT)
        while record.stage is not Stage.END:
            self._check_stop()
            self._save(record)
            record = self._stages[record.stage](record)
        records.remove(record)
        return record

    # Stages

    def _collect(self, record: RepairRecord) -> RepairRecord:
        self._report("collecting evidence")
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
            cordoned = self._tools.cluster.cordon(record.node, record.id, record.reason)
            self._report(
                "cordoned" if cordoned else "already cordoned by a user or another program; the cordon will stay"
            )
            self._note(record, history.EntryKind.STAGE, "cordon", "cordoned" if cordoned else "already cordoned")
            node = None if cordoned or record.named else self._tools.cluster.node(record.node)
            if node and node.cordoned_by_others:
                why = "a user or another program cordoned its node in the meantime"
                return record.to(Stage.RELEASE, outcome=RepairOutcome.NOT_REPAIRED, why=why)
            self._event(record, "RepairStarted", f"gpunodes repairs this machine: {record.reason}")
        return record.to(Stage.DRAIN)

    def _drain(self, record: RepairRecord) -> RepairRecord:
        if not self._tools.cluster or not record.node:
            return flow.drained(record, flow.DrainResult())
        limit = self._tools.limits.drain_hung if record.hung else self._tools.limits.drain
        self._report(f"draining the node, at most {limit:.0f} s")
        force = record.force_drain and record.hung
        result = drain(
            self._tools.cluster, record.node, limit, force=force, check=lambda: self._check_stop_and_lock(record)
        )
        for pods, status in (
            (result.refused, "that cannot be evicted"),
            (result.terminating, "that do not terminate"),
            (result.deleted, "deleted by force"),
            (result.unmanaged, "that stay"),
        ):
            if pods:
                self._report(f"pods {status}: {flow.pod_list(pods)}")
        outcome = "drained" if result.complete else "not drained"
        remaining = flow.pod_list([*result.refused, *result.terminating, *result.deleted, *result.unmanaged])
        self._note(record, history.EntryKind.STAGE, "drain", outcome, remaining)
        return flow.drained(record, result)

    def _escalate(self, record: RepairRecord) -> RepairRecord:
        step = escalation.step(record.step)
        began = time.monotonic()
        if step.verified_by is VerifiedBy.BOOT and self._rebooted(record, self._machine_control.boot(), 0.0):
            return self._step_ended(record, step, StepOutcome.SUCCEEDED, "the machine is in another boot", began)
        if not record.ordered_at:
            result, why, record = self._order(record, step)
            if result is not None:
                return self._step_ended(record, step, result, why, began)
        if step.verified_by is VerifiedBy.GPU:
            return self._step_ended(record, step, StepOutcome.SUCCEEDED, "nvidia-smi reports the reset", began)
        result, why, performed = self._watch(record, step)
        for higher in performed:
            record = self._step_ended(record, step, StepOutcome.FAILED, "the machine escalated by itself", began)
            step = higher
        return self._step_ended(record, step, result, why, began)

    def _order(self, record: RepairRecord, step: EscalationStep) -> tuple[StepOutcome | None, str, RepairRecord]:
        """Order a step: its outcome, None while it takes effect; why; and the record with the time of the order."""
        if step.channel is Channel.POWER and not self._machine_control.has_power():
            return StepOutcome.SKIPPED, "no BMC is configured", record
        self._confirm(record)
        self._report(f"{step.title}")
        if step.channel is Channel.POWER:
            try:
                self._machine_control.cold_cycle() if step.name == escalation.COLD else self._machine_control.reset()
            except GpunodesError as problem:
                return StepOutcome.FAILED, str(problem), record
            ordered_at, armed = time.time(), record.armed
        else:
            later = escalation.armed(step.name, hung=record.hung) if step.verified_by is VerifiedBy.BOOT else []
            ordered = self._order_over_ssh(record, step, later)
            ordered_at, due = time.time(), dict(record.armed)
            if not ordered.done and step.name not in due:
                return StepOutcome.SKIPPED, ordered.message, record
            if not ordered.done:
                self._report(
                    f"{step.title}: {ordered.message}; the machine performs this step by itself, as ordered before"
                )
                ordered_at = max(ordered_at, due[step.name])
            # An earlier order takes effect first.
            new = {name: ordered_at + after for after, name in later if name in ordered.armed}
            armed = tuple((new | due).items())
        record = record.to(Stage.ESCALATE, ordered_at=ordered_at, armed=armed)
        self._save(record)
        return None, "", record

    def _order_over_ssh(
        self, record: RepairRecord, step: EscalationStep, later: Sequence[tuple[float, str]]
    ) -> StepResult:
        if step.verified_by is not VerifiedBy.GPU:
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
        """Wait for another boot, or until the step's time limit; also the steps that the machine performed by itself.

        If the kernel responds but sshd does not, the machine is shutting down or booting: it must go down within the
        step's limit. If nothing responds, the machine is down: it gets the time of a boot.
        """
        down, silent, refused = False, 0, False
        while True:
            self._check_stop()
            seen = self._machine_control.boot()
            waited = time.time() - record.ordered_at
            if self._rebooted(record, seen, waited):
                return (
                    StepOutcome.SUCCEEDED,
                    f"boot {seen.boot_id} after {waited:.0f} s",
                    self._performed_by_itself(record, step, seen),
                )
            if seen.reached is Reached.NO_RESPONSE:
                silent += 1
                down = down or silent > 1
            else:
                silent = 0
                refused = seen.reached is not Reached.ENDED
                down = down and refused
            if waited > (self._tools.limits.boot if down else step.limit(hung=record.hung)):
                break
            self._tools.stop.wait(self._tools.limits.poll)
        why = "it is still running the old boot"
        if refused:
            why = "it hangs during shutdown (the kernel responds, sshd does not)"
        if down:
            why = "it went down and has not come back"
        return StepOutcome.FAILED, f"{why} after {waited:.0f} s", ()

    def _performed_by_itself(self, record: RepairRecord, step: EscalationStep, seen: Boot) -> Sequence[EscalationStep]:
        """The steps that a machine with a hung driver performed by itself before its new boot began.

        A machine may lose its address during shutdown, so a hang there is not visible. But if the new kernel started
        after the next step was due, the machine performed that step. If the machine runs self-tests for minutes before
        it boots, this is only the highest step that is possible.
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
        # The boot id before the step is unknown: the present boot must have begun after the order.
        return record.ordered_at > 0 and 0 < seen.uptime_s < waited

    def _step_ended(
        self, record: RepairRecord, step: EscalationStep, result: StepOutcome, why: str, began: float
    ) -> RepairRecord:
        self._report(f"{step.title}: {result.value}: {why}")
        self._note(record, history.EntryKind.STEP, step.name, result.value, why, time.monotonic() - began)
        if self._tools.cluster and record.node and result is not StepOutcome.SKIPPED:
            # For the loop guard of every controller. The control plane itself may have been rebooted.
            with contextlib.suppress(NoResponse):
                self._tools.cluster.note_repair(record.node, record.started)
        return flow.escalated(record, result, why)

    def _verify(self, record: RepairRecord) -> RepairRecord:
        self._report("verifying that it is healthy")
        began = time.monotonic()
        deadline = began + self._tools.limits.verify
        why, bad, healthy_since = "", 0, 0.0
        while True:
            # A scan slows down a booting machine, and its node becomes ready only after it.
            self._await_node(record, min(deadline, time.monotonic() + _SCAN_PAUSE_S))
            scan_began = time.monotonic()
            verdict, facts = self._tools.scan(record.machine)
            why, final = self._not_healthy(record, verdict, facts)
            now = time.monotonic()
            bad = bad + 1 if final else 0
            healthy_since = 0.0 if why else healthy_since or now
            why = why or self._not_ready(record, verdict.boot_id or "")
            # The settle time includes the wait for the node; scans take at most half of the time otherwise.
            pause = (
                max(self._tools.limits.poll, now - scan_began)
                if why
                else self._tools.limits.settle - (now - healthy_since)
            )
            # A finding that two scans of a boot report is final; everything else may still change.
            if (not why and pause <= 0) or bad > 1 or now > deadline:
                break
            self._tools.stop.wait(pause)
        detail = why or _verified_state(verdict)
        self._report(f"not healthy: {why}" if why else f"verified: {detail}")
        outcome = "failed" if why else "passed"
        self._note(record, history.EntryKind.VERIFICATION, record.step, outcome, detail, time.monotonic() - began)
        return flow.verified(record, why, verdict.boot_id or "")

    def _await_node(self, record: RepairRecord, until: float) -> None:
        """Wait for its node to be ready; until ``until`` (monotonic) at most."""
        while self._not_ready(record) and time.monotonic() < until:
            self._check_stop()
            self._tools.stop.wait(self._tools.limits.poll)
        self._check_stop()

    def _not_healthy(self, record: RepairRecord, verdict: Verdict, facts: Mapping[str, Any] | None) -> tuple[str, bool]:
        """Why the machine is not healthy yet, "" if it is; and whether this is final."""
        if verdict.state in (State.UNREACHABLE, State.UNKNOWN):
            return f"it is {verdict.state.value}", False
        booted = escalation.step(record.step).verified_by is VerifiedBy.BOOT
        if booted and record.boot_id and verdict.boot_id == record.boot_id:
            return "it is still in the old boot", False
        if verdict.state is not State.HEALTHY:
            # Findings of the log, and a hang, are final; a driver may still be loading.
            logged = any(finding.first for finding in verdict.findings if finding.state is not State.HEALTHY)
            found = f"{describe(verdict)} ({verdict.state.value})"
            return f"the {'new boot' if booted else 'GPU'} has findings: {found}", (logged or verdict.hung_in_driver)
        gpus = max(record.gpus or 0, verdict.gpus_expected or 0)
        if gpus and (verdict.gpus_seen or 0) < gpus:
            return f"{verdict.gpus_seen or 0} of {gpus} GPUs are visible", False
        smi = (facts or {}).get("smi", {})
        if gpus and smi.get("status") != "ok":
            message = " ".join(str(smi.get("message") or smi.get("status")).split())
            return f"nvidia-smi fails: {message[:200]}", False
        return "", False

    def _not_ready(self, record: RepairRecord, boot_id: str = "") -> str:
        """Why its node is not ready yet, "" if it is or with --without-cluster; ``boot_id`` is its boot, if known."""
        if not self._tools.cluster or not record.node:
            return ""
        try:
            node = self._tools.cluster.node(record.node)
        except NoResponse as problem:
            return str(problem)
        if node is None:
            return "its node is no longer in the cluster"
        offered = node.allocatable or 0
        booted = escalation.step(record.step).verified_by is VerifiedBy.BOOT
        old = node.boot_id != boot_id if boot_id else booted and node.boot_id == record.boot_id
        checks = (
            (not node.ready, "its kubelet is not ready"),
            (old, "its kubelet has not reported the new boot yet"),
            (offered < (record.capacity or 0), f"{offered} of {record.capacity} GPUs can be allocated"),
        )
        return next((why for failed, why in checks if failed), "")

    def _uncordon(self, record: RepairRecord) -> RepairRecord:
        good = record.outcome is not None and record.outcome.good
        if self._tools.cluster and record.node:
            uncordoned = self._tools.cluster.uncordon(record.node, record.id)
            self._report(
                "uncordoned" if uncordoned else "it stays cordoned, since a user or another program cordoned it"
            )
            message = "is verified as healthy" if good else f"was not repaired: {record.why}"
            self._event(record, "RepairEnded" if good else "RepairFailed", f"this machine {message}", warning=not good)
        return record.to(Stage.RELEASE)

    def _give_up(self, record: RepairRecord) -> RepairRecord:
        if self._tools.cluster and record.node:
            self._tools.cluster.give_up(record.node, record.id, record.why)
            message = f"this machine needs manual repair: {record.why}; then run `gpunodes uncordon {record.machine}`"
            self._event(record, "NeedsRepair", message, warning=True)
        return record.to(Stage.RELEASE)

    def _release(self, record: RepairRecord) -> RepairRecord:
        # The history first: a repair in neither the lock nor the history would be forgotten.
        outcome = record.outcome or RepairOutcome.NOT_NEEDED
        self._note(record, history.EntryKind.END, "repair", outcome.value, record.why, time.time() - record.started)
        if self._tools.leases and record.node:
            self._tools.leases.release(record.node)
        self._report(outcome.value + (f": {record.why}" if record.why else ""))
        return record.to(Stage.END)

    # Checks and reports

    def _check_stop(self) -> None:
        if self._tools.stop.is_set():
            raise Stopped("interrupted", remedy="run the command again, or `gpunodes repair --resume`, to continue")

    def _check_stop_and_lock(self, record: RepairRecord) -> None:
        """During a long stage: raise if the command was interrupted or the lock was lost."""
        self._check_stop()
        if self._tools.leases and record.node:
            with contextlib.suppress(*((Unsure,) if self._tools.control_plane else ())):
                self._tools.leases.check(record.node)

    def _save(self, record: RepairRecord) -> None:
        """Write the record before the stage starts; raises Lost if another command holds, or may hold, the lock."""
        records.write(record)
        self._confirm(record)

    def _confirm(self, record: RepairRecord) -> None:
        """Renew the lock before an action; only the repair of the control plane continues if that is impossible."""
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
            if not self._reported_unsure:
                self._report("the control plane itself is under repair: continuing without its lock until it responds")
            self._reported_unsure = True

    def _report(self, text: str) -> None:
        self._tools.report(self._record.machine, text)

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
    """The PCI addresses of the GPUs to reset, none for all GPUs.

    Single GPUs are named only if there is no other finding, since a reset clears the findings of all GPUs, and only
    without NVSwitches, whose GPUs are reset together (NVIDIA Fabric Manager user guide; nvidia-smi(1), --gpu-reset).
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
    """The first log lines that a verdict is based on."""
    lines = [line for finding in verdict.findings for line in finding.evidence[:1]]
    return tuple(lines[:most])


def faults(verdict: Verdict, facts: Mapping[str, Any] | None) -> Collection[str]:
    """Known faults of a machine that its findings do not name, for the choice of the first step."""
    rules = {finding.rule for finding in verdict.findings}
    expected = (facts or {}).get("expected") or {}
    at_boot = expected.get("gpus") if expected.get("from") == "boot log" else None
    if "gpus-missing" in rules and isinstance(at_boot, int) and at_boot < (verdict.gpus_expected or 0):
        return {"missing-since-boot"}
    return ()


def _verified_state(verdict: Verdict) -> str:
    gpus = f", {verdict.gpus_seen} GPUs" if verdict.gpus_seen is not None else ""
    return f"{verdict.state.value}{gpus}, boot {verdict.boot_id or 'unknown'}"
