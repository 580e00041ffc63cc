"""A running scan: a map of the machines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from gpunodes.health.model import Action, State, Verdict
from gpunodes.model import printable
from gpunodes.views.colours import coloured, painted
from gpunodes.views.screen import Redrawn, clock, duration, put_line, redrawable

WAITING = "·"
LETTERS = {
    State.HEALTHY: ".",
    State.OFF: "o",
    State.DEGRADED: "d",
    State.UNKNOWN: "?",
    State.SICK: "S",
    State.HUNG: "H",
    State.UNREACHABLE: "x",
}
_GROUP = 10
"""Cells between two gaps."""


class HealthLines:
    """Plain lines: one for each machine that is not healthy, one at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began = time.monotonic()
        self._total = self._done = 0

    def begin(self, names: Sequence[str]) -> None:
        self._began = time.monotonic()
        self._total, self._done = len(names), 0
        self._write(f"scanning {self._total} machines" if self._total != 1 else f"scanning {names[0]}")

    def scanned(self, verdict: Verdict) -> None:
        self._done += 1
        if verdict.state is not State.HEALTHY:
            self._write(f"{verdict.name}: {_described(verdict)}")
        elif self._done % max(100, self._total // 10) == 0:
            self._write(f"{self._done} of {self._total}")

    def close(self) -> None:
        self._write(f"{self._done} of {self._total} scanned in {duration(time.monotonic() - self._began)}")

    def _write(self, text: str) -> None:
        put_line(self._stream, text)


class Map(Redrawn):
    """A cell for each machine, in the inventory's order; the last drawing stays."""

    _PERIOD = 0.2

    def __init__(self, stream: TextIO, *, colour: bool = True) -> None:
        super().__init__(stream)
        self._colour = colour
        self._names: list[str] = []
        self._states: dict[str, State] = {}
        self._began = 0.0

    def begin(self, names: Sequence[str]) -> None:
        with self._mutex:
            self._names, self._states = list(names), {}
            self._began = time.monotonic()
        self._start()

    def scanned(self, verdict: Verdict) -> None:
        # Drawn with the next tick: a thousand verdicts may come at once.
        with self._mutex:
            self._states[verdict.name] = verdict.state

    def close(self) -> None:
        """Draw the final state, which stays."""
        self._end(keep=True)

    def lines(self, columns: int, rows: int) -> list[str]:
        """The map on a screen of this size: rows of cells after their machines' names, then a legend."""
        layout = _layout(self._names, columns, max(1, rows - 4))
        lines = []
        for row in layout.rows[: layout.shown]:
            cells = "".join(
                (" " if position and position % _GROUP == 0 else "") + self._cell(name)
                for position, name in enumerate(row)
            )
            lines.append(f"{_label(row, layout.label):<{layout.label}}  {cells}")
        if len(layout.rows) > layout.shown:
            hidden = sum(len(row) for row in layout.rows[layout.shown :])
            lines.append(f"... and {hidden} machines that do not fit on the screen"[: columns - 1])
        return lines + self._legend(columns)

    def _cell(self, name: str) -> str:
        state = self._states.get(name)
        if state is None:
            return WAITING
        return painted(LETTERS[state], state.value) if self._colour else LETTERS[state]

    def _legend(self, columns: int) -> list[str]:
        """The meaning of the letters, with the numbers of machines, in one line or two."""
        counts = [
            f"{letter} {state.value} {number}"
            for state, letter in LETTERS.items()
            if (number := sum(each is state for each in self._states.values()))
        ]
        if waiting := len(self._names) - len(self._states):
            counts.append(f"{WAITING} waiting {waiting}")
        parts = [*counts, clock(time.monotonic() - self._began)]
        return textwrap.wrap("  ".join(parts), max(2, columns - 1), max_lines=2, placeholder="")


@dataclass(frozen=True, slots=True)
class _Layout:
    rows: Sequence[Sequence[str]]
    label: int
    shown: int


def _layout(names: Sequence[str], columns: int, rows: int) -> _Layout:
    """The number of machines per row: a multiple of ten if possible."""
    most = max(8, columns // 3)
    label = min(max((len(name) for name in names), default=0) * 2 + 2, most)
    room = max(1, columns - label - 3)
    # A gap after every ten cells.
    fit = max(1, room * _GROUP // (_GROUP + 1))
    fit = fit // _GROUP * _GROUP or fit
    parts = [names[start : start + fit] for start in range(0, len(names), fit)]
    label = max((len(_label(part, most)) for part in parts), default=0)
    return _Layout(parts, label, min(len(parts), rows))


def _label(row: Sequence[str], width: int) -> str:
    """The first and the last name of a row, ``gpu-001..050``."""
    first, last = printable(row[0]), printable(row[-1])
    if len(row) == 1:
        return first[:width]
    # The common prefix, up to the numbers, is omitted from the second name.
    common = 0
    while common < min(len(first), len(last)) and first[common] == last[common]:
        common += 1
    common -= len(re.search(r"\d*$", first[:common])[0])  # type: ignore[index]  # matches the empty end too
    return f"{first}..{last[common:]}"[:width]


def _described(verdict: Verdict) -> str:
    action = "" if verdict.action is Action.NONE else f", {verdict.action.value}"
    why = verdict.findings[0] if verdict.findings else None
    message = f": {verdict.wanted}" if verdict.state is State.OFF else ""
    if why is not None:
        message = f": {why.evidence[0] if why.evidence and not why.gpu else why.message or why.rule}"
    return f"{verdict.state.value}{action}{message}"


def progress(stream: TextIO | None = None) -> HealthLines | Map:
    """The view that fits ``stream`` (standard error by default)."""
    stream = stream or sys.stderr
    return Map(stream, colour=coloured(stream)) if redrawable(stream) else HealthLines(stream)
