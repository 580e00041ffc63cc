"""Progress and summaries of runs: plain lines in files and pipes, one live line per machine on a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from gpunodes import settings
from gpunodes.model import Machine, MachineResult, Outcome, Phase, PreflightFinding, RunResult, Severity, printable

_TITLES = {
    Outcome.UNCHANGED: "ok",
    Outcome.CHANGED: "changed",
    Outcome.FAILED: "FAILED",
    Outcome.UNREACHABLE: "UNREACHABLE",
    Outcome.SKIPPED: "not changed",
}


def duration(seconds: float) -> str:
    """Seconds for display: ``8 s``, ``2 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def put(stream: TextIO, text: str) -> None:
    """Write progress. A run does not stop half-way because its output cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()


def _numbered(phase: Phase, number: int, total: int) -> str:
    """The title of a phase, with its number if there are several."""
    return f"{phase.title} ({number} of {total})" if total > 1 else phase.title


class RunLines:
    """Plain lines, one for each event."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()

    def begin(self, title: str, machines: Sequence[Machine]) -> None:
        names = ", ".join(machine.name for machine in machines)
        self._say(f"{title}: {names}")

    def phase(self, machine: str, phase: Phase, number: int = 0, total: int = 0) -> None:
        self._say(f"{machine}: {_numbered(phase, number, total)}")

    def task(self, machine: str, task: str) -> None:
        """Plain lines show phases only."""

    def findings(self, findings: Sequence[PreflightFinding]) -> None:
        for finding in findings:
            self._say(str(finding))

    def ended(self, result: MachineResult) -> None:
        if result.outcome.is_failure:
            self._say(f"{result.name}: {_TITLES[result.outcome]}: {result.cause}")

    def close(self) -> None:
        """Nothing to do: plain lines stay."""

    def _say(self, text: str) -> None:
        elapsed = time.monotonic() - self._started
        put(self._stream, f"[{elapsed:5.0f} s] {printable(text)}\n")


class Live:
    """One line per machine, redrawn in place: its phase and task, the time spent in the phase, the outcome."""

    _PERIOD = 0.5
    """Seconds between two drawings."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: dict[str, tuple[str, float | None]] = {}
        self._phases: dict[str, str] = {}
        self._drawn = 0
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._clock: threading.Thread | None = None

    def begin(self, title: str, machines: Sequence[Machine]) -> None:
        now = time.monotonic()
        with self._mutex:
            self._above(title)
            self._lines = {machine.name: ("waiting", now) for machine in machines}
            self._draw()
        if self._clock is None:
            self._clock = threading.Thread(target=self._tick, daemon=True)
            self._clock.start()

    def phase(self, machine: str, phase: Phase, number: int = 0, total: int = 0) -> None:
        with self._mutex:
            self._phases[machine] = _numbered(phase, number, total)
            self._lines[machine] = (self._phases[machine], time.monotonic())
            self._draw()

    def task(self, machine: str, task: str) -> None:
        # Drawn with the next tick: most tasks take less time than a drawing.
        with self._mutex:
            phase, since = self._phases.get(machine, ""), self._lines.get(machine, ("", None))[1]
            if phase and since is not None:
                self._lines[machine] = (f"{phase}: {task}", since)

    def findings(self, findings: Sequence[PreflightFinding]) -> None:
        with self._mutex:
            for finding in findings:
                self._above(str(finding))
            self._draw()

    def ended(self, result: MachineResult) -> None:
        with self._mutex:
            word = _TITLES[result.outcome]
            self._lines[result.name] = (f"{word}  {result.cause}" if result.cause else word, None)
            self._draw()

    def close(self) -> None:
        """Remove the live lines: the summary that follows has the outcome of each machine."""
        self._stop.set()
        if self._clock:
            self._clock.join()
            self._clock = None
        with self._mutex:
            self._erase()

    def _tick(self) -> None:
        while not self._stop.wait(self._PERIOD):
            with self._mutex:
                self._draw()

    def _above(self, text: str) -> None:
        """Print a line that stays, above the live ones."""
        self._erase()
        put(self._stream, f"{printable(text)}\n")

    def _erase(self) -> None:
        if self._drawn:
            put(self._stream, f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _draw(self) -> None:
        # With more machines than lines on the screen, the last ones would scroll the first ones away.
        size = shutil.get_terminal_size()
        shown = list(self._lines.items())[: max(1, size.lines - 2)]
        width = max((len(name) for name, _ in shown), default=0)
        self._erase()
        now = time.monotonic()
        lines = []
        for name, (text, since) in shown:
            elapsed = f"  {duration(now - since)}" if since is not None else ""
            lines.append(printable(f"{name:<{width}}  {text}{elapsed}")[: size.columns - 1])
        put(self._stream, "".join(f"{line}\n" for line in lines))
        self._drawn = len(shown)


def summary(result: RunResult) -> str:
    """The result of a run: every machine with its outcome, and the path of the log."""
    width = max((len(machine.name) for machine in result.machines), default=0)
    lines: list[str] = []
    for machine in result.machines:
        word = _TITLES[machine.outcome]
        if result.dry_run and machine.outcome is Outcome.CHANGED:
            word = "would change"
        line = f"{machine.name:<{width}}  {word}"
        if machine.seconds:
            line += f"  {duration(machine.seconds)}"
        if machine.outcome.is_failure:
            line += f"  {machine.phase + ': ' if machine.phase else ''}{machine.cause}"
        elif result.dry_run and machine.changes:
            line += f"  {', '.join(machine.changes)}"
        lines += map(printable, (line, *(f"  {note}" for note in machine.notes)))
    errors = sum(finding.severity is Severity.ERROR for finding in result.findings)
    if errors:
        lines.append(f"{errors} preflight check{'s' if errors > 1 else ''} failed; nothing was changed.")
    lines.append(f"log: {result.log}")
    return "\n".join(lines)


def progress(stream: TextIO | None = None) -> RunLines | Live:
    """The view that fits ``stream`` (standard error by default); lines where Ansible's output comes between."""
    stream = stream or sys.stderr
    return Live(stream) if redrawable(stream) and not settings.verbose() else RunLines(stream)


def redrawable(stream: TextIO) -> bool:
    """Whether lines on ``stream`` can be redrawn: on a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


_NARROW = 24
"""Characters below which a column is not wrapped, but moved to lines of its own."""


def table(rows: Sequence[Sequence[str]], columns: int | None = None) -> str:
    """Rows in columns, each as wide as its widest cell; the last one is wrapped to a screen of ``columns``, if any."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    lines: list[str] = []
    for row in rows:
        if columns is None or before + len(row[-1]) < columns:
            cells = zip(row, widths, strict=True)
            lines.append(printable("  ".join(f"{cell:<{width}}" for cell, width in cells)).rstrip())
            continue
        first = printable("  ".join(f"{cell:<{width}}" for cell, width in zip(row[:-1], widths[:-1], strict=True)))
        if columns - before >= _NARROW:
            lines += wrapped(f"{first}  {row[-1]}", columns, before)
        else:
            lines += [first.rstrip(), *wrapped(f"    {row[-1]}", columns, 4)]
    return "\n".join(lines)


def wrapped(line: str, columns: int | None, indent: int) -> list[str]:
    """A line wrapped to ``columns`` with a hanging indent; unchanged without ``columns``."""
    line = printable(line)
    if columns is None or len(line) < columns:
        return [line]
    indent = min(indent, max(0, columns - _NARROW))
    head, rest = line[:indent], line[indent:]
    parts = textwrap.wrap(rest, max(8, columns - 1 - indent), break_on_hyphens=False)
    return [head + parts[0], *(" " * indent + part for part in parts[1:])] if parts else [line.rstrip()]
