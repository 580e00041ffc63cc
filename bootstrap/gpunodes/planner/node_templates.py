"""What a pod would see of the next node of a pool, from the settings and from the nodes that it had. Pure.

Root on a node decides what that one reports: alone, it must not decide what is expected of all others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

_MARK = "gpunodes.dev/needs-repair"
"""The start of the names of labels and taints that are of one machine's repair."""
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(m|[kMGTPE]|[KMGTPE]i)?")
_UNITS = {
    "m": 1e-3,
    **{unit: 1000.0**power for power, unit in enumerate(("", "k", "M", "G", "T", "P", "E"))},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}


NOTHING: Mapping[str, Any] = MappingProxyType({"labels": {}, "taints": ()})
"""A template of nothing."""


def template(
    seen: Sequence[Mapping[str, Any]], given: Mapping[str, Any], earlier: Mapping[str, Any] = NOTHING
) -> dict[str, Any]:
    """Labels, taints and capacity of the next node.

    ``seen`` has those of each node that is known, ``given`` those of the settings. Labels and taints are those of the
    settings, and those that more than half of the nodes have; if exactly half of them have one, it counts if
    ``earlier``, a template that was made before, has it. Of each resource that at least half of the nodes offer, it is
    the median of what they offer; machines without any resource count as unknown.
    """
    known = [each for each in seen if each["capacity"]]
    taints = [_taint(each) for each in given["taints"]]
    usual = _taints_of_most([each["taints"] for each in known], earlier["taints"])
    return {
        "labels": {**_labels_of_most([each["labels"] for each in known], earlier["labels"]), **given["labels"]},
        "taints": [*taints, *(each for each in usual if each not in taints)],
        "capacity": _capacity([each["capacity"] for each in known]),
    }


def keys_of_most(seen: Sequence[Mapping[str, str]]) -> set[str]:
    """The labels that more than half have, with whatever value."""
    counts = Counter(key for labels in seen for key in labels)
    return {key for key, count in counts.items() if 2 * count > len(seen)}


def _labels_of_most(seen: Sequence[Mapping[str, str]], earlier: Mapping[str, str]) -> dict[str, str]:
    """The labels that more than half have with the same value, but those of repairs; ``earlier`` decides a tie."""
    counts = Counter(each for labels in seen for each in labels.items() if not each[0].startswith(_MARK))
    return {key: text for (key, text), count in counts.items() if 2 * count + (earlier.get(key) == text) > len(seen)}


def _taints_of_most(
    seen: Sequence[Sequence[Mapping[str, Any]]], earlier: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """The taints that more than half have, but those of repairs; ``earlier`` decides a tie."""
    # A node may have a taint twice.
    lists = [dict.fromkeys(tuple(_taint(each).items()) for each in taints) for taints in seen]
    counts = Counter(taint for taints in lists for taint in taints)
    before = {tuple(_taint(each).items()) for each in earlier}
    most = [dict(taint) for taint, count in counts.items() if 2 * count + (taint in before) > len(seen)]
    return [each for each in most if not each["key"].startswith(_MARK)]


def labels_in_common(seen: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The labels that all have with the same value, but those of repairs."""
    if not seen:
        return {}
    first, *others = seen
    return {
        key: text
        for key, text in first.items()
        if not key.startswith(_MARK) and all(each.get(key) == text for each in others)
    }


def taints_in_common(seen: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, str]]:
    """The taints that all have, but those of repairs."""
    if not seen:
        return []
    first, *others = ([_taint(each) for each in taints] for taints in seen)
    return [each for each in first if not each["key"].startswith(_MARK) and all(each in other for other in others)]


def _taint(taint: Mapping[str, Any]) -> dict[str, str]:
    return {"key": str(taint["key"]), "value": str(taint.get("value") or ""), "effect": str(taint["effect"])}


def _capacity(seen: Sequence[Mapping[str, str]]) -> dict[str, str]:
    found = {}
    for name in sorted({name for each in seen for name in each}):
        offered = sorted((text for each in seen if amount(text := each.get(name, "")) > 0), key=amount)
        if 2 * len(offered) >= len(seen):
            found[name] = offered[(len(offered) - 1) // 2]
    return found


def amount(text: str) -> float:
    """The number that a quantity of Kubernetes is, 0 for any other text."""
    found = _QUANTITY.fullmatch(text)
    return float(found[1]) * _UNITS[found[2] or ""] if found else 0.0
