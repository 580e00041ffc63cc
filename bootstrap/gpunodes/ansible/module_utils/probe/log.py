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
# How NVIDIA's messages of several lines begin. In other messages a line break may be a process's: the kernel writes the
# name of a program that crashed as it is. A message may also begin with a process's name, but these texts are longer.
_SEVERAL_LINES = re.compile("NVRM: (?:The NVIDIA |API mismatch: )")


def log(options: ProbeOptions, emit: Emit) -> None:
    """The kernel's log lines of this boot.

    /dev/kmsg is the ring buffer itself: always current, and complete unless it has overflowed. Only then the journal
    is read for the lost lines, because that takes seconds where the journal is long.
    """
    deduplicator = Deduplicator()
    source: Optional[str] = None
    cut = False
    ring, complete, ring_error = _kmsg(options.path("dev/kmsg"))
    if ring_error:
        emit("errors", {"what": "kmsg", "error": ring_error})
    if ring and complete:
        source = "kmsg"
    else:
        before = ring[0][0] if ring else float("inf")
        from_journal = 0
        try:
            for line in _journal(options, before):
                deduplicator.add(*line)
                from_journal += 1
        except (OSError, readers.SlowError) as error:
            cut = True
            emit("errors", {"what": "journal", "error": str(error)})
        if from_journal:
            source = "journal"
        elif ring:
            source, cut = "kmsg", True
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


def _kmsg(path: str) -> Tuple[List[Line], bool, str]:
    """The ring buffer's kernel lines, whether they reach back to the boot, and an error message.

    A record is ``priority,sequence,microseconds,flags;text`` and lines of properties that begin with a blank
    (Documentation/ABI/testing/dev-kmsg). User space cannot write records with the kernel's facility, 0.
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
                for text in message.split("\\x0a") if _SEVERAL_LINES.match(message) else [message]:
                    lines.append((seconds, text))
            if time.monotonic() > deadline:
                lost = True
                break
    finally:
        os.close(device)
    return lines, first == 0 and not lost, ""


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


def _journal(options: ProbeOptions, before: float) -> Iterator[Line]:
    """This boot's kernel lines in the journal up to ``before`` (seconds since the boot).

    The facility excludes lines that user space wrote to /dev/kmsg: the journal stores them with the kernel's transport.
    """
    program = readers.program(options, "journalctl")
    if program is None:
        return
    argv = [program, "-b", "-q", "--no-pager", "-o", "short-monotonic", "_TRANSPORT=kernel", "SYSLOG_FACILITY=0"]
    # `[   12.345678] host kernel: text`; a line without this prefix, an indented one, continues the previous one.
    pattern = re.compile(r"\[ *(\d+\.\d+)\] \S+ [^:]*: ?(.*)")
    seconds = 0.0
    continues = False
    for line in readers.output(argv, options.deadline_s / 2):
        found = pattern.match(line)
        if found:
            seconds = float(found.group(1))
            continues = _SEVERAL_LINES.match(found.group(2)) is not None
        if seconds >= before:
            return
        if found or continues:
            yield seconds, found.group(2) if found else line.strip()


def _dmesg(options: ProbeOptions) -> Iterator[Line]:
    """The ring buffer as dmesg prints it, where /dev/kmsg cannot be read: ``<priority>[seconds] text``."""
    program = readers.program(options, "dmesg")
    if program is None or options.root != "/":
        return
    pattern = re.compile(r"<(\d+)>\[ *(\d+\.\d+)\] ?(.*)")
    continues = False
    seconds = 0.0
    with contextlib.suppress(OSError, readers.SlowError):
        for line in readers.output([program, "-r"], 5):
            found = pattern.match(line)
            if found:
                kernel = int(found.group(1)) >> 3 == 0
                seconds = float(found.group(2))
                continues = kernel and _SEVERAL_LINES.match(found.group(3)) is not None
            if continues or (found and kernel):
                yield seconds, found.group(3) if found else line
