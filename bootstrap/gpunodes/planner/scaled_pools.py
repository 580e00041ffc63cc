"""Pools whose machines are switched on and off as pods need them: the entries of ``gpunodes_pools``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a pool scales. The form of the setting (setting_forms.py) assures that ``least`` is not above ``most``."""

    least: int
    """Machines that are always on."""
    most: int
    """Machines that may be on at once."""
    priority: int = 0
    """Of several pools in which a pod can run, that with the highest one is chosen."""
    spare: int = 0
    """Machines that stay on without a pod."""


def scaling(pools: object, pool: str) -> Scaling | None:
    """How the pool of this name scales, by the value of ``gpunodes_pools``; None if it does not."""
    entry = pools.get(pool) if isinstance(pools, Mapping) and pool else None
    if not isinstance(entry, Mapping) or "max" not in entry:
        return None
    least, most, priority, spare = (int(entry.get(name, 0)) for name in ("min", "max", "priority", "spare"))
    return Scaling(least, most, priority, spare)


def scaled(pools: object) -> dict[str, Scaling]:
    """The pools that scale, by name."""
    names = sorted(map(str, pools)) if isinstance(pools, Mapping) else []
    return {name: found for name in names if (found := scaling(pools, name))}


def scales(pools: object, pool: str) -> bool:
    """Whether the pool of this name scales; "" is none."""
    return scaling(pools, pool) is not None


def any_scales(pools: object) -> bool:
    """Whether one of the pools scales."""
    return bool(scaled(pools))
