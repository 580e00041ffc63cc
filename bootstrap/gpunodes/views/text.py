"""Progress and summaries of runs: plain lines in files and pipes, one live line per machine on a terminal."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from gpunodes import settings
from gpunodes.model import Machine, MachineResult, Outcome, Phase, PreflightFinding, RunResult, Severity, printable
from gpunodes.views.screen import Redrawn, clock, duration, put_line, redrawable, shown

_TITLES = {
    Outcome.UNCHANGED: "ok",
    Outcome.CHANGED: "changed",
    Outcome.FAILED: "FAILED",
    Outcome.UNREACHABLE: "UNREACHABLE",
    Outcome.SKIPPED: "not changed",
}


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
        put_line(self._stream, f"[{elapsed:5.0f} s] {text}")


@dataclass(slots=True)
class _Line:
    """A machine's line: its phase, the task that runs, or its outcome."""

    since: float | None
    """When what it shows began, by the monotonic clock; None for an outcome."""
    text: str = "waiting"
    task: str = ""
    started: bool = False
    """A phase began."""


class Live(Redrawn):
    """One line per machine: the time since its task began, its phase and task, or its outcome."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._machines: dict[str, _Line] = {}

    def begin(self, title: str, machines: Sequence[Machine]) -> None:
        with self._mutex:
            self._machines = {machine.name: _Line(time.monotonic()) for machine in machines}
        self._start(title)

    def phase(self, machine: str, phase: Phase, number: int = 0, total: int = 0) -> None:
        with self._mutex:
            self._machines[machine] = _Line(time.monotonic(), _numbered(phase, number, total), started=True)
        self._draw()

    def task(self, machine: str, task: str) -> None:
        # Drawn with the next tick: most tasks take less time than a drawing.
        with self._mutex:
            line = self._machines.get(machine)
            if line and line.started and line.since is not None:
                line.task, line.since = task, time.monotonic()

    def findings(self, findings: Sequence[PreflightFinding]) -> None:
        for finding in findings:
            self._draw(str(finding))

    def ended(self, result: MachineResult) -> None:
        word = _TITLES[result.outcome]
        with self._mutex:
            self._machines[result.name] = _Line(None, f"{word}  {result.cause}" if result.cause else word)
        self._draw()

    def close(self) -> None:
        """Remove the lines: the summary that follows has the outcome of each machine."""
        self._end(keep=False)

    def lines(self, columns: int, rows: int) -> list[str]:
        # With more machines than lines on the screen, the last ones would scroll the first ones away.
        fitting = list(self._machines.items())[: max(1, rows - 2)]
        busy = [name for name, line in self._machines.items() if line.task]
        width = min(max((len(name) for name, _ in fitting), default=0), max(8, columns // 3))
        now = time.monotonic()
        return [
            shown(
                f"{name[:width]:<{width}}  {'' if line.since is None else clock(now - line.since):>5}  "
                f"{line.text}{_waits(line, busy)}"[: columns - 1],
                self._stream,
            )
            for name, line in fitting
        ]


def _waits(line: _Line, busy: Sequence[str]) -> str:
    """The task that runs on a machine, or the machines that it waits for."""
    if line.task:
        return f": {line.task}"
    if line.since is None or not line.started or not busy:
        return ""
    return f": waiting for {busy[0] if len(busy) == 1 else f'{len(busy)} machines'}"


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
