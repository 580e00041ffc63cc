"""Turns a log of any length into records about NVIDIA's GPUs: each kind of line once, with its count.

Only a few lines of a log matter. Blocks of bytes are therefore searched for a few markers, and only lines with a marker
are parsed. A window extends before and after the current block, for reports of several lines.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpunodes.health import journal, patterns
from gpunodes.health.evidence import EVIDENCE_LINES, address, clean
from gpunodes.health.find import Places, holds, next_position, positions
from gpunodes.health.line_count import LineCount
from gpunodes.health.line_match import AHEAD, Anchor, LineMatch
from gpunodes.health.lines import ANCHORS, SMI_OUTPUT, TEXT_ANCHORS, nvrm
from gpunodes.health.model import MANY_PROCESSES, LineKind, LogRecord, Time
from gpunodes.health.patterns import Writer, writer_of
from gpunodes.health.written import IsKernels, Written

if TYPE_CHECKING:
    from gpunodes.health import smi

BEHIND = 64 << 10
"""Bytes before a line that are kept for the stack of a hung task in logs with the newest line first."""
_NEAR = 4096
"""Bytes after an entry of a journal that can belong to its message."""
_FLOOD = 64
"""After this many equal lines, the following ones are matched together."""
MANY_RECORDS = 4096
"""More different records than any machine has; a fabricated log's further records are dropped."""

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
    kernel_lines: int = 0
    has_driver: bool = False
    """A line, or output of nvidia-smi, shows that the machine has NVIDIA's driver."""


@dataclass(slots=True)
class _Counter:
    """Counts equal lines for one record. Headers are parsed only at the end, which keeps log floods fast."""

    first: bytes
    last: bytes
    count: int = 0
    evidence: list[str] = field(default_factory=list)
    is_proven: bool = False
    processes: set[bytes] = field(default_factory=set)


_Key = tuple[LineKind, bytes, int, str]


class Scanner:
    """Scans a stream in pieces; ``finish`` returns the result. Lines older than ``since`` do not count."""

    def __init__(self, since: Time = NO_TIME) -> None:
        self._since = since if since != NO_TIME else None
        self._window = b""
        self._places = Places()
        self._next = 0
        self._counters: dict[_Key, _Counter] = {}
        self._booted = NO_TIME
        self._boot_id: str | None = None
        self._reversed = False
        self._written: dict[IsKernels | None, Written] = {}
        """The current window as it was written, where it was needed."""
        self._skip = False
        """The current lines belong to an older boot."""
        self._recognised = False
        """A line of the kernel was found."""
        self._lines: LineCount | None = None
        self._kinds: dict[str, None] = {}
        """What was recognised apart from kernel lines, in order."""
        self._is_log = False
        self._smi: smi.Reader | None = None
        self._is_json = False
        self._boot_markers: tuple[bytes, ...] = _BOOT_MARKERS
        self._floods: dict[bytes, _Counter] = {}
        """Counters of Xids that may repeat, by the beginning of their line."""

    def feed(self, data: bytes) -> None:
        """Take the next piece of the stream."""
        self._places.add(len(data))
        keep = max(0, self._next - BEHIND)
        self._window = self._window[keep:] + data
        self._next -= keep
        if self._lines is None and len(self._window) > AHEAD:
            self._lines = self._begin()
        end = len(self._window) - AHEAD
        if end > self._next:
            self._scan(self._next, end)
            self._next = end

    def finish(self) -> Log:
        """End the stream and return the result."""
        lines = self._lines = self._lines or self._begin()
        self._scan(self._next, len(self._window))
        lines.finish(self._window)
        gpus = self._smi.finish() if self._smi else None
        records = tuple(_record(key, counter) for key, counter in self._counters.items())
        records += tuple(
            LogRecord(LineKind.ROW_MISSING, code=number) for number in (self._smi.missing() if self._smi else ())
        )
        kinds = (("journal" if self._is_json else "kernel log",) if self._recognised else ()) + tuple(self._kinds)
        if gpus is not None and SMI_OUTPUT not in kinds:
            kinds += (SMI_OUTPUT,)
        return Log(
            records,
            self._booted,
            self._boot_id,
            bool(kinds),
            gpus,
            kinds,
            lines.kernel_lines if self._recognised else 0,
            lines.has_driver or gpus is not None,
        )

    def _begin(self) -> LineCount:
        """Detect from the first lines the kind of text, and whether the newest line is first."""
        lines = self._window[: 1 << 20].splitlines()
        nonempty = [line for line in lines[: patterns.ORDER_LINES] if line.strip()]
        self._is_json = bool(nonempty) and nonempty[0].startswith(b'{"')
        times = [patterns.time_of(line[: patterns.HEADER_BYTES // 4]) for line in nonempty]
        stamped = sum(each.text != "" for each in times)
        self._is_log = stamped * 2 > len(nonempty) or self._is_json
        # In other texts, times further on are those of several logs.
        ordered = lines if self._is_log else lines[: patterns.ORDER_LINES]
        self._reversed = patterns.newest_first(journal.times(ordered) if self._is_json else ordered)
        if self._is_log and not any(each.epoch for each in times):
            # journalctl's boot separators occur only in journals, which have dates.
            self._boot_markers = _BOOT_MARKERS[:1]
        return LineCount(nonempty, is_json=self._is_json, is_log=self._is_log)

    def _scan(self, begin: int, end: int) -> None:
        window = self._window
        self._written.clear()
        if not self._recognised:
            self._recognised = patterns.KERNEL_LINE.search(window, begin, end) is not None
        if not self._is_log:
            self._feed_smi(window[begin:end])
        markers = [anchor.marker for anchor in (ANCHORS if self._is_log else (*ANCHORS, *TEXT_ANCHORS))]
        if self._is_json:
            markers += journal.MARKERS
        # A marker that starts before the end may extend beyond it.
        block = window[begin : end + _LONGEST]
        found = {marker for marker in markers if holds(block, marker)}
        if self._lines is not None:
            self._lines.add(window, begin, end, has_nvrm=b"NVRM: " in found)
        if not found and not self._counters and not self._reversed:
            return
        boots = [
            position
            for marker in self._boot_markers
            if holds(block, marker)
            for position in positions(window, marker, begin, end)
        ]
        for position in sorted(boots):
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
                sorted(position for marker in markers for position in positions(self._window, marker, begin, end))
            )
            return
        for anchor in (*ANCHORS, *TEXT_ANCHORS):
            if anchor.marker in markers and not self._skip:
                find = self._without_floods if anchor.read is nvrm else positions
                for position in find(self._window, anchor.marker, begin, end):
                    if not self._places.take(anchor.marker):
                        break
                    self._visit(position, anchor)

    def _without_floods(self, window: bytes, marker: bytes, begin: int, end: int) -> Iterator[int]:
        """The positions of a marker, except those of repeated Xids, which are counted here.

        A log flood has hundreds of thousands of lines. For each, only this is checked: its header has the shape of a
        kernel line's header, and its code and GPU are known.
        """
        find, counters, writer, digits = window.find, self._floods, patterns.known_writer, patterns.DIGITS
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
            if counter is None or writer(header.translate(digits)) is not Writer.KERNEL:
                yield position
                position = find(marker, next_position(window, position), end)
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
        is_boot = found[0].startswith(b"--") if not header else when.text != "" and writer_of(header) is Writer.KERNEL
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

    def _as_written(self, position: int, is_kernels: IsKernels | None) -> tuple[bytes, int]:
        """The window as it was written, once per window, and where a position is there; a program's line keeps all."""
        if is_kernels is None and not self._reversed:
            return self._window, position
        written = self._window_of(is_kernels)
        place = written.position(position)
        return self._as_written(position, None) if place is None else (written.text, place)

    def _window_of(self, is_kernels: IsKernels | None) -> Written:
        if is_kernels not in self._written:
            self._written[is_kernels] = Written(self._window, is_kernels, newest_first=self._reversed)
        return self._written[is_kernels]

    def _is_programs(self, position: int) -> bool:
        """Whether an indented line of a syslog belongs to a program's message of several lines."""
        if self._lines is None or not self._lines.names_writers:
            return False
        return self._window_of(patterns.is_kernels_in_syslog).position(position) is None

    def _visit(self, position: int, anchor: Anchor) -> None:
        """Parse a line with one of the markers."""
        header = self._header(position)
        if header[:1].isspace() and self._is_programs(position):
            return
        is_kernels = patterns.kernels_beside(header) if anchor.reads_on else None
        for match in anchor.read(*self._as_written(position, is_kernels)):
            self._count(match, match.header if match.header is not None else header)

    def _visit_entries(self, found: Iterable[int]) -> None:
        """Parse entries of ``journalctl -o json``, one per line; each message is read like a log line."""
        end = 0
        for position in found:
            if position < end:
                continue
            lowest = max(0, position - journal.LINE_BYTES)
            begin = self._window.rfind(b"\n", lowest, position) + 1 or lowest
            end = self._window.find(b"\n", position, begin + journal.LINE_BYTES)
            end = end if end >= 0 else begin + journal.LINE_BYTES
            line = self._window[begin:end]
            entry = journal.entry_of(line)
            if entry is not None:
                text, start = self._as_written(begin, journal.is_kernels)
                self._visit_entry(entry, text, start + len(line))
            elif not self._skip:
                self._visit_message(line, None, b"", 0)

    def _visit_entry(self, entry: Mapping[str, object], text: bytes, end: int) -> None:
        header, boot = journal.header_of(entry), entry.get("_BOOT_ID")
        if isinstance(boot, str) and boot != self._boot_id and re.fullmatch("[0-9a-f]{32}", boot):
            if self._boot_id is not None:
                self._new_boot(patterns.time_of(header))
            if not self._skip:
                self._boot_id = boot
        if not self._skip:
            self._visit_message(header + journal.message_of(entry), header, text, end)

    def _visit_message(self, message: bytes, header: bytes | None, text: bytes, end: int) -> None:
        """Parse a message with its header, whose entry ends in ``text`` at ``end``.

        Without a header, the text before the message is that of another program.
        """
        for anchor in ANCHORS:
            position = message.find(anchor.marker)
            if position >= 0:
                before = message[max(0, position - patterns.HEADER_BYTES) : position] if header is None else header
                following = text[end : end + (AHEAD if anchor.reads_on else _NEAR)]
                for match in anchor.read(message + following, position):
                    self._count(match, before)

    def _count(self, match: LineMatch, header: bytes) -> None:
        writer = Writer.KERNEL if match.program else writer_of(header)
        if match.program:
            self._kinds[match.program] = None
        elif writer is Writer.KERNEL:
            self._recognised = True
        elif match.kind is LineKind.GPU_FOUND:
            return  # the GPU of another machine, perhaps
        elif match.kind is not None:
            kind = LineKind.QUOTED if writer is Writer.QUOTED else LineKind.IMITATED
            match = LineMatch(kind, match.text, match.gpu, match.code, match.kind.value)
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
        if match.proof and not counter.is_proven:
            # What proves the record is its first evidence, whatever was logged before.
            counter.is_proven = True
            counter.evidence = [clean(header + match.text), clean(match.proof), *counter.evidence][:EVIDENCE_LINES]
        elif len(counter.evidence) < EVIDENCE_LINES:
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


def _record(key: _Key, counter: _Counter) -> LogRecord:
    kind, gpu, code, detail = key
    first, last = patterns.time_of(counter.first), patterns.time_of(counter.last)
    if last.before(first):
        first, last = last, first
    place = address(gpu) if gpu else ""
    evidence, processes = tuple(counter.evidence), len(counter.processes)
    return LogRecord(kind, place, code, detail, counter.count, first, last, evidence, processes, counter.is_proven)


_LONGEST = max(len(anchor.marker) for anchor in (*ANCHORS, *TEXT_ANCHORS))
_BOOT_MARKERS = (b"Linux version ", b"-- Boot ", b"-- Reboot --")
