"""Parses the lines of a log that concern an NVIDIA GPU: `ANCHORS` are the markers by which they are found."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpunodes.health import catalog, patterns
from gpunodes.health.evidence import EVIDENCE_CHARACTERS, clean
from gpunodes.health.model import LineKind

AHEAD = 64 << 10
"""Bytes after a line that are searched for its wrapped rest, or for the stack of a hung task."""
_REPORT = 16 << 10
"""Bytes of a hung-task report."""


@dataclass(frozen=True, slots=True)
class LineMatch:
    """One relevant line."""

    kind: LineKind | None
    """None: a kernel line that is not about an NVIDIA GPU."""
    text: bytes
    gpu: bytes = b""
    code: int = 0
    detail: str = ""
    process: bytes = b""
    header: bytes | None = None
    """The part of the line before the match, if the match starts before the marker."""
    from_program: bool = False
    """A program's message, not a log line."""


Read = Callable[[bytes, int, bool], Iterator[LineMatch]]


@dataclass(frozen=True, slots=True)
class Anchor:
    """A marker that lines of one kind contain, and the function that parses such a line."""

    marker: bytes
    read: Read


def _rest_of_line(window: bytes, begin: int) -> bytes:
    """The rest of a line, limited to the length of evidence."""
    limit = begin + 4 * EVIDENCE_CHARACTERS
    end = window.find(b"\n", begin, limit)
    return window[begin : end if end >= 0 else limit]


def _match_at(pattern: re.Pattern[bytes], window: bytes, position: int) -> re.Match[bytes] | None:
    """The match of a pattern that covers a position."""
    for found in pattern.finditer(window, max(0, position - 240), position + 240):
        if found.end() > position:
            return found if found.start() <= position else None
    return None


def _text_before(window: bytes, begin: int) -> bytes:
    limit = max(0, begin - patterns.HEADER_BYTES)
    return window[window.rfind(b"\n", limit, begin) + 1 or limit : begin]


def nvrm(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    """A line of the driver: an Xid, or one of the messages about the start of the driver and of GPUs."""
    found = patterns.XID.match(window, position)
    if found:
        code = int(found[2])
        yield LineMatch(
            LineKind.XID,
            _rest_of_line(window, position),
            found[1],
            code,
            _xid_detail(window, found, code),
            found[3] or b"",
        )
        return
    for kind, pattern in _NVRM_KINDS:
        found = pattern.match(window, position)
        if found:
            gpu = found[1] if pattern.groups == 1 and found[1] else b""
            detail = _mismatch_detail(found) if kind is LineKind.MISMATCH else ""
            yield LineMatch(kind, _rest_of_line(window, position), gpu, detail=detail)
            return
    found = patterns.OFF_BUS.match(window, position + len(b"NVRM: "))
    if found:
        yield LineMatch(LineKind.OFF_BUS, _rest_of_line(window, position), found[1] or found[2])


_NVRM_KINDS = (
    (LineKind.MISMATCH, patterns.MISMATCH),
    (LineKind.INIT_CAUSE, patterns.INIT_CAUSE),
    (LineKind.INIT_FAILED, patterns.INIT_FAILED),
    (LineKind.GSP_TIMEOUT, patterns.GSP_TIMEOUT),
    (LineKind.RESET_REQUIRED, patterns.RESET_REQUIRED),
)


def _xid_detail(window: bytes, found: re.Match[bytes], code: int) -> str:
    """The data that decides about an Xid in addition to its code: the number of 154, the registers of NVLink 5."""
    if code == catalog.RECOVERY_CHANGED:
        number = patterns.RECOVERY.match(window, found.end())
        return str(int(number[1], 16)) if number else ""
    if code in catalog.NVLINK5:
        registers = patterns.REGISTERS.match(window, found.end())
        fatal = "fatal" if patterns.FATAL.match(window, found.end()) else ""
        return f"{registers[1].decode()} {registers[2].decode()} {fatal}" if registers else fatal
    return ""


def _mismatch_detail(found: re.Match[bytes]) -> str:
    """The client, its version and the module's version."""
    return " ".join((part or b"-").decode("ascii", "replace").replace(" ", "_") for part in found.groups())


def _sxid(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = _match_at(patterns.SXID, window, position)
    if found and not found[5]:
        severity = (found[3] or b"").decode().lower()
        if found[4]:
            # The driver's numbers: 0 non-fatal, 1 fatal.
            severity = "fatal" if found[4] == b"1" else "non-fatal"
        begin = found.start()
        yield LineMatch(
            LineKind.SXID,
            _rest_of_line(window, begin),
            found[1],
            int(found[2]),
            severity,
            header=_text_before(window, begin),
        )


def _report_range(
    window: bytes, found: re.Match[bytes], ends: re.Pattern[bytes], *, newest_first: bool
) -> tuple[int, int]:
    """Begin and end of the rest of a report: up to the next report, or before it if the newest line is first."""
    if not newest_first:
        following = ends.search(window, found.end(), found.end() + AHEAD)
        return found.end(), following.start() if following else found.end() + AHEAD
    begin = max(0, found.start() - _REPORT)
    for marker in patterns.BEFORE_REPORT:
        begin = max(begin, window.rfind(marker, begin, found.start()))
    return begin, found.start()


@dataclass(frozen=True, slots=True)
class _StuckReport:
    """A kind of report of a stuck task: its patterns, and its line kind inside and outside the driver."""

    pattern: re.Pattern[bytes]
    after: re.Pattern[bytes]
    in_driver: LineKind
    elsewhere: LineKind | None


_HUNG = _StuckReport(patterns.HUNG_TASK, patterns.AFTER_HUNG_TASK, LineKind.HUNG_TASK, LineKind.OTHER_HUNG_TASK)
_LOCKUP = _StuckReport(patterns.SOFT_LOCKUP, patterns.AFTER_LOCKUP, LineKind.SOFT_LOCKUP, None)


def _stuck(report: _StuckReport, window: bytes, position: int, newest_first: bool) -> Iterator[LineMatch]:
    """A stuck task; it is in the driver if its stack has a frame of the driver, or if it is a thread of the driver."""
    found = _match_at(report.pattern, window, position)
    if found:
        begin, end = _report_range(window, found, report.after, newest_first=newest_first)
        in_driver = patterns.NVIDIA_TASK.fullmatch(found[1]) or patterns.NVIDIA_FRAME.search(window, begin, end)
        task = clean(found[1] + b":" + found[2]) if in_driver else ""
        kind = report.in_driver if in_driver else report.elsewhere
        yield LineMatch(
            kind, _rest_of_line(window, found.start()), detail=task, header=_text_before(window, found.start())
        )


def _aer(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = _match_at(patterns.AER, window, position)
    if not found:
        return
    driver, device, severity, fatal = found.groups()
    header = _text_before(window, found.start())
    text = _rest_of_line(window, found.start())
    detail = "corrected" if severity == b"Corrected" else "fatal" if fatal == b"Fatal" else "non-fatal"
    unhandled = patterns.AER_UNHANDLED.search(window, found.end(), found.end() + 4096) if detail == "fatal" else None
    if driver != b"nvidia" and unhandled:
        device, driver = unhandled[1], b"nvidia"
    yield LineMatch(LineKind.AER if driver == b"nvidia" else None, text, device, detail=detail, header=header)


def _uvm(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = _match_at(patterns.UVM_FATAL, window, position)
    if found:
        yield LineMatch(
            LineKind.UVM_FATAL, _rest_of_line(window, found.start()), header=_text_before(window, found.start())
        )


def _off_bus(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = _match_at(patterns.OFF_BUS, window, position)
    if found and not _text_before(window, found.start()).rstrip().endswith(b"NVRM:"):
        text = _rest_of_line(window, found.start())
        yield LineMatch(LineKind.OFF_BUS, text, found[1] or found[2], header=_text_before(window, found.start()))


def _smi_message(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = _match_at(patterns.SMI_MESSAGE, window, position)
    if found and not _text_before(window, found.start()).strip():
        # The beginning identifies the message; the text after the GPU comes from the driver.
        message = found["message"] or b"device handle: " + found["problem"]
        detail = clean(b" ".join(message.split()))
        yield LineMatch(
            LineKind.SMI_MESSAGE,
            _rest_of_line(window, found.start()),
            found["gpu"] or b"",
            detail=detail,
            from_program=True,
        )


def _smi_value(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = patterns.SMI_VALUE.match(window, position)
    if found:
        line = _text_before(window, position) + _rest_of_line(window, position)
        yield LineMatch(LineKind.SMI_MESSAGE, line, detail=found[1].decode(), from_program=True)


ANCHORS = (
    Anchor(b"NVRM: ", nvrm),
    Anchor(b"SXid (", _sxid),
    Anchor(b"blocked for more", functools.partial(_stuck, _HUNG)),
    Anchor(b"soft lockup - CPU", functools.partial(_stuck, _LOCKUP)),
    Anchor(b"PCIe Bus Error:", _aer),
    Anchor(b"global fatal error", _uvm),
)
# In a log, these would be a program's message about another time, or a quotation.
TEXT_ANCHORS = (
    Anchor(b"fallen off the bus", _off_bus),
    Anchor(b"Failed to initialize NVML", _smi_message),
    Anchor(b"NVIDIA-SMI has failed", _smi_message),
    Anchor(b"NVIDIA-SMI couldn't", _smi_message),
    Anchor(b"Unable to determine the device", _smi_message),
    Anchor(b"No devices were found", _smi_message),
    Anchor(b"GPU is lost", _smi_value),
    Anchor(b"GPU requires reset", _smi_value),
    Anchor(b"ERR!", _smi_value),
)
