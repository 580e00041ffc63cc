"""Maintenance as a table and as a JSON document; the results of operations/maintenance.py fit its protocol."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Sequence
from typing import Protocol

from gpunodes.repair.maintenance import Maintenance
from gpunodes.views import document as documents
from gpunodes.views import text


class MaintainedNode(Protocol):
    """A node's maintenance."""

    @property
    def node(self) -> str: ...
    @property
    def machine(self) -> str: ...
    @property
    def maintenance(self) -> Maintenance | None: ...
    @property
    def cordoned(self) -> bool: ...


def table(nodes: Sequence[MaintainedNode]) -> str:
    """Nodes in maintenance."""
    if not nodes:
        return "no node is in maintenance"
    rows = [("NODE", "MACHINE", "STATE", "PODS", "")]
    rows += [
        (
            each.node,
            each.machine or "-",
            "in maintenance" if each.maintenance.holds(time.time()) else "expired",
            "cordoned" if each.cordoned else "allowed",
            each.maintenance.described(),
        )
        for each in nodes
        if each.maintenance
    ]
    return text.table(rows)


def ended(nodes: Sequence[MaintainedNode]) -> str:
    """Nodes whose maintenance was ended."""
    lines = []
    for each in nodes:
        result = "maintenance ended" if each.maintenance else "it was not in maintenance"
        lines.append(
            f"{each.machine}: {result}" + ("; it stays cordoned by a user or another program" if each.cordoned else "")
        )
    return "\n".join(lines)


def document(nodes: Sequence[MaintainedNode]) -> str:
    """``gpunodes.maintenance/1``."""
    return documents.dump({"schema": "gpunodes.maintenance/1", "nodes": entries(nodes)})


def entries(nodes: Sequence[MaintainedNode]) -> list[dict[str, object]]:
    """The nodes of the document."""
    return [_entry(each) for each in nodes]


def _entry(each: MaintainedNode) -> dict[str, object]:
    found = each.maintenance
    return {
        "node": each.node,
        "machine": each.machine,
        "cordoned": each.cordoned,
        "in_force": found is not None and found.holds(time.time()),
        "reason": found.reason if found else "",
        "by": found.by if found else "",
        "since": _stamp(found.since) if found else None,
        "until": _stamp(found.until) if found else None,
    }


def _stamp(moment: float | None) -> str | None:
    return None if moment is None else dt.datetime.fromtimestamp(moment, dt.UTC).isoformat()
