"""Where progress is shown: lines that are redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import abc
import contextlib
import os
import shutil
import threading
from typing import TextIO

from gpunodes.model import printable
from gpunodes.views.colours import coloured, painted_lines


def duration(seconds: float) -> str:
    """Seconds for display: ``8 s``, ``2 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def clock(seconds: float) -> str:
    """Seconds for a clock that runs: ``8 s``, ``2:05``."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def put(stream: TextIO, text: str) -> None:
    """Write progress. A run does not stop half-way because its output cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()


def put_line(stream: TextIO, text: str) -> None:
    """Write one line; on a terminal from its margin, where Ctrl-C may have left ``^C``."""
    margin = "\r" if stream.isatty() else ""
    put(stream, f"{margin}{shown(text, stream)}\n")


def shown(text: str, stream: TextIO) -> str:
    """One printable line, with the colours that ``stream`` may have."""
    return painted_lines(printable(text)) if coloured(stream) else printable(text)


def redrawable(stream: TextIO) -> bool:
    """Whether lines on ``stream`` can be redrawn: on a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def size(stream: TextIO) -> os.terminal_size:
    """Columns and rows of the terminal of ``stream``; standard output may be another one, or a file."""
    with contextlib.suppress(OSError, ValueError):
        found = os.get_terminal_size(stream.fileno())
        if found.columns and found.lines and not os.environ.get("COLUMNS"):
            return found
    return shutil.get_terminal_size()


class Redrawn(abc.ABC):
    """Lines that are redrawn in place, by a thread of their own: their clocks move while nothing happens."""

    _PERIOD = 0.5
    """Seconds between two drawings."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = 0
        self._mutex = threading.Lock()
        """Held while the content changes or is drawn."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @abc.abstractmethod
    def lines(self, columns: int, rows: int) -> list[str]:
        """The lines for a screen of this size, each shorter than ``columns``, fewer than ``rows``."""

    def _start(self, above: str = "") -> None:
        """Draw, from now on periodically."""
        self._draw(above)
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._tick, daemon=True)
            self._thread.start()

    def _end(self, *, keep: bool) -> None:
        """Draw no more: the last lines stay, with ``keep``, or are removed."""
        self._stop.set()
        if self._thread:
            self._thread.join()
            self._thread = None
        with self._mutex:
            self._write("".join(f"{line}\n" for line in self._fitting()) if keep else "")
            self._drawn = 0

    def _tick(self) -> None:
        while not self._stop.wait(self._PERIOD):
            self._draw()

    def _draw(self, above: str = "") -> None:
        """Draw the lines; the line ``above`` them stays."""
        with self._mutex:
            lines = self._fitting()
            stays = [shown(above, self._stream)] if above else []
            self._write("".join(f"{line}\n" for line in [*stays, *lines]), len(lines))

    def _fitting(self) -> list[str]:
        return self.lines(*size(self._stream))

    def _write(self, text: str, drawn: int = 0) -> None:
        """Replace what was drawn, in one piece: an interruption leaves no half of it."""
        erased = f"\x1b[{self._drawn}A\r\x1b[J" if self._drawn else ""
        self._drawn = drawn
        put(self._stream, erased + text)
