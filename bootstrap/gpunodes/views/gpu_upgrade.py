"""Plans for upgrades of drivers, for people and as JSON documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gpunodes.planner.gpu_model import SOURCES, Group
from gpunodes.planner.gpu_upgrade import PlannedUpgrade, Upgrade, Upgrades
from gpunodes.views import document
from gpunodes.views.text import wrapped


def plan(found: Upgrades, columns: int | None = None) -> str:
    """Every machine with its upgrade, or why it has none, for a screen of ``columns``, if any."""
    return "\n\n".join(
        "\n".join(part for line, indent in _machine(one) for part in wrapped(line, columns, indent))
        for one in found.machines
    )


def plan_document(found: Upgrades) -> str:
    """``gpunodes.gpu-upgrade-plan/1``"""
    return document.dump(
        {
            "schema": "gpunodes.gpu-upgrade-plan/1",
            "driver": found.driver,
            "exit_code": int(found.exit_code),
            "machines": [
                {
                    "name": one.name,
                    "upgrade": dataclasses.asdict(one.upgrade) if one.upgrade else None,
                    "conflicts": [document.conflict(each) for each in one.conflicts],
                    "unreachable": one.unreachable,
                }
                for one in found.machines
            ],
        }
    )


def _machine(one: PlannedUpgrade) -> Iterator[tuple[str, int]]:
    """Lines, each with the indent of what does not fit on a screen."""
    if one.upgrade is None:
        yield f"{one.name}: UNREACHABLE: {one.unreachable}" if one.unreachable else f"{one.name}: NOT POSSIBLE", 2
        for conflict in one.conflicts:
            yield f"  {conflict.found}", 4
            yield f"    wanted: {conflict.wanted}", 12
            yield f"    remedy: {conflict.remedy}", 12
        return
    yield f"{one.name}: {_summary(one.upgrade)}", 2
    if one.upgrade.needed:
        made = one.upgrade.plan
        if made.source:
            yield f"  driver         {made.branch}, {made.flavour} modules, from {SOURCES[made.source]}", 17
        for group, title in ((Group.DRIVER, "packages"), (Group.FABRIC_MANAGER, "fabric manager")):
            if packages := made.group(group):
                yield f"  {title:<14} {', '.join(f'{each.name} {each.version}'.rstrip() for each in packages)}", 17
        yield f"  restarted      {', '.join(('nvidia-persistenced', *_fabric_manager(one.upgrade)))}", 17
        yield "  leave          pods that use GPUs; pods without GPUs stay", 17
    yield from ((f"  warning: {warning}", 11) for warning in one.upgrade.warnings)


def _fabric_manager(upgrade: Upgrade) -> tuple[str, ...]:
    return ("nvidia-fabricmanager",) if upgrade.plan.fabric_manager else ()


def _summary(upgrade: Upgrade) -> str:
    if not upgrade.needed:
        return f"driver {upgrade.installed} meets the request, nothing to do"
    verb = "downgrade" if upgrade.downgrade else "upgrade"
    return f"{verb} from {upgrade.installed} to {upgrade.requested}"
