"""The add-ons of a cluster, for people and as JSON documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gpunodes.planner.addons import PlannedAddon
from gpunodes.views import document
from gpunodes.views.text import wrapped

_SHOWN = 5


def plan(found: Sequence[PlannedAddon], columns: int | None = None) -> str:
    """Every add-on with its running and its wanted images, for a screen of ``columns``, if any."""
    lines = [part for one in found for line, indent in _addon(one) for part in wrapped(line, columns, indent)]
    return "\n".join(lines) or "no add-on of gpunodes is installed"


def plan_document(found: Sequence[PlannedAddon]) -> str:
    """``gpunodes.addons-plan/1``"""
    addons = [{**dataclasses.asdict(one), "needed": one.needed} for one in found]
    return document.dump({"schema": "gpunodes.addons-plan/1", "exit_code": 0, "addons": addons})


def _addon(one: PlannedAddon) -> Iterator[tuple[str, int]]:
    """Lines, each with the indent of what does not fit on a screen."""
    yield f"{one.name}: {'update' if one.needed else 'up to date, nothing to do'}", 2
    for image, nodes in sorted(one.running.items()):
        yield f"  runs      {image} on {nodes} node{'' if nodes == 1 else 's'}", 12
    for image in one.wanted:
        if image not in one.running:
            yield f"  wanted    {image}", 12
    if one.changes:
        yield f"  changes   {', '.join(one.changes)}", 12
    if one.behind:
        more = f" and {len(one.behind) - _SHOWN} others" if len(one.behind) > _SHOWN else ""
        yield f"  behind    {', '.join(one.behind[:_SHOWN])}{more}", 12
