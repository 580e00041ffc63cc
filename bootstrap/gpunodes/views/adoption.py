"""The comparison of an adopted cluster, as a table and as a JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gpunodes.views import document, text


class Row(Protocol):
    """A line of the comparison; those of planner/adoption.py fit."""

    @property
    def machine(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def found(self) -> str: ...
    @property
    def wanted(self) -> str: ...
    @property
    def fit(self) -> str: ...


def table(rows: Sequence[Row], columns: int | None) -> str:
    """A line for each comparison."""
    shown = [("WHERE", "WHAT", "RESULT", "FOUND, AND WHAT GPUNODES HAS")]
    for each in rows:
        same = each.found == each.wanted or not each.wanted
        facts = each.found if same else f"{each.found}; {each.wanted}"
        shown.append((each.machine or "cluster", each.what, str(each.fit), facts))
    return text.table(shown, columns)


def dump(rows: Sequence[Row], inventory: Mapping[str, Any], path: Path | None) -> str:
    """``gpunodes.adopt/1``"""
    found = [
        {
            "machine": each.machine or None,
            "what": each.what,
            "found": each.found,
            "wanted": each.wanted,
            "result": str(each.fit),
        }
        for each in rows
    ]
    written = str(path) if path else None
    return document.dump({"schema": "gpunodes.adopt/1", "rows": found, "inventory": inventory, "path": written})
