"""What a person reads: plain lines where output is kept, one live line per machine on a terminal."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from gpunodes.model import Machine, MachineResult, Outcome, Phase, PreflightFinding, RunResult, Severity, printable

_SIGNS = {
    Outcome.UNCHANGED: "ok",
    Outcome.CHANGED: "changed",
    Outcome.FAILED: "FAILED",
    Outcome.UNREACHABLE: "UNREACHABLE",
    Outcome.SKIPPED: "untouched",
}


def duration(seconds: float) -> str:
    """Seconds as a person says them: ``8 s``, ``2 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class RunLines:
    """Plain lines, one for each thing that happens."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()

    def begin(self, title: str, machines: Sequence[Machine]) -> None:
        names = ", ".join(machine.name for machine in machines)
        self._say(f"{title}: {names}")

    def phase(self, machine: str, phase: Phase) -> None:
        self._say(f"{machine}: {phase.title}")

    def findings(self, findings: Sequence[PreflightFinding]) -> None:
        for finding in findings:
            self._say(describe(finding))

    def ended(self, result: MachineResult) -> None:
        if result.outcome.bad:
            self._say(f"{result.name}: {_SIGNS[result.outcome]}: {result.cause}")

    def close(self) -> None:
        """Nothing is left on the screen."""

    def _say(self, text: str) -> None:
        elapsed = time.monotonic() - self._started
        print(f"[{elapsed:5.0f} s] {printable(text)}", file=self._stream, flush=True)


class Live:
    """One line per machine, redrawn in place: its phase, the time it has spent there, how it came out."""

    _PERIOD = 0.5
    """Seconds between two drawings."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: dict[str, tuple[str, float | None]] = {}
        self._drawn = 0
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._clock: threading.Thread | None = None

    def begin(self, title: str, machines: Sequence[Machine]) -> None:
        now = time.monotonic()
        with self._guard:
            self._above(title)
            self._lines = {machine.name: ("waiting", now) for machine in machines}
            self._draw()
        if self._clock is None:
            self._clock = threading.Thread(target=self._tick, daemon=True)
            self._clock.start()

    def phase(self, machine: str, phase: Phase) -> None:
        with self._guard:
            self._lines[machine] = (phase.title, time.monotonic())
            self._draw()

    def findings(self, findings: Sequence[PreflightFinding]) -> None:
        with self._guard:
            for finding in findings:
                self._above(describe(finding))
            self._draw()

    def ended(self, result: MachineResult) -> None:
        with self._guard:
            word = _SIGNS[result.outcome]
            self._lines[result.name] = (f"{word}  {result.cause}" if result.cause else word, None)
            self._draw()

    def close(self) -> None:
        """Take the live lines away: the summary that follows says how each machine came out."""
        self._stop.set()
        if self._clock:
            self._clock.join()
            self._clock = None
        with self._guard:
            self._erase()
            self._stream.flush()

    def _tick(self) -> None:
        while not self._stop.wait(self._PERIOD):
            with self._guard:
                self._draw()

    def _above(self, text: str) -> None:
        """A line that stays, above the live ones."""
        self._erase()
        print(printable(text), file=self._stream)

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _draw(self) -> None:
        # More machines than lines on the screen: the last ones, which still fit, would scroll the others away.
        size = shutil.get_terminal_size()
        shown = list(self._lines.items())[: max(1, size.lines - 2)]
        width = max((len(name) for name, _ in shown), default=0)
        self._erase()
        now = time.monotonic()
        for name, (text, since) in shown:
            elapsed = f"  {duration(now - since)}" if since is not None else ""
            self._stream.write(printable(f"{name:<{width}}  {text}{elapsed}")[: size.columns - 1] + "\n")
        self._drawn = len(shown)
        self._stream.flush()


def describe(finding: PreflightFinding) -> str:
    """A finding in one line."""
    word = "" if finding.severity is Severity.ERROR else " (warning)"
    return f"{finding.machine}: {finding.check}{word}: {finding.fact}; wanted: {finding.limit}. {finding.remedy}."


def summary(result: RunResult) -> str:
    """The end of a run: every machine with its outcome, and where the log is."""
    width = max((len(machine.name) for machine in result.machines), default=0)
    lines: list[str] = []
    for machine in result.machines:
        word = _SIGNS[machine.outcome]
        if result.dry_run and machine.outcome is Outcome.CHANGED:
            word = "would change"
        line = f"{machine.name:<{width}}  {word}"
        if machine.seconds:
            line += f"  {duration(machine.seconds)}"
        if machine.outcome.bad:
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
    """The view that fits ``stream`` (standard error by default)."""
    stream = stream or sys.stderr
    return Live(stream) if stream.isatty() else RunLines(stream)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, each as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        printable("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    )
