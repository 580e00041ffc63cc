"""The kernel's log of this boot."""

import contextlib
import errno
import os
import re
import time
from typing import Iterator, List, Optional, Tuple

from . import readers
from .deduplicator import Deduplicator
from .options import Emit, ProbeOptions

Line = Tuple[float, str]
"""Seconds since the boot, and the text."""
# How NVIDIA's messages of several lines begin; no name of a process is as long. In others a line break may be a
# process's, in the name of a program that crashed, or in the version that a client reports to the driver.
_SEVERAL_LINES = "NVRM: The NVIDIA "
_ONE_LINE = "NVRM: API mismatch: "


def log(options: ProbeOptions, emit: Emit) -> None:
    """The kernel's log lines of this boot.

    /dev/kmsg is the ring buffer itself. Only if it has overflowed, the journal is read for the lost lines: that takes
    seconds where it is long.
    """
    deduplicator = Deduplicator()
    source: Optional[str] = None
    cut = False
    ring, complete, ring_error = kmsg(options.path("dev/kmsg"))
    if ring_error:
        emit("errors", {"what": "kmsg", "error": ring_error})
    if ring and complete:
        source = "kmsg"
    else:
        before = ring[0][0] if ring else float("inf")
        from_journal = 0
        try:
            for line in journal(options, before):
                deduplicator.add(*line)
                from_journal += 1
        except (OSError, readers.SlowError) as error:
            cut = True
            emit("errors", {"what": "journal", "error": str(error)})
        if from_journal:
            source = "journal"
        elif ring:
            source = "kmsg"
            if not cut:
                cut = True
                emit("errors", {"what": "journal", "error": "it has none of the lines that the ring buffer lost"})
        else:
            for line in _dmesg(options):
                deduplicator.add(*line)
                source = "dmesg"
    for line in ring:
        deduplicator.add(*line)
    text, incomplete = deduplicator.text()
    emit("log", {"source": source, "cut": cut or incomplete, "text": text, "repeats": deduplicator.repeats()})
    if deduplicator.enumerated:
        emit("enumerated", len(deduplicator.enumerated))


def kmsg(path: str) -> Tuple[List[Line], bool, str]:
    """The ring buffer's kernel lines, whether they reach back to the boot, and an error message.

    A record is ``priority,sequence,microseconds,flags;text`` and lines of properties that begin with a blank
    (Documentation/ABI/testing/dev-kmsg). User space cannot write records with the facility 0.
    """
    lines: List[Line] = []
    first: Optional[int] = None
    lost = False
    try:
        device = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return [], False, error.strerror or str(error)
    deadline = time.monotonic() + 5
    try:
        for record in _records(device):
            if record is None:
                lost = True
                continue
            head, _, body = record.partition(";")
            numbers = head.split(",")[:3]
            if not all(number.isdigit() for number in numbers):
                continue
            priority, sequence, microseconds = (int(number) for number in numbers)
            if first is None:
                first = sequence
            if priority >> 3 == 0:
                seconds = microseconds / 1e6
                message = body.split("\n", 1)[0]
                for text in _texts(message.split("\\x0a")) or [message]:
                    lines.append((seconds, text))
            if time.monotonic() > deadline:
                lost = True
                break
    finally:
        os.close(device)
    return lines, first == 0 and not lost, ""


def _texts(lines: List[str]) -> List[str]:
    """A message of NVIDIA's as it is reported; else []."""
    if lines[0].startswith(_ONE_LINE):
        return [" ".join(lines)]
    return lines if lines[0].startswith(_SEVERAL_LINES) else []


def _records(device: int) -> Iterator[Optional[str]]:
    """One record per read, None where records were overwritten; a plain file (in tests) is split into records."""
    while True:
        try:
            data = os.read(device, 65536)
        except OSError as error:
            if error.errno == errno.EPIPE:
                yield None
                continue
            return
        if not data:
            return
        yield from re.split(r"\n(?=\d)", data.decode("utf-8", "replace"))


def journal(options: ProbeOptions, before: float) -> Iterator[Line]:
    """This boot's kernel lines in the journal up to ``before`` (seconds since the boot).

    The facility excludes what user space wrote to /dev/kmsg.
    """
    program = readers.program(options, "journalctl")
    if program is None:
        return
    argv = [program, "-b", "-q", "--no-pager", "-o", "short-monotonic", "_TRANSPORT=kernel", "SYSLOG_FACILITY=0"]
    # `[   12.345678] host kernel: text`; a line without this prefix, an indented one, continues the previous one.
    pattern = re.compile(r"\[ *(\d+\.\d+)\] \S+ [^:]*: ?(.*)")
    for found, lines in _entries(readers.output(argv, options.deadline_s / 2), pattern):
        seconds = float(found.group(1))
        if seconds >= before:
            return
        for text in lines:
            yield seconds, text


def _entries(output: Iterator[str], pattern: "re.Pattern[str]") -> Iterator[Tuple["re.Match[str]", List[str]]]:
    """The entries of a log: the match of the first line, and the lines that are reported."""
    found: Optional[re.Match[str]] = None
    lines: List[str] = []
    for line in output:
        following = pattern.match(line)
        if following is None:
            lines.append(line.strip())
            continue
        if found:
            yield found, _texts(lines) or lines[:1]
        found, lines = following, [following.group(pattern.groups)]
    if found:
        yield found, _texts(lines) or lines[:1]


def _dmesg(options: ProbeOptions) -> Iterator[Line]:
    """The ring buffer as dmesg prints it, where /dev/kmsg cannot be read: ``<priority>[seconds] text``."""
    program = readers.program(options, "dmesg")
    if program is None or options.root != "/":
        return
    pattern = re.compile(r"<(\d+)>\[ *(\d+\.\d+)\] ?(.*)")
    with contextlib.suppress(OSError, readers.SlowError):
        for found, lines in _entries(readers.output([program, "-r"], 5), pattern):
            if int(found.group(1)) >> 3 == 0:
                for text in lines:
                    yield float(found.group(2)), text
