"""Tasks that are stuck in the NVIDIA driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gpunodes.ansible.module_utils.probe.known import FILE_WAIT, STUCK_S, in_driver
from gpunodes.health import patterns
from gpunodes.health.evidence import clean
from gpunodes.health.facts import Facts, Smi
from gpunodes.health.model import Action, Finding, LineKind, LogRecord, State
from gpunodes.health.rules.rule import Rule, RuleInput

SMI_STILL_S = 15.0
"""A nvidia-smi that has not moved for so many seconds, of the 20 s that it has, hangs."""
SMI_SLOW_S = 300.0
"""A nvidia-smi that exists for so many seconds hangs, even if it moves: the driver can poll for a dead GPU."""
LOCKUP_AGAIN_S = 300.0
"""The kernel reports a soft lockup that continues every 20 to 30 seconds: after so many without one it has ended."""
LOG_CLOCK_DRIFT = 1e-4
"""By how much the clock of the kernel's log may be slower than that of the uptime, which is corrected."""


def hung_in_driver(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.HUNG_TASK)
    left = [record for record in records if not _went_on(data.facts, record)]
    if proven := _proven(data, left):
        message = f"Stuck in the NVIDIA driver: {_tasks(proven)}."
        yield rule.finding(Action.REBOOT, message, *_proven_first(proven), state=State.HUNG, hung=True)
    elif left:
        yield _named(rule, left)
    elif records:
        message = f"Was stuck in the NVIDIA driver, and went on or ended since: {_tasks(records)}."
        yield rule.finding(Action.NONE, message, *records, watch=True)


def _tasks(records: Sequence[LogRecord]) -> str:
    """The first tasks of the records, for a message."""
    return ", ".join(filter(None, (record.detail for record in records[:5])))


def _went_on(facts: Facts | None, record: LogRecord) -> bool:
    """Whether a thread that the kernel reported sleeps no more, by a probe that saw all threads.

    The report stays in the log until the next boot. The owner of a lock may run: it has the lock as long as one of
    those sleeps that the kernel reported as waiting for it.
    """
    if facts is None or facts.lacks("tasks", "threads", "privilege"):
        return False
    owned = (patterns.LOCK_OWNER.search(line.encode(errors="replace")) for line in record.evidence)
    waiting = {(found[2] or b"").decode() for found in owned if found}
    pids = {record.detail.rpartition(":")[2], *waiting}
    # The evidence has the first lines only.
    if len(waiting) < record.processes or not all(pid.isdigit() for pid in pids):
        return False
    return not any(str(task.pid) in pids and task.state == "D" for task in facts.tasks)


def _proven(data: RuleInput, records: Sequence[LogRecord]) -> list[LogRecord]:
    """Records that a repair may rest on: of a live machine those with the driver in their stack.

    Its log has the stacks. A saved log may lack them, and only a person acts on it: there the name counts, too.
    """
    return [record for record in records if record.proven or data.facts is None]


def _named(rule: Rule, records: Sequence[LogRecord]) -> Finding:
    message = "Stuck, with a name of the driver's but without a stack that shows where: "
    message += f"{_tasks(records)}. Check again later."
    return rule.finding(Action.NONE, message, *records, watch=True)


def _proven_first(records: Sequence[LogRecord]) -> list[LogRecord]:
    """Records whose evidence has the driver's frame first, each with the first two lines of its evidence."""
    cut = (dataclasses.replace(record, evidence=record.evidence[:2]) for record in records)
    return sorted(cut, key=lambda record: not record.proven)


def _has_frame(line: str) -> bool:
    return patterns.NVIDIA_FRAME.search(line.encode(errors="replace")) is not None


def task_in_driver(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    facts = data.facts
    asleep = [task for task in (facts.tasks if facts else ()) if task.state == "D" and in_driver(task.stack)]
    if not facts or not asleep:
        return
    task = max(asleep, key=lambda each: each.age_s)
    # The frame of the driver first: the stack begins with the kernel's own functions.
    stack = sorted(task.stack, key=lambda frame: not _has_frame(frame))
    name = f"{clean(task.name.encode(errors='replace'))} ({task.pid})"
    if task.age_s >= STUCK_S:
        message = f"{name} is in uninterruptible sleep in the NVIDIA driver and cannot be killed."
        yield rule.finding(Action.REBOOT, message, evidence=stack, state=State.HUNG, hung=True)
    else:
        message = f"{name} has waited in the NVIDIA driver for {task.age_s:.1f} s: check again."
        yield rule.finding(Action.NONE, message, evidence=stack, watch=True)


def _waits_elsewhere(facts: Facts) -> str:
    """What the nvidia-smi in uninterruptible sleep waits for, by its stack, if that is not the driver; else "".

    Without a stack, which some kernels do not show: "" if it can only be the driver. The probe reports only its own
    nvidia-smi then, not one by its name. But while many threads wait, files may make it wait, too: they do so if one of
    the others waits for a file, or if nothing shows for what the others wait.
    """
    if facts.smi.task_state != "D":
        return ""
    frames = facts.smi.stack or [frame for task in facts.tasks if task.pid == facts.smi.pid for frame in task.stack]
    if in_driver(frames):
        return ""
    if frames:
        return "an NFS server or a folder" if any(map(_is_nfs, frames)) else "something else"
    if not facts.lacks("threads"):
        return ""
    functions = [task.wchan for task in facts.tasks if task.state == "D" and task.wchan not in {"", "0"}]
    return "something unknown" if not functions or any(map(FILE_WAIT.match, functions)) else ""


def _is_nfs(line: str) -> bool:
    return patterns.NFS_FRAME.search(line.encode(errors="replace")) is not None


def smi_stuck(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    smi = data.facts.smi if data.facts else None
    if data.facts is None or smi is None or smi.status not in {"stuck", "timeout"}:
        return
    if waits := _waits_elsewhere(data.facts):
        message = f"nvidia-smi ({smi.pid}) waits for {waits}, not for the driver: check again later."
        yield rule.finding(Action.NONE, message, watch=True, evidence=smi.stack)
    elif _moves(smi):
        # On a healthy H200, 150 programs that start at once are enough.
        message = (
            f"nvidia-smi did not finish within {smi.took_s:.0f} s, and had moved {smi.still_s:.1f} s before the end."
            " A driver that many programs use can be this slow: check again later."
        )
        yield rule.finding(Action.NONE, message, watch=True)
    elif smi.task_state == "D":
        message = f"nvidia-smi ({smi.pid}) is in uninterruptible sleep; gpunodes does not start a second one."
        yield rule.finding(Action.REBOOT, message, state=State.HUNG, hung=True)
    else:
        message = f"nvidia-smi did not finish within {smi.took_s:.0f} s."
        yield rule.finding(Action.RESET_GPU, message, state=State.SICK)


def _moves(smi: Smi) -> bool:
    """Whether nvidia-smi was slow, or gpunodes gave up early, but it did not hang. Some minutes are too slow."""
    return smi.still_s is not None and smi.still_s < SMI_STILL_S and smi.took_s < SMI_SLOW_S


def silent_hung_tasks(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    count = data.facts.hung_detected if data.facts else None
    if count and not data.of_kinds(LineKind.HUNG_TASK, LineKind.OTHER_HUNG_TASK):
        message = f"The kernel has counted {count} hung tasks, but its log does not show them."
        yield rule.finding(Action.NONE, message, watch=True)


def soft_lockup_in_driver(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.SOFT_LOCKUP)
    left = [record for record in records if not _lockup_ended(data.facts, record)]
    if proven := _proven(data, left):
        message = "A CPU is in a soft lockup in the NVIDIA driver."
        yield rule.finding(Action.REBOOT, message, *_proven_first(proven))
    elif left:
        yield _named(rule, left)
    elif records:
        yield rule.finding(Action.NONE, "A CPU was in a soft lockup in the driver, and went on.", *records, watch=True)


def _lockup_ended(facts: Facts | None, record: LogRecord) -> bool:
    """Whether the kernel of a live machine has not reported a lockup again; its report stays in the log."""
    last = record.last.monotonic
    if facts is None or not facts.uptime_s or last is None:
        return False
    return facts.uptime_s - last > LOCKUP_AGAIN_S + facts.uptime_s * LOG_CLOCK_DRIFT


def driver_crashed(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    records = data.of_kinds(LineKind.CRASH)
    if proven := _proven(data, records):
        message = "The kernel ended a task inside the NVIDIA driver, with the driver's locks: "
        message += f"{_tasks(proven) or 'unknown'}."
        yield rule.finding(Action.REBOOT, message, *_proven_first(proven))
    elif records:
        yield _named(rule, records)
