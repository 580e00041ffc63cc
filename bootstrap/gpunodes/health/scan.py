"""Turns a log of any length into records about NVIDIA's GPUs: each kind of line once, with its count.

Only a few lines of a log matter. Blocks of bytes are therefore searched for a few markers, and only lines with a marker
are parsed. A window extends before and after the current block, for reports of several lines.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpunodes.health import catalog, patterns
from gpunodes.health.find import holds
from gpunodes.health.model import MANY_PROCESSES, LineKind, LogRecord, Time
from gpunodes.model import printable

if TYPE_CHECKING:
    from gpunodes.health import smi

AHEAD = 64 << 10
"""Bytes after a line that are searched for its wrapped rest, or for the stack of a hung task."""
BEHIND = 64 << 10
"""The same before it, for logs with the newest line first."""
_MESSAGE = 256
"""Bytes in which one line has at most one message."""
_FLOOD = 64
"""After this many equal lines, the following ones are matched together."""
EVIDENCE_LINES = 3
EVIDENCE_CHARACTERS = 400
MANY_RECORDS = 4096
"""More different records than any machine has; a fabricated log's further records are dropped."""
_JSON_LINE = 64 << 10
_REPORT = 16 << 10
"""Bytes of a hung-task report."""

NO_TIME = Time()


@dataclass(frozen=True, slots=True)
class Log:
    """The result of scanning one stream."""

    records: tuple[LogRecord, ...] = ()
    booted: Time = NO_TIME
    """Time of the last boot in the stream."""
    boot_id: str | None = None
    recognised: bool = False
    """It contained kernel lines or output of nvidia-smi."""
    gpus: tuple[smi.SmiGpu, ...] | None = None
    """nvidia-smi's values for each GPU; None if there was no output of nvidia-smi."""
    kinds: tuple[str, ...] = ()
    """What the stream was recognised as."""


@dataclass(slots=True)
class _Counter:
    """Counts equal lines for one record. Headers are parsed only at the end, which keeps log floods fast."""

    first: bytes
    last: bytes
    count: int = 0
    evidence: list[str] = field(default_factory=list)
    processes: set[bytes] = field(default_factory=set)


_Key = tuple[LineKind, bytes, int, str]


class Scanner:
    """Scans a stream in pieces; ``finish`` returns the result. Lines older than ``since`` do not count."""

    def __init__(self, since: Time = NO_TIME) -> None:
        self._since = since if since != NO_TIME else None
        self._window = b""
        self._next = 0
        self._counters: dict[_Key, _Counter] = {}
        self._booted = NO_TIME
        self._boot_id: str | None = None
        self._reversed = False
        self._skip = False
        """The current lines belong to an older boot."""
        self._recognised = False
        self._begun = False
        self._is_log = False
        self._smi: smi.Reader | None = None
        self._is_json = False
        self._boot_markers: tuple[bytes, ...] = _BOOT_MARKERS
        self._floods: dict[bytes, _Counter] = {}
        """Counters of Xids that may repeat, by the beginning of their line."""

    def feed(self, data: bytes) -> None:
        """Take the next piece of the stream."""
        keep = max(0, self._next - BEHIND)
        self._window = self._window[keep:] + data
        self._next -= keep
        if not self._begun and len(self._window) > AHEAD:
            self._begin()
        end = len(self._window) - AHEAD
        if end > self._next:
            self._scan(self._next, end)
            self._next = end

    def finish(self) -> Log:
        """End the stream and return the result."""
        if not self._begun:
            self._begin()
        self._scan(self._next, len(self._window))
        gpus = self._smi.finish() if self._smi else None
        records = tuple(_record(key, counter) for key, counter in self._counters.items())
        recognised = self._recognised or bool(records) or gpus is not None
        kernel = "journal (JSON)" if self._is_json else "kernel log"
        kinds = ((kernel,) if self._recognised or records else ()) + (
            ("nvidia-smi output",) if gpus is not None else ()
        )
        return Log(records, self._booted, self._boot_id, recognised, gpus, kinds)

    def _begin(self) -> None:
        """Detect from the first lines the kind of text, and whether the newest line is first."""
        self._begun = True
        lines = self._window[: 1 << 20].splitlines()[:300]
        nonempty = [line for line in lines if line.strip()]
        self._is_json = bool(nonempty) and nonempty[0].startswith(b'{"')
        self._reversed = patterns.newest_first(_journal_times(lines) if self._is_json else lines)
        times = [patterns.time_of(line[: patterns.HEADER_BYTES // 4]) for line in nonempty]
        stamped = sum(each.text != "" for each in times)
        self._is_log = stamped * 2 > len(nonempty) or self._is_json
        if self._is_log and not any(each.epoch for each in times):
            # journalctl's boot separators occur only in journals, which have dates.
            self._boot_markers = _BOOT_MARKERS[:1]

    def _scan(self, begin: int, end: int) -> None:
        window = self._window
        if not self._recognised:
            self._recognised = patterns.KERNEL_LINE.search(window, begin, end) is not None
        if not self._is_log:
            self._feed_smi(window[begin:end])
        markers = [anchor.marker for anchor in (ANCHORS if self._is_log else (*ANCHORS, *TEXT_ANCHORS))]
        if self._is_json:
            markers += _JSON_BYTES
        # A marker that starts before the end may extend beyond it.
        block = window[begin : end + _LONGEST]
        found = {marker for marker in markers if holds(block, marker)}
        if not found and not self._counters and not self._reversed:
            return
        positions = [
            position
            for marker in self._boot_markers
            if holds(block, marker)
            for position in _positions(window, marker, begin, end)
        ]
        for position in sorted(positions):
            booted = self._boot_at(position)
            if booted is None:
                continue
            self._visit_all(found, begin, position)
            self._new_boot(booted)
            begin = position
        self._visit_all(found, begin, end)

    def _feed_smi(self, data: bytes) -> None:
        if self._smi is None:
            # A log does not need the reader, and for a small log the import takes a twentieth of the time.
            from gpunodes.health.smi import Reader

            self._smi = Reader()
        self._smi.feed(data)

    def _visit_all(self, markers: Collection[bytes], begin: int, end: int) -> None:
        """Parse every line with one of the markers, from ``begin`` to before ``end``; all belong to one boot."""
        if self._is_json:
            self._visit_entries(
                sorted(position for marker in markers for position in _positions(self._window, marker, begin, end))
            )
            return
        for anchor in (*ANCHORS, *TEXT_ANCHORS):
            if anchor.marker in markers and not self._skip:
                find = self._without_floods if anchor.read is _nvrm else _positions
                for position in find(self._window, anchor.marker, begin, end):
                    self._visit(position, anchor.read)

    def _without_floods(self, window: bytes, marker: bytes, begin: int, end: int) -> Iterator[int]:
        """The positions of a marker, except those of repeated Xids, which are counted here.

        A log flood has hundreds of thousands of lines. For each, only this is checked: its header has the shape of a
        kernel line's header, and its code and GPU are known.
        """
        find, counters, kernel, digits = window.find, self._floods, patterns.known_kernel, patterns.DIGITS
        end += len(marker) - 1
        position = find(marker, begin, end)
        while position >= 0:
            comma = find(b",", position, position + 64)
            counter = counters.get(window[position:comma]) if comma > 0 else None
            if counter is None and comma > 0:
                comma = find(b",", comma + 1, comma + 64)
                counter = counters.get(window[position:comma]) if comma > 0 else None
            begin = position - patterns.HEADER_BYTES if position > patterns.HEADER_BYTES else 0
            begin = window.rfind(b"\n", begin, position) + 1 or begin
            header = window[begin:position]
            if counter is None or not kernel(header.translate(digits)):
                yield position
                position = find(marker, _next_position(window, position), end)
                continue
            counter.count += 1
            counter.last = header
            if counter.count % _FLOOD == 0:
                comma = self._count_run(counter, header, window[position:comma], begin, end) or comma
            position = find(marker, comma, end)

    def _count_run(self, counter: _Counter, header: bytes, message: bytes, begin: int, end: int) -> int:
        """Count consecutive lines with the same beginning; return the end of the last one, or 0."""
        window = self._window
        run = _lines_like(header, message).match(window, begin, end)
        if run is None:
            return 0
        counter.count += window.count(b"\n", begin, run.end()) - 1
        last = window.rfind(b"\n", begin, run.end() - 1) + 1 or begin
        counter.last = window[last : window.find(message, last)]
        return run.end()

    def _boot_at(self, position: int) -> Time | None:
        """The time of the boot that starts here, None if the kernel did not write the line."""
        found = patterns.BOOTED.match(self._window, position)
        header = self._header(position)
        if found is None:
            return None
        when = patterns.time_of(header)
        # journalctl's separator has no header; the kernel's line has a time, else it is a copy of /proc/version.
        is_boot = found[0].startswith(b"--") if not header else when.text != "" and patterns.from_kernel(header)
        return when if is_boot else None

    def _new_boot(self, when: Time) -> None:
        if self._reversed or when.before(self._booted):
            self._skip = True
        else:
            self._skip = False
            self._booted = when
            self._counters.clear()
            self._floods.clear()

    def _header(self, position: int) -> bytes:
        """The part of a line before a position."""
        begin = max(0, position - patterns.HEADER_BYTES)
        return self._window[self._window.rfind(b"\n", begin, position) + 1 or begin : position]

    def _visit(self, position: int, read: _Read) -> None:
        """Parse a line with one of the markers."""
        header = self._header(position)
        for match in read(self._window, position, self._reversed):
            self._count(match, match.header if match.header is not None else header)

    def _visit_entries(self, positions: Iterable[int]) -> None:
        """Parse entries of ``journalctl -o json``, one per line; each message is read like a log line."""
        end = 0
        for position in positions:
            if position < end:
                continue
            lowest = max(0, position - _JSON_LINE)
            begin = self._window.rfind(b"\n", lowest, position) + 1 or lowest
            end = self._window.find(b"\n", position, begin + _JSON_LINE)
            end = end if end >= 0 else begin + _JSON_LINE
            entry = _journal_entry(self._window[begin:end])
            if entry is not None:
                self._visit_entry(entry, self._window[end : end + AHEAD])

    def _visit_entry(self, entry: Mapping[str, object], following: bytes) -> None:
        header, boot = _journal_header(entry), entry.get("_BOOT_ID")
        if isinstance(boot, str) and boot != self._boot_id and re.fullmatch("[0-9a-f]{32}", boot):
            if self._boot_id is not None:
                self._new_boot(patterns.time_of(header))
            if not self._skip:
                self._boot_id = boot
        message = header + _journal_message(entry)
        for anchor in ANCHORS:
            position = message.find(anchor.marker)
            if position >= 0 and not self._skip:
                for match in anchor.read(message + following, position, False):
                    self._count(match, header)

    def _count(self, match: LineMatch, header: bytes) -> None:
        if not match.from_program and not patterns.from_kernel(header):
            return
        self._recognised = True
        if match.kind is None or (self._since is not None and patterns.time_of(header).before(self._since)):
            return
        key = (match.kind, match.gpu, match.code, match.detail)
        counter = self._counters.get(key)
        if counter is None:
            if len(self._counters) >= MANY_RECORDS:
                return
            counter = self._counters[key] = _Counter(header, header)
        counter.count += patterns.parse(header).repeated if b"repeated" in header else 1
        counter.last = header
        if len(counter.evidence) < EVIDENCE_LINES:
            counter.evidence.append(clean(header + match.text))
        if match.process and len(counter.processes) < MANY_PROCESSES:
            counter.processes.add(match.process)
        if match.kind is LineKind.XID and not match.detail and self._since is None and len(self._floods) < MANY_RECORDS:
            # While processes are counted, only a line with the same process is a repetition.
            counted = match.process and len(counter.processes) < MANY_PROCESSES
            self._floods[b",".join(match.text.split(b",", 2)[: 2 if counted else 1])] = counter


@functools.lru_cache(maxsize=256)
def _lines_like(header: bytes, message: bytes) -> re.Pattern[bytes]:
    """A pattern for consecutive lines with this header, with any numbers, and this beginning of the message."""
    head = re.sub(rb"(?:\\ |\d)+", rb"[ \\d]+", re.escape(header))
    return re.compile(rb"(?:" + head + re.escape(message) + rb",[^\n]*+\n)++")


def clean(line: bytes) -> str:
    """A line as evidence: bounded, and without control characters for a terminal."""
    text = line[: 4 * EVIDENCE_CHARACTERS].decode("utf-8", "replace")
    return printable(text).strip()[:EVIDENCE_CHARACTERS]


def address(text: bytes) -> str:
    """A PCI address in Linux's notation, ``0000:3b:00.0``, from any notation that drivers use."""
    slot_address, _, function = text.decode().lower().partition(".")
    parts = slot_address.split(":")
    domain, bus, slot = (int(part, 16) for part in ["0", *parts][-3:])
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function or 0}"


def _record(key: _Key, counter: _Counter) -> LogRecord:
    kind, gpu, code, detail = key
    first, last = patterns.time_of(counter.first), patterns.time_of(counter.last)
    if last.before(first):
        first, last = last, first
    return LogRecord(
        kind,
        address(gpu) if gpu else "",
        code,
        detail,
        counter.count,
        first,
        last,
        tuple(counter.evidence),
        len(counter.processes),
    )


def _journal_entry(line: bytes) -> Mapping[str, object] | None:
    """The kernel's entry in a line of JSON, None for entries of other writers."""
    import json

    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not _journal_message(entry):
        return None
    transport = entry.get("_TRANSPORT", entry.get("SYSLOG_IDENTIFIER"))
    return entry if transport == "kernel" and entry.get("SYSLOG_FACILITY", "0") == "0" else None


def _journal_message(entry: Mapping[str, object]) -> bytes:
    """The message of an entry; journalctl writes a message that is not UTF-8 as a list of bytes."""
    message = entry.get("MESSAGE")
    if isinstance(message, list):
        try:
            return bytes(message)
        except (TypeError, ValueError):
            return b""
    return message.encode(errors="replace") if isinstance(message, str) else b""


def _journal_times(lines: Iterable[bytes]) -> Iterator[bytes]:
    for line in lines:
        if found := re.search(rb'"__REALTIME_TIMESTAMP"\s*:\s*"(\d{1,16})"', line[:_JSON_LINE]):
            yield _realtime(int(found[1]))


def _journal_header(entry: Mapping[str, object]) -> bytes:
    """A journal entry's header in the format of dmesg."""
    header = b""
    for name, formatted in (("__REALTIME_TIMESTAMP", _realtime), ("__MONOTONIC_TIMESTAMP", _monotonic)):
        value = str(entry.get(name, ""))
        if re.fullmatch(r"[0-9]{1,16}", value):
            header += formatted(int(value))
    return header


def _realtime(usec: int) -> bytes:
    return b"%d-%02d-%02dT%02d:%02d:%02dZ " % time.gmtime(usec // 1_000_000)[:6]


def _monotonic(usec: int) -> bytes:
    return b"[%d.%06d] " % divmod(usec, 1_000_000)


def _positions(window: bytes, marker: bytes, begin: int, end: int) -> Iterator[int]:
    """The positions of a marker from ``begin`` to before ``end``; of several close together on a line, the first."""
    stop = end + len(marker) - 1
    position = window.find(marker, begin, stop)
    while position >= 0:
        yield position
        position = window.find(marker, _next_position(window, position), stop)


def _next_position(window: bytes, position: int) -> int:
    """Where the next message can start; a line that repeats a marker is so parsed only once."""
    newline = window.find(b"\n", position, position + _MESSAGE)
    return newline if newline >= 0 else position + _MESSAGE


# --- parsing of lines with a marker ----------------------------------------------------------------------------------


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


_Read = Callable[[bytes, int, bool], Iterator[LineMatch]]


@dataclass(frozen=True, slots=True)
class Anchor:
    """A marker that lines of one kind contain, and the function that parses such a line."""

    marker: bytes
    read: _Read


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


def _nvrm(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
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
    Anchor(b"NVRM: ", _nvrm),
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
_LONGEST = max(len(anchor.marker) for anchor in (*ANCHORS, *TEXT_ANCHORS))
_JSON_BYTES = [b'"MESSAGE":[', b'"MESSAGE" : [']
_BOOT_MARKERS = (b"Linux version ", b"-- Boot ", b"-- Reboot --")
