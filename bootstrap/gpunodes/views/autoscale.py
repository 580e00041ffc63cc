"""Pools that scale, for people and as JSON documents; the results of operations/autoscale fit its protocols."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gpunodes.model import printable
from gpunodes.views import document, text


class Machine(Protocol):
    """A machine of a pool that scales."""

    @property
    def node(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def since(self) -> float | None: ...
    @property
    def reason(self) -> str: ...
    @property
    def unusable(self) -> str: ...


class Status(Protocol):
    """The state of the autoscaler."""

    @property
    def running(self) -> bool: ...
    @property
    def pools(self) -> Mapping[str, Mapping[str, int]]: ...
    @property
    def machines(self) -> Sequence[Machine]: ...
    @property
    def changes(self) -> Sequence[str]: ...
    @property
    def left_out(self) -> Mapping[str, str]: ...
    @property
    def passed_over(self) -> Mapping[str, str]: ...
    @property
    def behind(self) -> str: ...


def status(found: Status, columns: int | None = None) -> str:
    """Pools and machines as tables, for a screen of ``columns``, if any."""
    pools = [("POOL", "MIN", "MAX", "MACHINES", "ON")]
    pools += [
        (name, str(each["min"]), str(each["max"]), str(each["machines"]), str(each["on"]))
        for name, each in sorted(found.pools.items())
    ]
    rows = [("NODE", "POOL", "STATE", "SINCE", "")]
    rows += [(each.node, each.pool, each.phase, _time(each.since), _why(each)) for each in found.machines]
    parts = [text.table(pools, columns), text.table(rows, columns)]
    if found.changes:
        parts.append("\n".join(printable(f"would change: {each}") for each in found.changes))
    elif not found.running:
        parts.append("the autoscaler does not run: no machine is switched on or off")
    if found.behind:
        parts.append(printable(found.behind))
    if found.passed_over:
        parts.append(_passed_over(found))
    if found.left_out:
        parts.append(_left_out(found))
    return "\n\n".join(parts)


def removed(found: Status) -> str:
    """What `autoscale down` did; ``found`` is the last status."""
    off = [each.node for each in found.machines if each.phase != "on"]
    lines = [printable(f"removed; not on: {', '.join(off)}") if off else "removed"]
    if found.left_out:
        lines.append(_left_out(found))
    return "\n".join(lines)


def document_of(found: Status) -> str:
    """``gpunodes.autoscale/1``"""
    return document.dump(contents(found))


def contents(found: Status) -> dict[str, Any]:
    """The document before it is text."""
    keys = ("node", "pool", "phase", "since", "reason", "unusable")
    return {
        "schema": "gpunodes.autoscale/1",
        "running": found.running,
        "pools": {name: dict(each) for name, each in sorted(found.pools.items())},
        "machines": [{key: getattr(each, key) for key in keys} for each in found.machines],
        "changes": list(found.changes),
        "left_out": dict(found.left_out),
        "passed_over": dict(found.passed_over),
        "behind": found.behind,
    }


def _passed_over(found: Status) -> str:
    lines = [printable(f"passed over: {name}: {why}") for name, why in sorted(found.passed_over.items())]
    return "\n".join([*lines, "machines that are passed over keep their labels, taints and registration"])


def _left_out(found: Status) -> str:
    lines = [printable(f"left out: {name}: {why}") for name, why in sorted(found.left_out.items())]
    return "\n".join([*lines, "run the same command again when it responds"])


def _why(machine: Machine) -> str:
    if machine.unusable and machine.unusable != machine.reason:
        return f"{machine.reason}; not used: {machine.unusable}" if machine.reason else f"not used: {machine.unusable}"
    return machine.reason


def _time(moment: float | None) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%d %H:%M UTC") if moment else "-"
