"""How control planes differ from their settings, for people and as a JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpunodes.model import printable
from gpunodes.planner.drift import MachineDrift
from gpunodes.views import document
from gpunodes.views.text import wrapped


def lines(machines: Sequence[MachineDrift], columns: int | None = None) -> str:
    """A line for each difference, "" without any; which of them a roll-out applies."""
    found = []
    for each in machines:
        texts = [f"its settings cannot be compared: {each.problem}"] if each.problem else []
        texts += [one.text for one in each.differences]
        texts += ["an earlier change of its settings is not verified yet"] if each.unverified else []
        texts += [f"and {each.left_out} more differences"] if each.left_out else []
        found += [part for text in texts for part in wrapped(printable(f"drift: {each.machine}: {text}"), columns, 4)]
    if any(each.pending for each in machines):
        found.append("`gpunodes rollout apply` applies the settings")
    return "\n".join(found)


def document_of(machines: Sequence[MachineDrift]) -> str:
    """``gpunodes.drift/1``"""
    pending = [each.machine for each in machines if each.pending]
    return document.dump(
        {
            "schema": "gpunodes.drift/1",
            "pending": pending,
            "machines": [dataclasses.asdict(each) for each in machines],
        }
    )
