"""The kubelet's feature gates: which ones a version has, their values, and which requested gates a kubelet accepts.

A kubelet with an unknown gate exits at every start, so requested gates are checked before anything is changed.
Pure: tables/gates.toml has the gates that matter on GPU nodes from 1.6 on, tables/kubelet_gates.toml all gates of the
kubelets that gpunodes installs.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import WrongInput
from gpunodes.planner import tables


class GateStatus(StrEnum):
    """The maturity of a gate in a version."""

    ABSENT = "absent"
    """Unknown to the kubelet: not yet added, or already removed."""
    ALPHA = "alpha"
    BETA = "beta"
    GA = "ga"


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate in one Kubernetes version."""

    name: str
    status: GateStatus
    default: bool | None
    """None if the gate is absent."""
    locked: bool
    """Whether only the default is accepted."""
    removed_in: str | None
    """The minor version that removed it, if any."""
    set_by_gpunodes: bool | None
    """The value that gpunodes sets; None if it keeps the default, or the gate is absent."""
    why: str
    source: str


def minor_of(version: str) -> str:
    """The minor version (``1.36``) of a version; raises WrongInput for one outside the table."""
    table = tables.read("gates")
    found = re.fullmatch(r"v?(1\.\d+)(\.\d+)?", str(version))
    if not found:
        raise WrongInput(
            f"{version!r} is not a Kubernetes version", f"a version such as {table['newest']} or v1.36.2", "correct it"
        )
    if not _number(table["first"]) <= _number(found[1]) <= _number(table["newest"]):
        raise WrongInput(
            f"gpunodes does not know the feature gates of Kubernetes {version}",
            f"{table['first']} to {table['newest']}",
            "choose one of these versions",
        )
    return found[1]


def gates(version: str) -> list[Gate]:
    """The gates in ``version`` (``1.36``, ``v1.36.2``); raises WrongInput for a version outside the table."""
    return list(_gates(minor_of(version)))


@functools.cache
def _gates(minor: str) -> tuple[Gate, ...]:
    return tuple(_gate(row, minor) for row in tables.read("gates")["gate"])


def needed(version: str) -> dict[str, bool]:
    """The gates that gpunodes itself sets in ``version``: mostly none."""
    return {gate.name: gate.set_by_gpunodes for gate in gates(version) if gate.set_by_gpunodes is not None}


def wanted(version: str, requested: Mapping[str, bool], *, gpus: bool) -> dict[str, bool]:
    """The gates that a kubelet of ``version`` gets: requested ones, and those of gpunodes, none outside the table."""
    try:
        own = needed(version) if gpus else {}
    except WrongInput:
        own = {}
    return {**own, **requested}


def check(version: str, requested: Mapping[str, Any]) -> list[Problem]:
    """The requested gates that the kubelet of ``version`` rejects: unknown, removed, too new, locked, not a boolean."""
    minor = minor_of(version)
    found = []
    for name, value in requested.items():
        if not isinstance(value, bool):
            found.append(
                Problem(f"the feature gate {name} is set to {value!r}", "true or false", "correct the setting")
            )
        elif conflict := _judge(name, value, minor):
            found.append(conflict)
    return found


def _judge(name: str, value: bool, minor: str) -> Problem | None:
    row = next((row for row in tables.read("gates")["gate"] if row["name"] == name), None)
    if row is None:
        return _judge_other(name, minor, value=value)
    gate = _gate(row, minor)
    if gate.status is GateStatus.ABSENT:
        if gate.removed_in and _number(minor) >= _number(gate.removed_in):
            return Problem(
                f"the feature gate {name} was {_removal(row)}",
                _known_gate(minor),
                f"remove it from the settings: {row['instead']}",
            )
        first = row["stages"][0]["from"]
        return Problem(
            f"the feature gate {name} does not exist before Kubernetes {first}",
            _known_gate(minor),
            f"remove it from the settings, or choose Kubernetes {first} or newer",
        )
    if gate.locked and value != gate.default:
        return Problem(
            f"the feature gate {name} is set to {_yaml(value)}",
            f"{_yaml(bool(gate.default))}: it is locked from Kubernetes {_locked_from(row)} on",
            "remove it from the settings",
        )
    return None


def _judge_other(name: str, minor: str, *, value: bool) -> Problem | None:
    """Judge a gate that is not about GPUs; these are known only for the versions that gpunodes installs."""
    table = tables.read("kubelet_gates")
    stages = [stage.split() for stage in table["gates"].get(name, ()) if _number(stage.split()[0]) <= _number(minor)]
    if _number(minor) < _number(table["first"]):
        return Problem(
            f"the feature gate {name} is not about GPUs",
            f"one of `gpunodes gates {minor}`: gpunodes knows other gates only from Kubernetes {table['first']} on",
            "remove it from the settings, or choose a newer Kubernetes version",
        )
    if not stages:
        names = [*(row["name"] for row in tables.read("gates")["gate"]), *table["gates"]]
        near = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {near[0]}?" if near else "remove it from the settings, or check its spelling"
        return Problem(f"the feature gate {name} does not exist in Kubernetes {minor}", _known_gate(minor), remedy)
    since, status, *rest = stages[-1]
    if status == GateStatus.ABSENT:
        fact = f"the feature gate {name} was removed in Kubernetes {since}"
        return Problem(fact, _known_gate(minor), "remove it from the settings")
    if "locked" in rest and value != ("on" in rest):
        return Problem(
            f"the feature gate {name} is set to {_yaml(value)}",
            f"{_yaml('on' in rest)}: it is locked since Kubernetes {since} or earlier",
            "remove it from the settings",
        )
    return None


def _gate(row: Mapping[str, Any], minor: str) -> Gate:
    number = _number(minor)
    removed = row["removed_in"] or None
    stage: Mapping[str, Any] | None = None
    if not (removed and number >= _number(removed)):
        stage = next((stage for stage in reversed(row["stages"]) if _number(stage["from"]) <= number), None)
    own = next((own for own in row["set"] if _number(own["from"]) <= number <= _number(own["last"])), None)
    source = str(tables.read("gates")["sources"][row["source"]])
    return Gate(
        name=row["name"],
        status=GateStatus(stage["status"]) if stage else GateStatus.ABSENT,
        default=stage["default"] if stage else None,
        locked=bool(stage and stage["locked"]),
        removed_in=removed,
        set_by_gpunodes=own["value"] if own else None,
        why=_why(row, minor, stage, own),
        source=source,
    )


def _why(row: Mapping[str, Any], minor: str, stage: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> str:
    if own:
        return f"{row['about']}: {own['why']}"
    if stage is None:
        if row["removed_in"] and _number(minor) >= _number(row["removed_in"]):
            return f"{_removal(row)}: {row['instead']}"
        return f"added in Kubernetes {row['stages'][0]['from']}"
    return f"{row['about']}: {'on' if stage['default'] else 'off'} by default, and not changed"


def _known_gate(minor: str) -> str:
    return f"a gate of Kubernetes {minor}: the kubelet does not start with an unknown one"


def _removal(row: Mapping[str, Any]) -> str:
    by = f" (kubernetes PR {row['removed_by']})" if row["removed_by"] else ""
    return f"removed in Kubernetes {row['removed_in']}{by}"


def _locked_from(row: Mapping[str, Any]) -> str:
    return next(str(stage["from"]) for stage in row["stages"] if stage["locked"])


def _yaml(value: bool) -> str:
    return "true" if value else "false"


def _number(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split("."))
