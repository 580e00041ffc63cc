#!/usr/bin/env python3
"""Make the README's picture, docs/recording.svg: a terminal with real output, drawn line by line.

`make docs` draws it. It shows the transcript docs/recording.txt if there is one, else commands that need no machine, on
logs that machines of the lab wrote while they had a fault. To record a cluster, a hung GPU and its repair:

    sudo gpunodes lab up --workers 1 --gpu-workers 1          # in an empty folder
    docs/record.py --capture                                  # there; writes docs/recording.txt
    make docs
"""

from __future__ import annotations

import argparse
import contextlib
import html
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRANSCRIPT = ROOT / "docs" / "recording.txt"
PICTURE = ROOT / "docs" / "recording.svg"
LOGS = {"gpu-1.log": "hang", "gpu-2.log": "gone"}
"""The name of a log in the picture, and its folder in tests/unit/fixtures/captured."""
SAVED = ("gpunodes health --from gpu-1.log", "gpunodes health --from gpu-2.log", "gpunodes health explain xid 79")
LAB = (
    "gpunodes up",
    "sudo gpunodes lab fault gpu-1 hang",
    "gpunodes health",
    "gpunodes health --reboot-hung --yes",
    "gpunodes history gpu-1",
)
COLUMNS = 110
_TYPED_S = 0.03
"""Seconds for one character of a command."""
_LINE_S = 0.12
_PAUSE_S = 0.8
"""Seconds before a command."""

_WIDTH, _HEIGHT, _MARGIN, _BAR = 7.8, 18, 16, 30
_COLOURS = {30: "#6e7681", 31: "#ff7b72", 32: "#3fb950", 33: "#d29922", 34: "#58a6ff", 35: "#bc8cff", 36: "#39c5cf"}
_ESCAPE = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])")


# --- transcripts -----------------------------------------------------------------------------------------------------


def saved() -> str:
    """The transcript of SAVED, run in this process."""
    from click.testing import CliRunner
    from gpunodes import cli

    lines = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, fault in LOGS.items():
            shutil.copy(ROOT / "tests" / "unit" / "fixtures" / "captured" / fault / "kernel.log", name)
        for command in SAVED:
            output = CliRunner().invoke(cli.root, shlex.split(command)[1:], standalone_mode=False).output
            lines += [f"$ {command}", *output.rstrip().splitlines(), ""]
    return "\n".join(lines)


def capture(commands: Sequence[str]) -> str:
    """The transcript of commands that are run for real, in the current folder."""
    lines = []
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "dumb"}
    for command in commands:
        sys.stderr.write(f"$ {command}\n")
        done = subprocess.run(
            shlex.split(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            check=False,
        )
        output = done.stdout.replace(str(Path.home()), "~").rstrip()
        lines += [f"$ {command}", *output.splitlines(), ""]
    return "\n".join(lines)


# --- the picture -----------------------------------------------------------------------------------------------------


def wrapped(text: str) -> Iterator[str]:
    """A line in pieces of COLUMNS characters; escape sequences take no room."""
    piece, room = "", COLUMNS
    for part in re.split(r"(\x1b\[[0-9;]*[A-Za-z])", text):
        if _ESCAPE.fullmatch(part):
            piece += part
            continue
        rest = part
        while len(rest) > room:
            yield piece + rest[:room]
            piece, rest, room = "    ", rest[room:], COLUMNS - 4
        piece, room = piece + rest, room - len(rest)
    yield piece


def spans(text: str) -> str:
    """A line as SVG, with the colours of its escape sequences."""
    found, style, start = [], "", 0
    for match in [*_ESCAPE.finditer(text), None]:
        piece = text[start : match.start() if match else None]
        if piece:
            found.append(f"<tspan{style}>{html.escape(piece)}</tspan>" if style else html.escape(piece))
        if match is not None:
            start = match.end()
            style = _style([int(code or 0) for code in match[1].split(";")]) if match[2] == "m" else style
    return "".join(found)


def _style(codes: Sequence[int]) -> str:
    colour = next((_COLOURS[code % 60 if code > 60 else code] for code in codes if code % 60 in _COLOURS), "")  # noqa: PLR2004 - 90 to 97 are the bright ones
    weight = ' font-weight="bold"' if 1 in codes else ""
    return (f' fill="{colour}"' if colour else "") + weight


def render(transcript: str) -> str:
    """The SVG of a transcript: lines that begin with ``$ `` are typed, the others appear one after another."""
    rows: list[str] = []
    clock = 0.5
    for line in transcript.strip().splitlines():
        typed = line.startswith("$ ")
        clock += _PAUSE_S if typed else 0
        for piece in wrapped(line):
            y = _BAR + _MARGIN + _HEIGHT * (len(rows) + 1) - 5
            content = (
                f'<tspan fill="#3fb950">$</tspan>{spans(piece[1:])}'
                if typed and piece.startswith("$")
                else spans(piece)
            )
            rows.append(f'<text class="l" x="{_MARGIN}" y="{y}" style="animation-delay:{clock:.2f}s">{content}</text>')
        clock += _TYPED_S * len(line) if typed else _LINE_S
    width, height = round(2 * _MARGIN + COLUMNS * _WIDTH), _BAR + 2 * _MARGIN + _HEIGHT * len(rows)
    lights = "".join(
        f'<circle cx="{20 + 20 * number}" cy="{_BAR // 2 + 2}" r="6" fill="{colour}"/>'
        for number, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" xml:space="preserve">',
            "<style>",
            "text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace }",
            "text { fill: #c9d1d9; white-space: pre }",
            # Renderers without animations show all lines.
            "@keyframes appear { from { opacity: 0 } to { opacity: 1 } }",
            ".l { animation: appear 0.05s both }",
            "@media (prefers-reduced-motion: reduce) { .l { animation: none } }",
            "</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
            lights,
            *rows,
            "</svg>",
            "",
        )
    )


def picture() -> str:
    """docs/recording.svg as it should be."""
    return render(TRANSCRIPT.read_text(encoding="utf-8") if TRANSCRIPT.exists() else saved())


def main() -> int:
    """Record commands, or draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capture", action="store_true", help="run the commands of a demonstration in this folder")
    parser.add_argument("commands", nargs="*", default=LAB, help="with --capture: other commands")
    arguments = parser.parse_args()
    if arguments.capture:
        TRANSCRIPT.write_text(capture(arguments.commands), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
