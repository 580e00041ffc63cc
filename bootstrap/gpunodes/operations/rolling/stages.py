"""One machine of a roll-out, stage by stage.

Each stage is recorded on disk and in the machine's lock before it starts. Every stage is idempotent, so any command can
resume from the record of another command.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpunodes.engine import history, records
from gpunodes.engine.cluster.errors import NoResponse, Refused
from gpunodes.engine.cluster.pods import Pod
from gpunodes.engine.history import EntryKind
from gpunodes.engine.leases.errors import Lost
from gpunodes.engine.scans import MachineScan
from gpunodes.errors import sentence
from gpunodes.health.model import State
from gpunodes.operations import drain as draining
from gpunodes.operations.machine_lock import MachineLock
from gpunodes.operations.rolling.context import RolloutCommand
from gpunodes.operations.rolling.work import Stopped, Target, Work
from gpunodes.repair import findings, verification
from gpunodes.repair.flow import DrainResult, pod_list
from gpunodes.rollout import flow, policy
from gpunodes.rollout.record import Disruption, RolloutOutcome, RolloutRecord, Stage

_ATTEMPTS = 3
"""How often the verification of the work itself may fail before that is final; each may be a run of Ansible."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the stages of one machine work with."""

    command: RolloutCommand
    work: Work
    target: Target
    lock: MachineLock
    wait_for_jobs_s: float = 0.0

    def report(self, text: str) -> None:
        """Show a line about the machine."""
        self.command.report(self.target.name, text)

    def scan(self) -> MachineScan:
        """Scan the machine now."""
        return self.command.fleet.scan([self.target.machine], full=False)[self.target.name]

    def save(self, record: RolloutRecord) -> None:
        """Write the record before an action; raises Lost if another command holds, or may hold, the lock."""
        record = record.to(record.stage, written=self.command.now())
        records.write(record, records.ROLLOUTS)
        self.lock.confirm(record)

    def check(self, record: RolloutRecord) -> None:
        """Raise Stopped or Lost if the machine must not be worked on any longer."""
        if self.command.stop.is_set():
            raise Stopped
        self.lock.check(record)

    def pause(self) -> None:
        """Wait a moment, or until the command is stopped."""
        self.command.stop.wait(self.command.limits.poll)

    def note(self, record: RolloutRecord, what: str, outcome: str = "", detail: str = "", seconds: float = 0.0) -> None:
        """Add an entry to the machine's history."""
        history.note(
            record.machine, record.cluster, EntryKind.ROLLOUT, what, outcome, detail, seconds=seconds, repair=record.id
        )

    def attempt(self, record: RolloutRecord, stage: str, action: Callable[[], None]) -> str:
        """Do a part of the work; why it failed, "" if it did not. What only interrupts it is raised."""
        began = time.monotonic()
        try:
            action()
        except (Stopped, Lost, NoResponse):
            raise
        except Exception as problem:
            why = sentence(problem)
        else:
            why = ""
        self.report(f"{stage}: {why}" if why else f"{stage}: done")
        self.note(record, f"{record.work} {stage}", "failed" if why else "done", why, time.monotonic() - began)
        return why


def run(tools: Tools, record: RolloutRecord) -> RolloutRecord:
    """Continue from the record's stage to the end, or to a machine that is held; the last record.

    Raises GpunodesError when it cannot continue now (the control plane does not respond, the lock was lost, the command
    was interrupted): the record stays, and a new command continues.
    """
    while record.stage is not Stage.END:
        tools.check(record)
        tools.save(record)
        if record.stage is Stage.HOLD:
            _hold(tools, record)
            return record
        record = _STAGES[record.stage](tools, record)
    records.remove(record, records.ROLLOUTS)
    return record


def _collect(tools: Tools, record: RolloutRecord) -> RolloutRecord:
    node = tools.command.cluster.node(record.node)
    marked = record.applied or (node is not None and node.rollout == record.id)
    needed = tools.work.needed(tools.target)
    if not needed:
        return flow.collected(record, "", "", marked=marked)
    tools.report(f"{record.work}: {needed}")
    unhealthy = ""
    if not marked:
        seen = tools.scan()
        verdict = seen.verdict
        if verdict.state.rank >= State.SICK.rank:
            unhealthy = f"{findings.describe(verdict)} ({verdict.state.value})"
        capacity = node.expected if node else None
        record = record.to(record.stage, before=verdict.state, gpus=verdict.gpus_expected, capacity=capacity)
    return flow.collected(record, needed, unhealthy, marked=marked)


def _cordon(tools: Tools, record: RolloutRecord) -> RolloutRecord:
    own = _begun(tools, record)
    if own and record.disrupts is not Disruption.NOTHING:
        tools.report("cordoned")
        tools.command.cluster.event(record.node, "RolloutStarted", f"gpunodes: {record.work}", warning=False)
    node = None if own else tools.command.cluster.node(record.node)
    return flow.cordoned(record, own=own, marked=node is not None and node.rollout == record.id)


def _begun(tools: Tools, record: RolloutRecord) -> bool:
    """Mark the node, and cordon it if the work disrupts it; whether no others changed its cordon or its marks."""
    cordons = record.disrupts is not Disruption.NOTHING
    # As for a repair, the budget is free for others as soon as the lock is lost.
    check = functools.partial(tools.lock.check, record)
    return tools.command.cluster.begin_rollout(record.node, record.id, cordon=cordons, check=check)


def _prepare(tools: Tools, record: RolloutRecord) -> RolloutRecord:
    why = tools.attempt(record, "prepare", lambda: tools.work.prepare(tools.target))
    return flow.prepared(record, why)


def _drain(tools: Tools, record: RolloutRecord) -> RolloutRecord:
    command, only_gpus = tools.command, record.disrupts is Disruption.GPU_PODS

    def chosen(pod: Pod) -> bool:
        return pod.uses_gpus or not only_gpus

    # Nothing is evicted from a node that is given back because of another pod.
    result = DrainResult(unmanaged=draining.unmanaged(command.cluster, record.node, chosen))
    if not result.unmanaged:
        if tools.wait_for_jobs_s and not record.drain_until:
            record = record.to(record.stage, drain_until=command.now() + tools.wait_for_jobs_s)
            tools.save(record)
        _wait_for_jobs(tools, record)
        tools.report(f"draining the node, at most {command.limits.drain:.0f} s")
        result = draining.drain(
            command.cluster,
            record.node,
            command.limits.drain,
            force=False,
            check=lambda: tools.check(record),
            chosen=chosen,
        )
    remaining = pod_list([*result.refused, *result.terminating, *result.unmanaged])
    if remaining:
        tools.report(f"pods that remain: {remaining}")
    clear = result.complete and not result.unmanaged
    if clear and (why := _taken_back(tools, record)):
        return flow.taken_back(record, why)
    tools.note(record, f"{record.work} drain", "drained" if clear else "not drained", remaining)
    return flow.drained(record, result if not clear else DrainResult())


def _taken_back(tools: Tools, record: RolloutRecord) -> str:
    """Why the drained node must be left alone, "" if it need not: kubectl takes no lock, and a drain may take hours."""
    node = tools.command.cluster.node(record.node)
    if node is not None and not node.cordoned:
        return "a user or another program uncordoned its node in the meantime"
    return policy.in_maintenance(node, tools.command.now())


def _wait_for_jobs(tools: Tools, record: RolloutRecord) -> None:
    """Wait until no pod of a Job runs on the cordoned node, or the time for it has passed."""
    command, reported = tools.command, False
    # The end comes from the cluster: it is never later than a wait that begins now.
    until = min(record.drain_until, command.now() + tools.wait_for_jobs_s)
    while command.now() < until:
        tools.check(record)
        jobs = [pod for pod in command.cluster.pods_on(record.node) if pod.owner == "Job" and draining.must_leave(pod)]
        if record.disrupts is Disruption.GPU_PODS:
            jobs = [pod for pod in jobs if pod.uses_gpus]
        if not jobs:
            return
        if not reported:
            tools.report(f"waiting for {len(jobs)} pods of Jobs, at most {until - command.now():.0f} s")
            reported = True
        tools.pause()


def _apply(tools: Tools, record: RolloutRecord) -> RolloutRecord:
    tools.report(f"applying {record.work}")
    return flow.applied(record, tools.attempt(record, "apply", lambda: tools.work.apply(tools.target)))


def _verify(tools: Tools, record: RolloutRecord) -> RolloutRecord:
    tools.report("verifying")
    began = time.monotonic()
    why = await_healthy(tools, record, verify=lambda: tools.work.verify(tools.target))
    tools.report(f"not verified: {why}" if why else "verified")
    tools.note(record, f"{record.work} verify", "failed" if why else "passed", why, time.monotonic() - began)
    return flow.verified(record, why)


def _undo(tools: Tools, record: RolloutRecord) -> RolloutRecord:
    if record.disrupts is not Disruption.NOTHING and (why := _not_emptied(tools, record)):
        return flow.undone(record, why)
    why = tools.attempt(record, "undo", lambda: tools.work.undo(tools.target))
    return flow.undone(record, why or await_healthy(tools, record))


def _not_emptied(tools: Tools, record: RolloutRecord) -> str:
    """Cordon and drain the node again: a person may have uncordoned it since the work failed. Why that fails, or ""."""
    try:
        if not _begun(tools, record):
            return "a user or another program changed its cordon or its marks"
        drained = _drain(tools, dataclasses.replace(record, applied=True))
    except (NoResponse, Refused):
        # The work that is undone may be the reason.
        if not tools.lock.stops_api:
            raise
        return ""
    return drained.why if drained.stage is Stage.HOLD else ""


def await_healthy(
    tools: Tools, record: RolloutRecord, verify: Callable[[], str] = lambda: "", limit_s: float | None = None
) -> str:
    """Wait until the node is ready, the machine as healthy as before, and ``verify`` finds nothing; why not, or ""."""
    deadline = time.monotonic() + (tools.command.limits.verify if limit_s is None else limit_s)
    attempts = 0
    while True:
        tools.check(record)
        why = _unready(tools, record)
        if not why:
            seen = tools.scan()
            tolerated = max(record.before, State.HEALTHY, key=lambda state: state.rank)
            why, _ = verification.unhealthy(seen.verdict, seen.facts, record.gpus, tolerated=tolerated)
            why = why or _unready(tools, record, seen.verdict.boot_id or "")
        if not why:
            attempts += 1
            why = _own_verification(verify)
        if not why:
            return ""
        if attempts >= _ATTEMPTS or time.monotonic() > deadline:
            # The controller's network may have failed instead of the machine. Then the lock is lost.
            tools.lock.confirm(record)
            return why
        tools.pause()


def _own_verification(verify: Callable[[], str]) -> str:
    try:
        return verify()
    except (Stopped, Lost):
        raise
    except Exception as problem:
        return sentence(problem)


def _unready(tools: Tools, record: RolloutRecord, boot_id: str = "") -> str:
    try:
        why = verification.unready(tools.command.cluster.node(record.node), record.capacity, boot_id)
        if not why and tools.command.is_control_plane(record.machine):
            cluster = tools.command.cluster
            why = "its member of etcd is not ready" if record.node in cluster.without_etcd(cluster.nodes()) else ""
        return why
    except NoResponse as problem:
        return str(problem)


def _uncordon(tools: Tools, record: RolloutRecord) -> RolloutRecord:
    good = record.outcome is not None and record.outcome.good
    is_ours = tools.command.cluster.end_rollout(record.node, record.id, tools.command.now(), done=good)
    if record.disrupts is not Disruption.NOTHING:
        tools.report("uncordoned" if is_ours else "it stays cordoned: others cordoned it in the meantime")
        message = f"gpunodes: {record.work}{f': {record.why}' if record.why else ''}"
        reason = "RolloutEnded" if good else "RolloutFailed"
        tools.command.cluster.event(record.node, reason, message, warning=not good)
    return record.to(Stage.RELEASE)


def _hold(tools: Tools, record: RolloutRecord) -> None:
    tools.note(record, record.work, "failed", record.why, tools.command.now() - record.started)
    tools.report(f"failed: {record.why}")
    tools.command.cluster.event(record.node, "RolloutFailed", f"gpunodes: {record.work}: {record.why}", warning=True)


def _release(tools: Tools, record: RolloutRecord) -> RolloutRecord:
    # A record in a Lease may come without an outcome.
    outcome = record.outcome or RolloutOutcome.SKIPPED
    tools.note(record, record.work, outcome.value, record.why, tools.command.now() - record.started)
    tools.lock.release(record)
    tools.report(outcome.value + (f": {record.why}" if record.why else ""))
    return record.to(Stage.END, outcome=outcome)


_STAGES: Mapping[Stage, Callable[[Tools, RolloutRecord], RolloutRecord]] = {
    Stage.COLLECT: _collect,
    Stage.CORDON: _cordon,
    Stage.PREPARE: _prepare,
    Stage.DRAIN: _drain,
    Stage.APPLY: _apply,
    Stage.VERIFY: _verify,
    Stage.UNDO: _undo,
    Stage.UNCORDON: _uncordon,
    Stage.RELEASE: _release,
}
