"""How control planes and kubelets differ from their settings, for people and as a JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpunodes.model import printable
from gpunodes.planner.drift import KUBELET, UPGRADE, MachineDrift
from gpunodes.views import document
from gpunodes.views.text import wrapped

_OF_KUBELETS = {KUBELET, UPGRADE}
_FIRST = 3
"""Kubelets with the same difference that a line names."""


def lines(machines: Sequence[MachineDrift], columns: int | None = None) -> str:
    """A line for each difference, "" without any, and which command applies them; one for equal kubelets."""
    found = []
    kubelets: dict[str, list[str]] = {}
    for each in machines:
        texts = [f"its settings cannot be compared: {each.problem}"] if each.problem else []
        texts += [one.text for one in each.differences if one.kind not in _OF_KUBELETS]
        texts += ["an earlier change of its settings is not verified yet"] if each.unverified else []
        texts += [f"and {each.left_out} more differences"] if each.left_out else []
        found += [f"drift: {each.machine}: {text}" for text in texts]
        for one in each.differences:
            if one.kind in _OF_KUBELETS:
                kubelets.setdefault(one.text, []).append(each.machine)
    found += [f"drift: {_named(names)}: {text}" for text, names in kubelets.items()]
    if any(each.pending for each in machines):
        found.append("`gpunodes rollout apply` applies the control planes' settings")
    if any(one.kind == KUBELET for each in machines for one in each.differences):
        found.append("`gpunodes rollout apply --kubelets` applies the kubelets' settings, one node after another")
    return "\n".join(part for line in found for part in wrapped(printable(line), columns, 4))


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FIRST} more" if len(names) > _FIRST else ""
    return f"{', '.join(names[:_FIRST])}{more}"


def document_of(machines: Sequence[MachineDrift]) -> str:
    """``gpunodes.drift/1``"""
    pending = [each.machine for each in machines if each.pending]
    return document.dump(
        {
            "schema": "gpunodes.drift/1",
            "pending": pending,
            "machines": [dataclasses.asdict(each) for each in machines],
        }
    )
