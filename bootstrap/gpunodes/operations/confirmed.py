"""Whether what a user has confirmed is still so when the command has its locks: a question may be open for hours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes.errors import GpunodesError
from gpunodes.model import Machine
from gpunodes.operations.preflight import Inspection

_KEYS = ("role", "ca_hash", "etcd", "restore")


def check_same(
    machines: Sequence[Machine],
    shown: Inspection | None,
    facts: Mapping[str, Mapping[str, Any]],
    cluster: Mapping[str, Any],
) -> None:
    """Compare machines and their nodes with what was ``shown``, None for nothing; raises GpunodesError for a change.

    What did not respond then or does not now is not compared: the playbook works with what is known now.
    """
    if shown is None:
        return
    changed = [
        each.name
        for each in machines
        if _differ(_machine(shown.facts.get(each.name)), _machine(facts.get(each.name)))
        or _differ(_nodes(each.name, shown.facts, shown.cluster), _nodes(each.name, facts, cluster))
    ]
    if changed:
        raise GpunodesError(
            f"{', '.join(changed)} changed since the question was asked: another command has worked there",
            "machines as they were shown",
            "run the same command again; nothing was changed",
        )


def _differ(before: object, now: object) -> bool:
    return before is not None and now is not None and before != now


def _machine(found: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    if not found:
        return None
    kubernetes = found.get("kubernetes") or {}
    return (found.get("machine_id"), found.get("product_uuid"), *(kubernetes.get(key) for key in _KEYS))


def _nodes(
    name: str, facts: Mapping[str, Mapping[str, Any]], cluster: Mapping[str, Any] | None
) -> list[tuple[str, str]] | None:
    if not cluster:
        return None
    names = {name.lower(), str((facts.get(name) or {}).get("hostname") or name).lower()}
    return sorted((each["name"], str(each.get("uid"))) for each in cluster.get("nodes", ()) if each["name"] in names)
