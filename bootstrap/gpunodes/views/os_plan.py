"""Pending upgrades of operating systems, for people and as JSON documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gpunodes.planner.os_upgrade import OsPlans, PlannedOs
from gpunodes.views import document
from gpunodes.views.text import wrapped


def plan(found: OsPlans, columns: int | None = None) -> str:
    """Every machine with what is pending, for a screen of ``columns``, if any."""
    return "\n\n".join(
        "\n".join(part for line, indent in _machine(one) for part in wrapped(line, columns, indent))
        for one in found.machines
    )


def plan_document(found: OsPlans) -> str:
    """``gpunodes.os-plan/1``"""
    machines = [{**dataclasses.asdict(one), "reboot_due": one.reboot_due} for one in found.machines]
    return document.dump(
        {
            "schema": "gpunodes.os-plan/1",
            "security": found.security,
            "exit_code": int(found.exit_code),
            "machines": machines,
        }
    )


def _machine(one: PlannedOs) -> Iterator[tuple[str, int]]:
    """Lines, each with the indent of what does not fit on a screen."""
    if one.unreadable:
        yield f"{one.name}: NOT READ: {one.unreadable}", 2
        return
    upgrades = [each for each in one.packages if each.old]
    security = sum(each.security for each in upgrades)
    count = f"{len(upgrades)} package{'' if len(upgrades) == 1 else 's'} to upgrade"
    yield f"{one.name}: {count}, {security} of them for security" if upgrades else f"{one.name}: nothing to upgrade", 2
    if upgrades:
        yield f"  packages   {', '.join(f'{each.name} {each.new}' for each in upgrades)}", 13
    if one.kernels:
        yield f"  kernel     {', '.join(one.kernels)}", 13
    for release, why in one.refused.items():
        yield f"  held       the kernel {release}: {why}", 13
    if one.kept_back:
        yield f"  kept back  {', '.join(one.kept_back)}", 13
    because = [*one.reboot, *(["a new kernel is pending"] if one.kernels else [])]
    yield f"  reboot     {'due: ' + '; '.join(because) if because else 'not due'}", 13
