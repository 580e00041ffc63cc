"""The steps of a command that works on one thing after another: on a terminal, the one that runs has a clock."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from gpunodes.model import printable
from gpunodes.views.screen import Redrawn, clock, put_line, redrawable


class StepLines:
    """A line for each step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def report(self, step: str) -> None:
        """A step begins."""
        put_line(self._stream, step)

    def close(self) -> None:
        """Nothing to do: plain lines stay."""


class LiveSteps(Redrawn):
    """The same, and the time since the last step began."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._step = ""
        self._began = 0.0

    def report(self, step: str) -> None:
        with self._mutex:
            before, self._step, self._began = self._step, step, time.monotonic()
        self._start(before)

    def close(self) -> None:
        """Remove the clock: the steps stay."""
        with self._mutex:
            self._began = 0.0
        self._end(keep=True)

    def lines(self, columns: int, rows: int) -> list[str]:  # noqa: ARG002 - one line fits on every screen
        if not self._step:
            return []
        running = f"  {clock(time.monotonic() - self._began)}" if self._began else ""
        return [printable(self._step)[: max(0, columns - 1 - len(running))] + running]


def progress(stream: TextIO | None = None) -> StepLines | LiveSteps:
    """The view that fits ``stream`` (standard error by default)."""
    stream = stream or sys.stderr
    return LiveSteps(stream) if redrawable(stream) else StepLines(stream)
