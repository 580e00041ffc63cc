"""Reads nvidia-smi's plain table and the rows of its queries: what it shows of each GPU, and what it could not read.

A row of the table is two lines of cells: number, name, persistence | bus id, display | errors, and below them
fan, temperature, performance, power | memory | utilisation. Sources: nvidia-smi's own output, drivers 304 to 610;
nvidia-smi(1).
"""

from __future__ import annotations

import re
import string

_FIRST = re.compile(
    r"\|\s*(?P<number>\d{1,3})\s+(?P<name>[^|\s][^|]*)\|"
    r"\s*(?P<address>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9])\s[^|]*\|(?P<errors>[^|]*)\|"
)
_HEADER = re.compile(r"\|\s*NVIDIA-SMI\s")
_UNREAD = "ERR!"
# What a path in `nvidia-smi -q`, or a field of a query, shows. Others say nothing about a GPU's health.
_GROUPS = (
    ("fan", r"fan_speed|fan\.speed"),
    ("temperature", r"temperature/gpu(?:_current)?_temp|temperature\.gpu"),
    ("power", r"(?:gpu_)?power_readings/(?:\w*_)?power_draw\w*|power\.draw(?:\.\w+)?"),
    ("performance", r"performance_state|pstate"),
    ("utilisation", r"utilization/gpu(?:_util)?|utilization\.\w+"),
    ("memory", r"fb_memory_usage/(?:total|used|free)|memory\.\w+"),
    ("clocks", r"clocks/\w+|clocks\.(?:current\.)?\w+"),
    ("errors", r"ecc_errors/volatile/.+|ecc\.errors\..+"),
    ("name", r"product_name|name|gpu_name"),
)
_LETTERS = frozenset(string.ascii_lowercase + "_")
_ROWS = 64
"""The most rows between a heading and a row."""
FIELDS_OF_GPU = 3
"""If so many kinds of values cannot be read, the GPU does not respond; a sensor alone may be broken."""


def group(field: str) -> str:
    """What a field shows, by its path or its name in a query; empty for one that says nothing about a GPU's health."""
    return next((name for name, pattern in _GROUPS if re.fullmatch(pattern, field)), "")


class Table:
    """The lines of plain tables, taken one after another."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        """The numbers of the GPUs of the last table, in its order."""
        self._first: re.Match[str] | None = None

    def take(self, line: str) -> tuple[str, dict[str, str]] | None:
        """Take a line; the address and the values of the GPU whose row ends with it, if one does."""
        if _HEADER.match(line):
            self.numbers, self._first = [], None
        first, self._first = self._first, _FIRST.match(line)
        if first is None or not line.startswith("|"):
            return None
        self.numbers.append(int(first["number"]))
        return first["address"], _values(first, line)

    def missing(self) -> list[int]:
        """The numbers between those of the table that have no row."""
        return sorted(set(range(min(self.numbers), max(self.numbers))) - set(self.numbers)) if self.numbers else []


def _values(first: re.Match[str], second: str) -> dict[str, str]:
    """The values of a row in the names that `smi` uses."""
    values: dict[str, str] = {}
    *name, persistence = first["name"].split() or [""]
    if persistence in {"On", "Off"}:
        values["persistence"] = "Enabled" if persistence == "On" else "Disabled"
    cells = [cell.split() for cell in second.split("|")[1:4]]
    readings = (cells[0] if cells else [])[:3]
    kinds = ("fan", "temperature", "performance")
    unread = [kind for kind, value in zip(kinds, readings, strict=False) if value == _UNREAD]
    unread += [kind for kind, row in zip(("memory", "utilisation"), cells[1:], strict=False) if _UNREAD in row]
    if cells and _UNREAD in cells[0][3:]:
        unread.append("power")
    if _UNREAD in (*name, persistence):
        unread.append("name")
    errors = first["errors"].strip()
    if errors == _UNREAD:
        unread.append("errors")
    elif re.fullmatch("[0-9]{1,18}", errors):
        values["ecc_volatile"] = errors
    if unread:
        values["unread"] = " ".join(unread)
    return values


def unread_of_query(line: str, before: list[str]) -> str:
    """The kinds of values that a row of ``nvidia-smi --query-gpu`` lacks; ``before`` are the lines before it."""
    fields = line.split(",")
    names = [f"field {number}" for number in range(1, len(fields) + 1)]
    commas = len(fields) - 1
    headings = (each for each in before[: -_ROWS - 1 : -1] if each.count(",") == commas and _is_heading(each))
    if heading := next(headings, ""):
        # Units are in brackets.
        columns = [re.sub(r"\[[^\][]*\]", "", column).strip() for column in heading.split(",")]
        names = [group(column) if "pid" not in columns else "" for column in columns]
    unread = (name for name, value in zip(names, fields, strict=False) if name and "Unknown Error" in value)
    return ", ".join(dict.fromkeys(unread))


def _is_heading(line: str) -> bool:
    """Whether a line names the fields of a query; units are in brackets."""
    return line.lstrip()[:1] in _LETTERS and not re.search(r"\d", re.sub(r"\[[^\][]*\]", "", line))
