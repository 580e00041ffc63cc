"""Colours by meaning, the same in all output. They add nothing to the words: without them the text is the same."""

from __future__ import annotations

import os
import re
from typing import TextIO

# ECMA-48, SGR.
_RED, _YELLOW, _GREEN, _DIM = "31", "33", "32", "2"
_MEANINGS = {
    _RED: "error, failed, unreachable, not ready, not possible, hung, sick, needs-repair, not-repaired, refuse",
    _YELLOW: "hint, remedy, warning, degraded, unknown, wait, cordoned, in maintenance, expired",
    _GREEN: "healthy, ready, ok, changed, repaired, succeeded",
    _DIM: "skipped, not changed, nothing, no node, off",
}
_COLOURS = {word: colour for colour, words in _MEANINGS.items() for word in words.split(", ")}
_ANY = "|".join(sorted(map(re.escape, _COLOURS), key=len, reverse=True))
# The first state in a line: after a name or in a column. An indented line may quote a machine: only its label counts.
_STATE = re.compile(rf"(?P<before>: |  |\] | \()(?P<word>{_ANY})(?=$|[,:;)]|  | in | by )", re.IGNORECASE)
_LABEL = re.compile(r"(?P<before>^ +)(?P<word>warning|remedy)(?=:)")


def coloured(stream: TextIO) -> bool:
    """Whether text on ``stream`` may have colours: on a terminal, unless NO_COLOR or TERM=dumb forbids it."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, word: str = "") -> str:
    """``text`` in the colour of ``word``, by default of itself."""
    return f"\x1b[{_COLOURS[(word or text).lower()]}m{text}\x1b[0m"


def painted_lines(text: str) -> str:
    """Printable lines, in each of which the word that tells a state has its colour."""
    return "\n".join(_painted_line(line) for line in text.split("\n"))


def _painted_line(line: str) -> str:
    pattern = _LABEL if line.startswith(" ") else _STATE
    return pattern.sub(lambda found: found["before"] + painted(found["word"]), line, count=1)
