"""Pending upgrades of container runtimes, for people and as JSON documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gpunodes.planner.runtime_upgrade import PlannedRuntime, RuntimePlans
from gpunodes.views import document
from gpunodes.views.text import wrapped


def plan(found: RuntimePlans, columns: int | None = None) -> str:
    """Every machine with what is pending, for a screen of ``columns``, if any."""
    return "\n".join(
        "\n".join(part for line, indent in _machine(one) for part in wrapped(line, columns, indent))
        for one in found.machines
    )


def plan_document(found: RuntimePlans) -> str:
    """``gpunodes.runtime-plan/1``"""
    machines = [{**dataclasses.asdict(one), "needed": bool(one.needed)} for one in found.machines]
    return document.dump(
        {"schema": "gpunodes.runtime-plan/1", "exit_code": int(found.exit_code), "machines": machines},
    )


def _machine(one: PlannedRuntime) -> Iterator[tuple[str, int]]:
    """Lines, each with the indent of what does not fit on a screen."""
    if one.unreadable:
        yield f"{one.name}: NOT POSSIBLE: {one.unreadable}", 2
        return
    yield f"{one.name}: {'upgrade' if one.needed else 'has what its settings request, nothing to do'}", 2
    for each in one.packages:
        yield f"  package   {each.name} {f'{each.old} -> ' if each.old else ''}{each.new}", 12
    for change in one.changes:
        yield f"  change    {change}", 12
