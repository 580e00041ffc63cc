"""The repair of one machine, stage by stage.

Each stage is recorded on disk and in the machine's lock before it starts.
Every stage is idempotent, so any command can resume from the record of another command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from gpunodes.engine import evidence, records
from gpunodes.engine.history import EntryKind
from gpunodes.operations import drain as draining
from gpunodes.operations.repair.escalating import escalate
from gpunodes.operations.repair.tools import Tools
from gpunodes.operations.repair.verifying import verify
from gpunodes.repair import flow, resume
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage


def run(tools: Tools, record: RepairRecord) -> RepairRecord:
    """Continue from the record's stage to the end; the last record.

    Raises GpunodesError when it cannot continue now (the control plane does not respond, the lock was lost, the
    command was interrupted): the record stays, and ``gpunodes repair --resume`` continues.
    """
    if record.stage in (Stage.SCAN, Stage.LOCK):
        record = record.to(Stage.COLLECT)
    tools.note_beginning(record)
    while record.stage is not Stage.END:
        tools.check_stop()
        tools.save(record)
        record = _STAGES[record.stage](tools, record)
    records.remove(record)
    return record


def _collect(tools: Tools, record: RepairRecord) -> RepairRecord:
    tools.report("collecting evidence")
    folder = evidence.open_folder(record.id)
    try:
        written = tools.control.collect(folder, tools.facts, bug_report=record.bug_report)
    finally:
        evidence.close_folder(record.id)
    tools.note(record, EntryKind.STAGE, "collect", detail=f"{folder}: {', '.join(written)}" if written else "")
    return record.to(Stage.CORDON)


def _cordon(tools: Tools, record: RepairRecord) -> RepairRecord:
    if tools.cluster:
        # The budget for it was decided under a lock: another command may use it as soon as this one's is lost.
        check = functools.partial(tools.lock.check, record)
        cordoned = tools.cluster.cordon(record.node, record.id, record.reason, tools.now(), check)
        # The collection takes minutes; a user may have begun to work on the machine.
        if not cordoned:
            node = tools.cluster.node(record.node)
            if why := resume.forbidden(record, node, tools.now()):
                return record.to(Stage.RELEASE, outcome=RepairOutcome.NOT_REPAIRED, why=f"in the meantime: {why}")
            if node and not node.cordoned:
                return record  # maintenance, or that cordon, ended just now: again
        tools.report("cordoned" if cordoned else "already cordoned by a user or another program; the cordon will stay")
        tools.note(record, EntryKind.STAGE, "cordon", "cordoned" if cordoned else "already cordoned")
        record = record.to(record.stage, own_cordon=cordoned)
        reason = f"gpunodes repairs this machine: {record.reason}"
        tools.cluster.event(record.node, "RepairStarted", reason, warning=False)
    return record.to(Stage.DRAIN)


def _drain(tools: Tools, record: RepairRecord) -> RepairRecord:
    if not tools.cluster:
        return flow.drained(record, flow.DrainResult())
    limit = tools.limits.drain_hung if record.hung else tools.limits.drain
    tools.report(f"draining the node, at most {limit:.0f} s")

    def check() -> None:
        tools.check_stop()
        tools.lock.check(record)

    force = record.force_drain and record.hung
    result = draining.drain(tools.cluster, record.node, limit, force=force, check=check)
    for pods, status in (
        (result.refused, "that cannot be evicted"),
        (result.terminating, "that do not terminate"),
        (result.deleted, "deleted by force"),
        (result.unmanaged, "that stay"),
    ):
        if pods:
            tools.report(f"pods {status}: {flow.pod_list(pods)}")
    outcome = "drained" if result.complete else "not drained"
    remaining = flow.pod_list([*result.refused, *result.terminating, *result.deleted, *result.unmanaged])
    tools.note(record, EntryKind.STAGE, "drain", outcome, remaining)
    return flow.drained(record, result)


def _uncordon(tools: Tools, record: RepairRecord) -> RepairRecord:
    good = record.outcome is not None and record.outcome.good
    if tools.cluster:
        uncordoned = tools.cluster.uncordon(record.node, record.id, tools.now())
        stays = "it stays cordoned, since it is in maintenance, or a user or another program cordoned it"
        tools.report("uncordoned" if uncordoned else stays)
        message = "is verified as healthy" if good else f"was not repaired: {record.why}"
        reason = "RepairEnded" if good else "RepairFailed"
        tools.cluster.event(record.node, reason, f"this machine {message}", warning=not good)
    return record.to(Stage.RELEASE)


def _give_up(tools: Tools, record: RepairRecord) -> RepairRecord:
    if tools.cluster:
        tools.cluster.give_up(record.node, record.id, record.why)
        message = f"this machine needs manual repair: {record.why}; then run `gpunodes uncordon {record.machine}`"
        tools.cluster.event(record.node, "NeedsRepair", message, warning=True)
    return record.to(Stage.RELEASE)


def _release(tools: Tools, record: RepairRecord) -> RepairRecord:
    # The history first: a repair in neither the lock nor the history would be forgotten.
    # A record in a Lease may come without one.
    outcome = record.outcome or RepairOutcome.NOT_REPAIRED
    tools.note_end(record, outcome.value)
    tools.lock.release(record)
    tools.report(outcome.value + (f": {record.why}" if record.why else ""))
    return record.to(Stage.END)


_STAGES: Mapping[Stage, Callable[[Tools, RepairRecord], RepairRecord]] = {
    Stage.COLLECT: _collect,
    Stage.CORDON: _cordon,
    Stage.DRAIN: _drain,
    Stage.ESCALATE: escalate,
    Stage.VERIFY: verify,
    Stage.UNCORDON: _uncordon,
    Stage.UNDO: _uncordon,
    Stage.GIVE_UP: _give_up,
    Stage.RELEASE: _release,
}
