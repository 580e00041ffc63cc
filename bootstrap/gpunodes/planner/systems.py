"""Which row of the table of operating systems a machine belongs to, or is treated as. Pure.

The name of an operating system is what the machine reports: it is compared with the table, and never becomes part of an
address or a command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpunodes.planner import tables

Row = Mapping[str, Any]


def known(system: Mapping[str, Any]) -> Row | None:
    """The row of a system (``os`` of host_facts): ``rhel 9`` for 9.4; None if no row knows it."""
    version = str(system.get("version") or "")
    for row in tables.read("systems")["system"]:
        if system.get("id") == row["id"] and (version == row["version"] or version.startswith(row["version"] + ".")):
            found: Row = row
            return found
    return None


def nearest(system: Mapping[str, Any]) -> Row | None:
    """The nearest row of the same family, None if the table has no row of it.

    The family is that of ID, else the first one of ID_LIKE. The code name decides, also that of the system that it
    derives from; else the version: the newest row that is not newer than the machine, else the oldest. A system without
    a version is a rolling release: the newest row.
    """
    words = [str(system.get("id") or ""), *str(system.get("like") or "").split()]
    families = tables.read("systems")["families"]
    named = (name for word in words for name, members in families.items() if word == name or word in members)
    every = tables.read("systems")["system"]
    family = next(named, None) or next((row["family"] for row in every if row["id"] in words), None)
    if family is None:
        return None
    rows = [row for row in every if row["family"] == family]
    # A family's own system stands for those that derive from it: RHEL for Oracle Linux.
    own = words[0] if words[0] in {row["id"] for row in rows} else family
    candidates = sorted((row for row in rows if row["id"] == own), key=lambda row: _numbers(row["version"]))
    names = {system.get("codename"), system.get("base")} - {None, ""}
    by_name = [row for row in candidates if row["codename"] in names]
    version = _numbers(str(system.get("version") or ""))
    older = [row for row in candidates if not version or _numbers(row["version"]) <= version]
    found: Row = (by_name or older or candidates[:1])[-1]
    return found


def treated(facts: Mapping[str, Any], *, unsupported: bool) -> Mapping[str, Any]:
    """The facts; with ``unsupported``, those of a system that no row knows have the nearest row's system instead."""
    system = facts.get("os") or {}
    row = nearest(system) if unsupported and known(system) is None else None
    if row is None:
        return facts
    other = {"id": row["id"], "version": row["version"], "codename": row["codename"] or None, "name": row["title"]}
    return {**facts, "os": other}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
