"""A log, of any length, to records: what it says of NVIDIA's GPUs, each kind of line once with its count.

Only a few lines of a log matter. So blocks of bytes are searched for a handful of words, and lines are looked at only
where one of these stands. A window reaches behind and ahead of the block in work, for what a line belongs to.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpunodes.health import catalog, forms
from gpunodes.health.find import holds
from gpunodes.health.model import MANY_PROCESSES, LineKind, LogRecord, Time
from gpunodes.model import printable

if TYPE_CHECKING:
    from gpunodes.health import smi

AHEAD = 64 << 10
"""Bytes after a line in which its wrapped rest, or the stack of a hung task, is looked for."""
BEHIND = 64 << 10
"""The same before it, for logs with the newest line first."""
_MESSAGE = 256
"""Bytes within which one line has no second message."""
_FLOOD = 64
"""Every so many lines of a kind, those that follow are looked at all together."""
EVIDENCE_LINES = 3
EVIDENCE_CHARACTERS = 400
MANY_RECORDS = 4096
"""More different records than any machine has; what a made-up log has beyond them is not kept."""
_JSON_LINE = 64 << 10
_REPORT = 16 << 10
"""Bytes of a report of a hung task."""

NO_TIME = Time()


@dataclass(frozen=True, slots=True)
class Log:
    """What one stream said."""

    records: tuple[LogRecord, ...] = ()
    booted: Time = NO_TIME
    """When the last boot in it began."""
    boot_id: str | None = None
    recognised: bool = False
    """It held lines of a kernel, or output of nvidia-smi."""
    gpus: tuple[smi.SmiGpu, ...] | None = None
    """What nvidia-smi said of each GPU; None where it was not asked."""
    kinds: tuple[str, ...] = ()
    """What the stream was recognised as."""


@dataclass(slots=True)
class _Counter:
    """A record in the making. Headers are read only at the end: a storm would spend its time there."""

    first: bytes
    last: bytes
    count: int = 0
    evidence: list[str] = field(default_factory=list)
    processes: set[bytes] = field(default_factory=set)


_Key = tuple[LineKind, bytes, int, str]


class Scanner:
    """Takes a stream in pieces; ``finish`` gives what it said. ``since``: what is older does not count."""

    def __init__(self, since: Time = NO_TIME) -> None:
        self._since = since if since != NO_TIME else None
        self._window = b""
        self._next = 0
        self._counters: dict[_Key, _Counter] = {}
        self._booted = NO_TIME
        self._boot_id: str | None = None
        self._reversed = False
        self._skip = False
        """The lines now read belong to an older boot."""
        self._recognised = False
        self._begun = False
        self._is_log = False
        self._smi: smi.Reader | None = None
        self._is_json = False
        self._boot_words: tuple[bytes, ...] = _BOOT_WORDS
        self._floods: dict[bytes, _Counter] = {}
        """Xids that may come again, by their line's beginning."""

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
        """The stream has ended."""
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
        """Look at the beginning: what kind of text it is, and which line comes first."""
        self._begun = True
        lines = self._window[: 1 << 20].splitlines()[:300]
        written = [line for line in lines if line.strip()]
        self._is_json = bool(written) and written[0].startswith(b'{"')
        self._reversed = forms.newest_first(_journal_times(lines) if self._is_json else lines)
        times = [forms.time_of(line[: forms.HEADER_BYTES // 4]) for line in written]
        stamped = sum(one.text != "" for one in times)
        self._is_log = stamped * 2 > len(written) or self._is_json
        if self._is_log and not any(one.epoch for one in times):
            # Only journals, which have dates, are divided by markers.
            self._boot_words = _BOOT_WORDS[:1]

    def _scan(self, begin: int, end: int) -> None:
        window = self._window
        if not self._recognised:
            self._recognised = forms.KERNEL_LINE.search(window, begin, end) is not None
        if not self._is_log:
            self._feed_smi(window[begin:end])
        words = [anchor.word for anchor in (ANCHORS if self._is_log else (*ANCHORS, *TEXT_ANCHORS))]
        if self._is_json:
            words += _JSON_BYTES
        # A word that begins before the end may reach beyond it.
        block = window[begin : end + _LONGEST]
        found = {word for word in words if holds(block, word)}
        if not found and not self._counters and not self._reversed:
            return
        positions = [
            position
            for word in self._boot_words
            if holds(block, word)
            for position in _positions(window, word, begin, end)
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
            # A log needs none of it, and for a small one the import is a twentieth of the time.
            from gpunodes.health.smi import Reader

            self._smi = Reader()
        self._smi.feed(data)

    def _visit_all(self, words: Collection[bytes], begin: int, end: int) -> None:
        """Look at every line that has one of the words, from ``begin`` to before ``end``; all of one boot."""
        if self._is_json:
            self._visit_entries(sorted(at for word in words for at in _positions(self._window, word, begin, end)))
            return
        for anchor in (*ANCHORS, *TEXT_ANCHORS):
            if anchor.word in words and not self._skip:
                places = self._without_floods if anchor.read is _nvrm else _positions
                for position in places(self._window, anchor.word, begin, end):
                    self._visit(position, anchor.read)

    def _without_floods(self, window: bytes, word: bytes, begin: int, end: int) -> Iterator[int]:
        """Where a word begins, but for Xids that are repetitions: these are counted here, at once.

        A storm has hundreds of thousands of lines, and only this is done for each: what stands before it has a shape
        that the kernel's lines have, and its code and GPU have been seen.
        """
        find, counters, kernel, digits = window.find, self._floods, forms.known_kernel, forms.DIGITS
        end += len(word) - 1
        position = find(word, begin, end)
        while position >= 0:
            comma = find(b",", position, position + 64)
            counter = counters.get(window[position:comma]) if comma > 0 else None
            if counter is None and comma > 0:
                comma = find(b",", comma + 1, comma + 64)
                counter = counters.get(window[position:comma]) if comma > 0 else None
            begin = position - forms.HEADER_BYTES if position > forms.HEADER_BYTES else 0
            begin = window.rfind(b"\n", begin, position) + 1 or begin
            header = window[begin:position]
            if counter is None or not kernel(header.translate(digits)):
                yield position
                position = find(word, _beyond(window, position), end)
                continue
            counter.count += 1
            counter.last = header
            if counter.count % _FLOOD == 0:
                comma = self._count_run(counter, header, window[position:comma], begin, end) or comma
            position = find(word, comma, end)

    def _count_run(self, counter: _Counter, header: bytes, message: bytes, begin: int, end: int) -> int:
        """Count the lines that follow one after another and begin alike; where the last of them ends, or 0."""
        window = self._window
        run = _like(header, message).match(window, begin, end)
        if run is None:
            return 0
        counter.count += window.count(b"\n", begin, run.end()) - 1
        last = window.rfind(b"\n", begin, run.end() - 1) + 1 or begin
        counter.last = window[last : window.find(message, last)]
        return run.end()

    def _boot_at(self, position: int) -> Time | None:
        """When a boot begins here, if it is the kernel that says so."""
        found = forms.BOOTED.match(self._window, position)
        header = self._header(position)
        if found is None:
            return None
        when = forms.time_of(header)
        # A marker of journalctl stands alone; the kernel's line has a time, or it is a copy of /proc/version.
        ours = found[0].startswith(b"--") if not header else when.text != "" and forms.from_kernel(header)
        return when if ours else None

    def _new_boot(self, when: Time) -> None:
        if self._reversed or when.before(self._booted):
            self._skip = True
        else:
            self._skip = False
            self._booted = when
            self._counters.clear()
            self._floods.clear()

    def _header(self, position: int) -> bytes:
        """What stands before a place on its line."""
        begin = max(0, position - forms.HEADER_BYTES)
        return self._window[self._window.rfind(b"\n", begin, position) + 1 or begin : position]

    def _visit(self, position: int, read: _Read) -> None:
        """Look at a line that has one of the words."""
        header = self._header(position)
        for match in read(self._window, position, self._reversed):
            self._count(match, match.header if match.header is not None else header)

    def _visit_entries(self, positions: Iterable[int]) -> None:
        """Look at entries of ``journalctl -o json``, one a line: a message is read as a line of its own."""
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
                self._new_boot(forms.time_of(header))
            if not self._skip:
                self._boot_id = boot
        message = header + _journal_message(entry)
        for anchor in ANCHORS:
            at = message.find(anchor.word)
            if at >= 0 and not self._skip:
                for match in anchor.read(message + following, at, False):
                    self._count(match, header)

    def _count(self, match: LineMatch, header: bytes) -> None:
        if not match.spoken and not forms.from_kernel(header):
            return
        self._recognised = True
        if match.kind is None or (self._since is not None and forms.time_of(header).before(self._since)):
            return
        key = (match.kind, match.gpu, match.code, match.detail)
        counter = self._counters.get(key)
        if counter is None:
            if len(self._counters) >= MANY_RECORDS:
                return
            counter = self._counters[key] = _Counter(header, header)
        counter.count += forms.parse(header).repeated if b"repeated" in header else 1
        counter.last = header
        if len(counter.evidence) < EVIDENCE_LINES:
            counter.evidence.append(clean(header + match.text))
        if match.process and len(counter.processes) < MANY_PROCESSES:
            counter.processes.add(match.process)
        if match.kind is LineKind.XID and not match.detail and self._since is None and len(self._floods) < MANY_RECORDS:
            # As long as processes are counted, a line is a repetition only with the same process.
            counted = match.process and len(counter.processes) < MANY_PROCESSES
            self._floods[b",".join(match.text.split(b",", 2)[: 2 if counted else 1])] = counter


@functools.lru_cache(maxsize=256)
def _like(header: bytes, message: bytes) -> re.Pattern[bytes]:
    """Lines, one after another, with such a header, whatever its numbers, and a message that begins so."""
    head = re.sub(rb"(?:\\ |\d)+", rb"[ \\d]+", re.escape(header))
    return re.compile(rb"(?:" + head + re.escape(message) + rb",[^\n]*+\n)++")


def clean(line: bytes) -> str:
    """A line as evidence: bounded, without anything that could steer a terminal."""
    text = line[: 4 * EVIDENCE_CHARACTERS].decode("utf-8", "replace")
    return printable(text).strip()[:EVIDENCE_CHARACTERS]


def address(text: bytes) -> str:
    """A PCI address as Linux writes it, ``0000:3b:00.0``, of any of the forms in which drivers write it."""
    place, _, function = text.decode().lower().partition(".")
    parts = place.split(":")
    domain, bus, slot = (int(part, 16) for part in ["0", *parts][-3:])
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function or 0}"


def _record(key: _Key, counter: _Counter) -> LogRecord:
    kind, gpu, code, detail = key
    first, last = forms.time_of(counter.first), forms.time_of(counter.last)
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
    """The kernel's entry in a line of JSON, None for any other."""
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
    """The message of an entry; journalctl gives one that is not UTF-8 as a list of its bytes."""
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
    """A header, as dmesg would write it, of a journal's entry."""
    header = b""
    for name, form in (("__REALTIME_TIMESTAMP", _realtime), ("__MONOTONIC_TIMESTAMP", _monotonic)):
        value = str(entry.get(name, ""))
        if re.fullmatch(r"[0-9]{1,16}", value):
            header += form(int(value))
    return header


def _realtime(usec: int) -> bytes:
    return b"%d-%02d-%02dT%02d:%02d:%02dZ " % time.gmtime(usec // 1_000_000)[:6]


def _monotonic(usec: int) -> bytes:
    return b"[%d.%06d] " % divmod(usec, 1_000_000)


def _positions(window: bytes, word: bytes, begin: int, end: int) -> Iterator[int]:
    """Where a word begins, from ``begin`` to before ``end``; of those close together on one line, the first."""
    stop = end + len(word) - 1
    position = window.find(word, begin, stop)
    while position >= 0:
        yield position
        position = window.find(word, _beyond(window, position), stop)


def _beyond(window: bytes, position: int) -> int:
    """Where the next message may begin: a line that repeats a word would otherwise take a look for each."""
    newline = window.find(b"\n", position, position + _MESSAGE)
    return newline if newline >= 0 else position + _MESSAGE


# --- what the words lead to ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineMatch:
    """One line that says something."""

    kind: LineKind | None
    """None: a line of a kernel that says nothing of an NVIDIA GPU."""
    text: bytes
    gpu: bytes = b""
    code: int = 0
    detail: str = ""
    process: bytes = b""
    header: bytes | None = None
    """What stands before it, where that is not what stands before the word."""
    spoken: bool = False
    """A program's message, no line of a log."""


_Read = Callable[[bytes, int, bool], Iterator[LineMatch]]


@dataclass(frozen=True, slots=True)
class Anchor:
    """A word that the lines of a form have, and the function that reads such a line."""

    word: bytes
    read: _Read


def _line(window: bytes, begin: int) -> bytes:
    """The rest of a line, as much as evidence takes."""
    limit = begin + 4 * EVIDENCE_CHARACTERS
    end = window.find(b"\n", begin, limit)
    return window[begin : end if end >= 0 else limit]


def _around(pattern: re.Pattern[bytes], window: bytes, position: int) -> re.Match[bytes] | None:
    """The match of a pattern that covers a place."""
    for found in pattern.finditer(window, max(0, position - 240), position + 240):
        if found.end() > position:
            return found if found.start() <= position else None
    return None


def _before(window: bytes, begin: int) -> bytes:
    limit = max(0, begin - forms.HEADER_BYTES)
    return window[window.rfind(b"\n", limit, begin) + 1 or limit : begin]


def _nvrm(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = forms.XID.match(window, position)
    if found:
        code = int(found[2])
        yield LineMatch(
            LineKind.XID, _line(window, position), found[1], code, _xid_detail(window, found, code), found[3] or b""
        )
        return
    for kind, pattern in _NVRM_KINDS:
        found = pattern.match(window, position)
        if found:
            gpu = found[1] if pattern.groups == 1 and found[1] else b""
            detail = _mismatch_detail(found) if kind is LineKind.MISMATCH else ""
            yield LineMatch(kind, _line(window, position), gpu, detail=detail)
            return
    found = forms.OFF_BUS.match(window, position + len(b"NVRM: "))
    if found:
        yield LineMatch(LineKind.OFF_BUS, _line(window, position), found[1] or found[2])


_NVRM_KINDS = (
    (LineKind.MISMATCH, forms.MISMATCH),
    (LineKind.INIT_CAUSE, forms.INIT_CAUSE),
    (LineKind.INIT_FAILED, forms.INIT_FAILED),
    (LineKind.GSP_TIMEOUT, forms.GSP_TIMEOUT),
    (LineKind.RESET_REQUIRED, forms.RESET_REQUIRED),
)


def _xid_detail(window: bytes, found: re.Match[bytes], code: int) -> str:
    """What beside its number decides about an Xid: the recovery number of 154, the registers of NVLink 5."""
    if code == catalog.RECOVERY_CHANGED:
        number = forms.RECOVERY.match(window, found.end())
        return str(int(number[1], 16)) if number else ""
    if code in catalog.NVLINK5:
        registers = forms.REGISTERS.match(window, found.end())
        fatal = "fatal" if forms.FATAL.match(window, found.end()) else ""
        return f"{registers[1].decode()} {registers[2].decode()} {fatal}" if registers else fatal
    return ""


def _mismatch_detail(found: re.Match[bytes]) -> str:
    """Which client has which version, against which module."""
    return " ".join((part or b"-").decode("ascii", "replace").replace(" ", "_") for part in found.groups())


def _sxid(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = _around(forms.SXID, window, position)
    if found and not found[5]:
        severity = (found[3] or b"").decode().lower()
        if found[4]:
            # The driver's own numbers: 0 non-fatal, 1 fatal.
            severity = "fatal" if found[4] == b"1" else "non-fatal"
        begin = found.start()
        yield LineMatch(
            LineKind.SXID, _line(window, begin), found[1], int(found[2]), severity, header=_before(window, begin)
        )


def _block(window: bytes, found: re.Match[bytes], ends: re.Pattern[bytes], *, newest_first: bool) -> tuple[int, int]:
    """Where the rest of a report stands: up to the next one, or before it where the newest line is first."""
    if not newest_first:
        following = ends.search(window, found.end(), found.end() + AHEAD)
        return found.end(), following.start() if following else found.end() + AHEAD
    begin = max(0, found.start() - _REPORT)
    for word in forms.BEFORE_REPORT:
        begin = max(begin, window.rfind(word, begin, found.start()))
    return begin, found.start()


@dataclass(frozen=True, slots=True)
class _Stuck:
    """A form of report of a task that does not go on, and what it is by whose task it is."""

    report: re.Pattern[bytes]
    after: re.Pattern[bytes]
    ours: LineKind
    other: LineKind | None


_HUNG = _Stuck(forms.HUNG_TASK, forms.AFTER_HUNG_TASK, LineKind.HUNG_TASK, LineKind.OTHER_HUNG_TASK)
_LOCKUP = _Stuck(forms.SOFT_LOCKUP, forms.AFTER_LOCKUP, LineKind.SOFT_LOCKUP, None)


def _stuck(form: _Stuck, window: bytes, position: int, newest_first: bool) -> Iterator[LineMatch]:
    """A task that does not go on; NVIDIA's when it has a frame of the driver's, or is one of its threads."""
    found = _around(form.report, window, position)
    if found:
        begin, end = _block(window, found, form.after, newest_first=newest_first)
        ours = forms.NVIDIA_TASK.fullmatch(found[1]) or forms.NVIDIA_FRAME.search(window, begin, end)
        task = clean(found[1] + b":" + found[2]) if ours else ""
        header = _before(window, found.start())
        yield LineMatch(form.ours if ours else form.other, _line(window, found.start()), detail=task, header=header)


def _aer(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = _around(forms.AER, window, position)
    if not found:
        return
    driver, place, severity, fatal = found.groups()
    header = _before(window, found.start())
    text = _line(window, found.start())
    detail = "corrected" if severity == b"Corrected" else "fatal" if fatal == b"Fatal" else "non-fatal"
    unhandled = forms.AER_UNHANDLED.search(window, found.end(), found.end() + 4096) if detail == "fatal" else None
    if driver != b"nvidia" and unhandled:
        place, driver = unhandled[1], b"nvidia"
    yield LineMatch(LineKind.AER if driver == b"nvidia" else None, text, place, detail=detail, header=header)


def _uvm(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = _around(forms.UVM_FATAL, window, position)
    if found:
        yield LineMatch(LineKind.UVM_FATAL, _line(window, found.start()), header=_before(window, found.start()))


def _off_bus(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = _around(forms.OFF_BUS, window, position)
    if found and not _before(window, found.start()).rstrip().endswith(b"NVRM:"):
        text = _line(window, found.start())
        yield LineMatch(LineKind.OFF_BUS, text, found[1] or found[2], header=_before(window, found.start()))


def _smi_message(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = _around(forms.SMI_MESSAGE, window, position)
    if found and not _before(window, found.start()).strip():
        # Which message it was is told by its beginning: what follows the GPU is the driver's own word.
        message = found["message"] or b"device handle: " + found["problem"]
        detail = clean(b" ".join(message.split()))
        yield LineMatch(
            LineKind.SMI_MESSAGE, _line(window, found.start()), found["gpu"] or b"", detail=detail, spoken=True
        )


def _smi_value(window: bytes, position: int, _reversed: bool) -> Iterator[LineMatch]:
    found = forms.SMI_VALUE.match(window, position)
    if found:
        line = _before(window, position) + _line(window, position)
        yield LineMatch(LineKind.SMI_MESSAGE, line, detail=found[1].decode(), spoken=True)


ANCHORS = (
    Anchor(b"NVRM: ", _nvrm),
    Anchor(b"SXid (", _sxid),
    Anchor(b"blocked for more", functools.partial(_stuck, _HUNG)),
    Anchor(b"soft lockup - CPU", functools.partial(_stuck, _LOCKUP)),
    Anchor(b"PCIe Bus Error:", _aer),
    Anchor(b"global fatal error", _uvm),
)
# In a log these would be a program's words about another day, or a quotation.
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
_LONGEST = max(len(anchor.word) for anchor in (*ANCHORS, *TEXT_ANCHORS))
_JSON_BYTES = [b'"MESSAGE":[', b'"MESSAGE" : [']
_BOOT_WORDS = (b"Linux version ", b"-- Boot ", b"-- Reboot --")
