"""What a relevant line of a log is, and how the text around it is found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpunodes.health import patterns
from gpunodes.health.evidence import EVIDENCE_CHARACTERS
from gpunodes.health.model import LineKind

AHEAD = 64 << 10
"""Bytes after a line that are searched for its wrapped rest, or for the stack of a hung task."""


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
    program: str = ""
    """What a text with this line is, if a program of NVIDIA wrote it and not the kernel."""
    proof: bytes = b""
    """For a stuck task: the frame of the driver in its stack."""


Read = Callable[[bytes, int], Iterator[LineMatch]]
"""Parses the line at a position of a text, in which what the kernel wrote later comes after it."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A marker that lines of one kind contain, and the function that parses such a line."""

    marker: bytes
    read: Read
    reads_on: bool = False
    """It reads a report of many lines, between which a syslog can have lines of programs."""


def rest_of_line(window: bytes, begin: int) -> bytes:
    """The rest of a line, limited to the length of evidence."""
    limit = begin + 4 * EVIDENCE_CHARACTERS
    end = window.find(b"\n", begin, limit)
    return window[begin : end if end >= 0 else limit]


def match_at(pattern: re.Pattern[bytes], window: bytes, position: int) -> re.Match[bytes] | None:
    """The match of a pattern that covers a position."""
    for found in pattern.finditer(window, max(0, position - 240), position + 240):
        if found.end() > position:
            return found if found.start() <= position else None
    return None


def text_before(window: bytes, begin: int) -> bytes:
    limit = max(0, begin - patterns.HEADER_BYTES)
    return window[window.rfind(b"\n", limit, begin) + 1 or limit : begin]
