"""Puts a log whose newest line is first into the order in which it was written, so that reports are read in one way."""

from __future__ import annotations

from bisect import bisect_right

from gpunodes.health import patterns


class Turned:
    """A window of such a log. An entry's further lines, which have no time, stay after its first one."""

    def __init__(self, window: bytes) -> None:
        window = window if window.endswith(b"\n") else window + b"\n"
        starts = [found.start() for found in patterns.ENTRY.finditer(window)]
        self._starts = starts if starts[:1] == [0] else [0, *starts]
        self._ends = [*self._starts[1:], len(window)]
        entries = zip(reversed(self._starts), reversed(self._ends), strict=True)
        self.text = b"".join([window[begin:end] for begin, end in entries])

    def position(self, position: int) -> int:
        """Where the byte at a position of the window is in ``text``."""
        number = bisect_right(self._starts, position) - 1
        return len(self.text) - self._ends[number] + position - self._starts[number]
