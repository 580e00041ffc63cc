"""Parses the kernel's reports of tasks that are stuck or crashed, and finds the driver in their stacks."""

from __future__ import annotations

import dataclasses
import functools
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass

from gpunodes.health import patterns
from gpunodes.health.evidence import clean
from gpunodes.health.line_match import AHEAD, Anchor, LineMatch, match_at, rest_of_line, text_before
from gpunodes.health.model import LineKind

_REPORT = 16 << 10
"""Bytes of a report that has its own end."""
_LINE = 64 << 10
"""The most bytes of a line before a frame: those of a journal's entry (`journal.LINE_BYTES`)."""
_BEFORE_FRAME = 1024
"""The most bytes before a frame in a line of the kernel, which has 1 KiB for a whole line (kernel/printk)."""
_NAME = 512
"""The most bytes of a function's name (KSYM_NAME_LEN)."""
_FUNCTION = (string.ascii_letters + string.digits + "_.").encode()
"""The characters of a function's name."""


def _report_end(window: bytes, found: re.Match[bytes], ends: re.Pattern[bytes], limit: int) -> int:
    """The end of the rest of a report: where the next one begins, at most ``limit`` bytes later."""
    following = ends.search(window, found.end(), found.end() + limit)
    return following.start() if following else found.end() + limit


def _find(pattern: re.Pattern[bytes], window: bytes, begin: int, end: int) -> tuple[int, bytes]:
    """The position of the first frame, or work item, that matches, where the kernel writes one; the end if none does.

    And the frame, empty if there is none.
    """
    searched, newline = max(0, begin - _LINE), -1
    for found in pattern.finditer(window, begin, end):
        # From the true beginning of the line: the middle of a long one can be a file's name. No byte is searched twice.
        newline = max(newline, window.rfind(b"\n", searched, found.start()))
        searched = found.start()
        line = newline + 1
        if (newline < 0 and begin > _LINE) or searched - line > _LINE:
            continue
        name = window[max(line, searched - _NAME) : searched]
        name = name[len(name.rstrip(_FUNCTION)) :]
        if _may_precede(window, line, searched - len(name)):
            return searched, b" ".join((name + found[0]).split())
    return end, b""


def _may_precede(window: bytes, line: int, frame: int) -> bool:
    """Whether the kernel writes what is between the beginning of a line and a frame; other headers are not known."""
    start = window[line : min(frame, line + _BEFORE_FRAME)].lstrip()
    if start and not start.startswith(b"["):
        return True
    if frame - line > _BEFORE_FRAME:
        return False
    return not start or patterns.BEFORE_FRAME.fullmatch(window, line, frame) is not None


def _in_driver(name: bytes, window: bytes, begin: int, end: int, *, waits: bool = True) -> tuple[bool, bytes]:
    """Whether a task is stuck in the driver, by the stack in its report, and what proves it.

    The stack is the kernel's word. The name is not, since a program calls itself what it likes: it proves something of
    a thread of the kernel only. Where the report lacks the stack, the name is a hint without a proof. A task that
    ``waits`` for a page of memory does not wait in the driver, which needs the page.
    """
    position, frame = _find(patterns.NVIDIA_FRAME, window, begin, end)
    if frame:
        inner = patterns.UNSURE_FRAME.sub(b"", window[begin:position])
        return (False, b"") if waits and patterns.FAULT_FRAME.search(inner) else (True, frame)
    if not patterns.NVIDIA_TASK.fullmatch(name):
        return False, b""
    _, last = _find(patterns.STACK_END, window, begin, end)
    if last.startswith(b"kthread+"):
        return True, last
    return not last and not patterns.NFS_FRAME.search(window, begin, end), b""


def _match(
    kind: LineKind | None, window: bytes, found: re.Match[bytes], *, task: bytes = b"", proof: bytes = b""
) -> LineMatch:
    header = text_before(window, found.start())
    return LineMatch(kind, rest_of_line(window, found.start()), detail=clean(task), header=header, proof=proof)


def _task(name: bytes, pid: bytes | None) -> bytes:
    return name + b":" + pid if pid else name


@dataclass(frozen=True, slots=True)
class _StuckReport:
    """A kind of report of a stuck task: its patterns, and its line kind inside and outside the driver."""

    pattern: re.Pattern[bytes]
    after: re.Pattern[bytes]
    in_driver: LineKind
    elsewhere: LineKind | None


_HUNG = _StuckReport(patterns.HUNG_TASK, patterns.AFTER_HUNG_TASK, LineKind.HUNG_TASK, LineKind.OTHER_HUNG_TASK)
_LOCKUP = _StuckReport(patterns.SOFT_LOCKUP, patterns.AFTER_LOCKUP, LineKind.SOFT_LOCKUP, None)


def _stuck(report: _StuckReport, window: bytes, position: int) -> Iterator[LineMatch]:
    """A stuck task. A tool of the driver can be stuck elsewhere: nvidia-smi may write to a home directory on NFS."""
    found = match_at(report.pattern, window, position)
    if found:
        end = _report_end(window, found, report.after, AHEAD)
        in_driver, proof = _in_driver(found[1], window, found.end(), end, waits=report is _HUNG)
        kind = report.in_driver if in_driver else report.elsewhere
        yield _match(kind, window, found, task=_task(*found.groups()) if in_driver else b"", proof=proof)


def _owner(window: bytes, position: int) -> Iterator[LineMatch]:
    """The task that holds what a hung task waits for. Its stack follows, unless it is reported as hung itself.

    It hangs in the driver under the same conditions as a task that is reported as hung. The process is the one that
    waits.
    """
    found = match_at(patterns.LOCK_OWNER, window, position)
    if found:
        end = _report_end(window, found, patterns.AFTER_HUNG_TASK, AHEAD)
        _, waiter, name, pid = found.groups()
        in_driver, proof = _in_driver(name, window, found.end(), end)
        task, kind = (_task(name, pid), LineKind.HUNG_TASK) if in_driver else (b"", None)
        yield dataclasses.replace(_match(kind, window, found, task=task, proof=proof), process=waiter or b"?")


def _blocked(window: bytes, position: int) -> Iterator[LineMatch]:
    """A hung task, or the owner of what one waits for."""
    yield from _stuck(_HUNG, window, position)
    yield from _owner(window, position)


def _unfrozen(window: bytes, position: int) -> Iterator[LineMatch]:
    """Tasks that did not freeze within the time limit of a suspend; a dump of each one follows."""
    found = match_at(patterns.NOT_FROZEN, window, position)
    if found is None:
        return
    end = _report_end(window, found, patterns.AFTER_FREEZE, _REPORT)
    dumps = list(patterns.TASK_DUMP.finditer(window, found.end(), end))
    starts = [dump.start() for dump in dumps]
    for dump, following in zip(dumps, [*starts[1:], end], strict=False):
        in_driver, proof = _in_driver(dump[1], window, dump.end(), following)
        if in_driver:
            yield _match(LineKind.HUNG_TASK, window, found, task=_task(dump[1], dump[2]), proof=proof)
            return
    yield _match(None, window, found)


def _crashed(window: bytes, position: int) -> Iterator[LineMatch]:
    """An oops: in the driver if the driver is in the stack of the fault, or if the task is a thread of the driver.

    Frames with a question mark are old data on the stack, and what an interrupt interrupted is not at fault.
    """
    found = match_at(patterns.OOPS, window, position)
    if found is None:
        return
    end = _report_end(window, found, patterns.AFTER_OOPS, _REPORT)
    report = patterns.UNSURE_FRAME.sub(b"", window[found.end() : end])
    task = patterns.TASK_OF_OOPS.search(report)
    in_driver, proof = _in_driver(task[2] if task else b"", report, 0, len(report), waits=False)
    name = _task(task[2], task[1]) if task and in_driver else b""
    yield _match(LineKind.CRASH if in_driver else None, window, found, task=name, proof=proof)


STUCK_ANCHORS = (
    Anchor(b" blocked ", _blocked, reads_on=True),
    Anchor(b"can't die for more", functools.partial(_stuck, _HUNG), reads_on=True),
    Anchor(b"refusing to freeze", _unfrozen, reads_on=True),
    Anchor(b"soft lockup - CPU", functools.partial(_stuck, _LOCKUP), reads_on=True),
    Anchor(b" [#", _crashed, reads_on=True),
)
