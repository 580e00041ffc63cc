"""The tables, each read once: tab-separated, `#` starts a comment, the first other line names the columns."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def read(name: str) -> tuple[dict[str, str], ...]:
    """The rows of the table ``name`` (a file ``name.tsv`` beside this one)."""
    lines = _lines(name)
    header = next(line for line in lines if not line.startswith("#")).split("\t")
    rows = [line.split("\t") for line in lines if not line.startswith("#")][1:]
    return tuple(dict(zip(header, row, strict=True)) for row in rows)


@functools.cache
def source(name: str) -> str:
    """The source of a table's facts: its comment that starts with ``Source:``."""
    return next(line.removeprefix("# Source: ") for line in _lines(name) if line.startswith("# Source: "))


def _lines(name: str) -> list[str]:
    return Path(__file__).with_name(f"{name}.tsv").read_text(encoding="utf-8").splitlines()
