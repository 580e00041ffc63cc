"""Bounds a log without losing what matters in it."""

import collections
import re
from typing import Any, Dict, List, Optional, Set, Tuple

from .known import FLOOD_FIRST, FLOOD_LAST
from .options import TEXT_BYTES

FLOOD = 50
"""A line pattern that occurs more often is a log flood: its first and last lines stay, the others are counted."""
BLOCKS = 64
"""Maximum number of hung-task reports that stay complete. Of further ones in the driver stays what proves them."""
BLOCK_LINES = 80


class _Pattern:
    """Lines that differ only in their numbers. ``tail`` holds the last lines of a flood."""

    def __init__(self, line: str, seconds: float, important: bool) -> None:
        self.line = line
        self.first = self.last = seconds
        self.important = important
        self.count = 0
        self.tail: collections.deque[Tuple[int, str]] = collections.deque(maxlen=FLOOD_LAST)


class Deduplicator:
    """Floods are counted, hung-task reports stay complete, driver lines have priority over others."""

    _DIGITS = str.maketrans(dict.fromkeys("0123456789abcdefABCDEF", "#"))
    _RUN = re.compile(r"#+")
    # Numbers that make a line a different one: event and device.
    _IDENTITY = re.compile(r"S?Xid \([^)]*\): \d+|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}")
    # The further numbers of NVLink's codes have a meaning; those of 154 are its recovery action.
    _NUMBERS_MATTER = re.compile(r"Xid \([^)]*\): 1[45]\d\b")
    _IMPORTANT = re.compile(
        r"NVRM|nvidia|NVIDIA|nvswitch|Xid|AER|PCIe|pcieport|lockup|blocked|hung_task|GSP|Hardware Error|panic"
        r"|refusing to freeze|BUG: |\[#\d"
    )
    # A program chooses its name, which begins the line when it crashes, and the version that it reports.
    _DRIVERS = re.compile(
        r"\[[ \d.]+\] (?:NVRM: (?!API mismatch|.{0,9}\[\d+\]: )|nvidia-nvswitch\d+: |(?:watchdog: )?BUG: soft lockup)"
    )
    _BLOCK = re.compile(
        r"INFO: task .*(?:blocked (?:for more than|in I/O wait)|can't die for more)|refusing to freeze"
        r"|: [0-9a-f]{4,16} \[#\d"
    )
    _BLOCK_WORDS = ("blocked ", "can't die", "refusing to freeze", " [#")
    _IN_BLOCK = re.compile(
        r"\s|Call Trace|task:|Workqueue:|Tainted|Not tainted|\"echo 0|[RCE][A-Z0-9]{1,3}:|Code:|Modules linked"
        r"|Future hung|INFO: task .*blocked on"
    )
    # GPUs as the kernel lists them at boot: `pci 0000:3b:00.0: [10de:2330] type 00 class 0x030200`.
    _ENUMERATED = re.compile(r"pci ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0): \[10de:[0-9a-f]{4}\] .*class 0x030[02]")
    _IMPORTANT_BYTES, _OTHER_BYTES = 4 << 20, 8 << 20
    """Limits while reading; TEXT_BYTES limits the result."""
    _MAX_PATTERNS = 20000

    def __init__(self) -> None:
        self.enumerated: Set[str] = set()
        self._number = 0
        self._cut = False
        self._patterns: Dict[str, _Pattern] = {}
        self._important_lines: List[_StoredLine] = []
        self._other_lines: collections.deque[_StoredLine] = collections.deque()
        self._important_bytes = self._other_bytes = 0
        self._blocks = 0
        self._block_left = 0
        self._begin: Optional[_StoredLine] = None

    def add(self, seconds: float, text: str) -> None:
        """Add one line of the log, oldest first."""
        self._number += 1
        text = text[:2000].rstrip("\n")
        if "[10de:" in text:
            found = self._ENUMERATED.search(text)
            if found:
                self.enumerated.add(found.group(1))
        line = "[{:12.6f}] {}".format(seconds, text)
        if any(word in text for word in self._BLOCK_WORDS) and self._BLOCK.search(text):
            self._blocks += 1
            self._block_left = BLOCK_LINES
            self._begin = _StoredLine(self._number, line, None, 0)
            if self._blocks <= BLOCKS:
                self._store(self._begin, important=True)
                return
        elif self._block_left and self._IN_BLOCK.match(text):
            self._block_left -= 1
            if self._blocks <= BLOCKS:
                self._store(_StoredLine(self._number, line, None, 0), important=True)
            elif self._begin and " [nvidia" in text:
                # A report of the driver among those of a frozen file server: its first line, and what proves it.
                self._store(self._begin, important=True)
                self._store(_StoredLine(self._number, line, None, 0), important=True)
                self._begin = None
            else:
                self._cut = True
            return
        else:
            self._block_left = 0
        pattern = self._pattern(text, seconds)
        if pattern is None:
            self._store(_StoredLine(self._number, line, None, 0), important=bool(self._DRIVERS.match(line)))
            return
        pattern.count += 1
        pattern.last = seconds
        if pattern.count <= FLOOD:
            self._store(_StoredLine(self._number, line, pattern, pattern.count), pattern.important)
        else:
            pattern.tail.append((self._number, line))

    def text(self) -> Tuple[str, bool]:
        """The bounded log, in its order; and whether it lacks lines that ``repeats`` does not count."""
        important = [(stored.number, stored.line) for stored in self._important_lines if stored.is_kept()]
        others = [(stored.number, stored.line) for stored in self._other_lines if stored.is_kept()]
        for pattern in self._patterns.values():
            (important if pattern.important else others).extend(pattern.tail)
        # The driver's own lines first: pods cause others.
        important = sorted(set(important), key=lambda each: (not self._DRIVERS.match(each[1]), each))
        others.sort()
        chosen, important_cut = _first_lines(important, TEXT_BYTES * 2 // 3)
        # The newest of the other lines: they show what happened last.
        newest, others_cut = _first_lines(others[::-1], TEXT_BYTES - sum(len(line.encode()) + 1 for _, line in chosen))
        lines = sorted(chosen + newest)
        return "".join(line + "\n" for _, line in lines), self._cut or important_cut or others_cut

    def repeats(self) -> List[Dict[str, Any]]:
        """The floods, the longest first."""
        floods = [pattern for pattern in self._patterns.values() if pattern.count > FLOOD]
        floods.sort(key=lambda pattern: -pattern.count)
        return [
            {"line": pattern.line, "count": pattern.count, "first": pattern.first, "last": pattern.last}
            for pattern in floods[:500]
        ]

    def _pattern(self, text: str, seconds: float) -> Optional[_Pattern]:
        key = self._RUN.sub("#", text.translate(self._DIGITS))
        if "Xid (" in text:
            key = key.partition(", p")[0]  # processes have any names
        if "NVRM" in text or "nv" in text or "PCI" in text or "pci" in text:
            key += text if self._NUMBERS_MATTER.search(text) else "".join(self._IDENTITY.findall(text))
        pattern = self._patterns.get(key)
        if pattern is None and len(self._patterns) < self._MAX_PATTERNS:
            pattern = self._patterns[key] = _Pattern(text, seconds, bool(self._IMPORTANT.search(text)))
        return pattern

    def _store(self, stored: "_StoredLine", important: bool) -> None:
        if important:
            if self._important_bytes > self._IMPORTANT_BYTES << bool(self._DRIVERS.match(stored.line)):
                self._cut = True
                return
            self._important_lines.append(stored)
            self._important_bytes += len(stored.line)
            return
        self._other_lines.append(stored)
        self._other_bytes += len(stored.line)
        while self._other_bytes > self._OTHER_BYTES:
            self._other_bytes -= len(self._other_lines.popleft().line)
            self._cut = True


class _StoredLine:
    """A candidate for the result: the ``ordinal``-th line of its pattern."""

    __slots__ = ("line", "number", "ordinal", "pattern")

    def __init__(self, number: int, line: str, pattern: Optional[_Pattern], ordinal: int) -> None:
        self.number = number
        self.line = line
        self.pattern = pattern
        self.ordinal = ordinal

    def is_kept(self) -> bool:
        """False for the lines in the middle of a flood."""
        pattern = self.pattern
        return (
            pattern is None
            or pattern.count <= FLOOD
            or self.ordinal <= FLOOD_FIRST
            or self.ordinal > pattern.count - FLOOD_LAST
        )


def _first_lines(lines: List[Tuple[int, str]], limit: int) -> Tuple[List[Tuple[int, str]], bool]:
    """The first lines that fit into ``limit`` bytes, and whether lines are missing."""
    for position, (_, line) in enumerate(lines):
        limit -= len(line.encode()) + 1
        if limit < 0:
            return lines[:position], True
    return lines, False
