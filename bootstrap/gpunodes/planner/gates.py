"""The kubelet's feature gates: which there are in a version, what they are set to, and which wishes a kubelet takes.

A kubelet that is told of a gate it does not know ends at once, again and again; so wishes are judged before anything is
touched. Pure: tables/gates.toml holds the gates that matter on GPU nodes from 1.6 on, tables/kubelet_gates.toml all
that the kubelets know which we install.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpunodes.errors import WrongInput
from gpunodes.planner import tables


class GateStatus(StrEnum):
    """How ripe a gate is in a version."""

    ABSENT = "absent"
    """The kubelet does not know it: not yet, or no more."""
    ALPHA = "alpha"
    BETA = "beta"
    GA = "ga"


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate in one Kubernetes version."""

    name: str
    status: GateStatus
    default: bool | None
    """None where it is absent."""
    locked: bool
    """Whether it can be set to its default only."""
    removed_in: str | None
    """The minor in which it went, if it went at all."""
    we_set: bool | None
    """What gpunodes sets it to; None where its default is right, or it is absent."""
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """What cannot be: the fact, the limit it breaks, what to do."""

    fact: str
    limit: str
    remedy: str


def minor_of(version: str) -> str:
    """The minor (``1.36``) of a version; raises WrongInput for one that the table does not reach."""
    table = tables.read("gates")
    found = re.fullmatch(r"v?(1\.\d+)(\.\d+)?", str(version))
    if not found:
        raise WrongInput(
            f"{version!r} is not a Kubernetes version", f"one such as {table['newest']} or v1.36.2", "correct it"
        )
    if not _number(table["first"]) <= _number(found[1]) <= _number(table["newest"]):
        raise WrongInput(
            f"the gates of Kubernetes {version} are not known here",
            f"{table['first']} to {table['newest']}",
            "choose one of these",
        )
    return found[1]


def gates(version: str) -> list[Gate]:
    """The gates as they are in ``version`` (``1.36``, ``v1.36.2``); raises WrongInput for one not in the table."""
    return list(_gates(minor_of(version)))


@functools.cache
def _gates(minor: str) -> tuple[Gate, ...]:
    return tuple(_gate(row, minor) for row in tables.read("gates")["gate"])


def needed(version: str) -> dict[str, bool]:
    """What gpunodes itself sets in ``version``: mostly nothing."""
    return {gate.name: gate.we_set for gate in gates(version) if gate.we_set is not None}


def check(version: str, requested: Mapping[str, Any]) -> list[Conflict]:
    """Every wish that the kubelet of ``version`` would not take: unknown, gone, not there yet, locked, no boolean."""
    minor = minor_of(version)
    found = []
    for name, value in requested.items():
        if not isinstance(value, bool):
            found.append(
                Conflict(f"the feature gate {name} is wished to be {value!r}", "true or false", "correct the wish")
            )
        elif conflict := _judge(name, value, minor):
            found.append(conflict)
    return found


def _judge(name: str, value: bool, minor: str) -> Conflict | None:
    row = next((row for row in tables.read("gates")["gate"] if row["name"] == name), None)
    if row is None:
        return _other(name, minor, value=value)
    gate = _gate(row, minor)
    if gate.status is GateStatus.ABSENT:
        if gate.removed_in and _number(minor) >= _number(gate.removed_in):
            return Conflict(
                f"the feature gate {name} is {_went(row)}",
                f"a gate that the kubelet of {minor} knows: this one would stop it",
                f"take it out: {row['instead']}",
            )
        first = row["stages"][0]["from"]
        return Conflict(
            f"the feature gate {name} comes with Kubernetes {first}",
            f"a gate that the kubelet of {minor} knows: this one would stop it",
            f"take it out, or choose Kubernetes {first} or newer",
        )
    if gate.locked and value != gate.default:
        return Conflict(
            f"the feature gate {name} is wished to be {_word(value)}",
            f"{_word(bool(gate.default))}: it is locked from Kubernetes {_locked_from(row)} on",
            "take the wish out",
        )
    return None


def _other(name: str, minor: str, *, value: bool) -> Conflict | None:
    """Judge a gate that has nothing to do with GPUs: those are known for the minors that we install."""
    table = tables.read("kubelet_gates")
    stages = [stage.split() for stage in table["gates"].get(name, ()) if _number(stage.split()[0]) <= _number(minor)]
    knows = f"a gate that the kubelet of {minor} knows: this one would stop it"
    if _number(minor) < _number(table["first"]):
        return Conflict(
            f"the feature gate {name} has nothing to do with GPUs",
            f"one of `gpunodes gates {minor}`: others are known from Kubernetes {table['first']} on",
            "take the wish out, or choose a newer Kubernetes",
        )
    if not stages:
        names = [*(row["name"] for row in tables.read("gates")["gate"]), *table["gates"]]
        near = difflib.get_close_matches(name, names, n=1)
        remedy = f"is {near[0]} meant?" if near else "take it out, or check its spelling"
        return Conflict(f"the feature gate {name} is not known in Kubernetes {minor}", knows, remedy)
    since, status, *rest = stages[-1]
    if status == GateStatus.ABSENT:
        return Conflict(f"the feature gate {name} is gone since Kubernetes {since}", knows, "take it out")
    if "locked" in rest and value != ("on" in rest):
        return Conflict(
            f"the feature gate {name} is wished to be {_word(value)}",
            f"{_word('on' in rest)}: it is locked from Kubernetes {since} on, or longer",
            "take the wish out",
        )
    return None


def _gate(row: Mapping[str, Any], minor: str) -> Gate:
    number = _number(minor)
    removed = row["removed_in"] or None
    stage: Mapping[str, Any] | None = None
    if not (removed and number >= _number(removed)):
        stage = next((stage for stage in reversed(row["stages"]) if _number(stage["from"]) <= number), None)
    ours = next((ours for ours in row["set"] if _number(ours["from"]) <= number <= _number(ours["last"])), None)
    source = str(tables.read("gates")["sources"][row["source"]])
    return Gate(
        name=row["name"],
        status=GateStatus(stage["status"]) if stage else GateStatus.ABSENT,
        default=stage["default"] if stage else None,
        locked=bool(stage and stage["locked"]),
        removed_in=removed,
        we_set=ours["value"] if ours else None,
        why=_why(row, minor, stage, ours),
        source=source,
    )


def _why(row: Mapping[str, Any], minor: str, stage: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> str:
    if ours:
        return f"{row['about']}: {ours['why']}"
    if stage is None:
        if row["removed_in"] and _number(minor) >= _number(row["removed_in"]):
            return f"{_went(row)}: {row['instead']}"
        return f"comes with {row['stages'][0]['from']}"
    return f"{row['about']}: {'its default is right' if stage['default'] else 'off by default, and left so'}"


def _went(row: Mapping[str, Any]) -> str:
    by = f" (kubernetes PR {row['removed_by']})" if row["removed_by"] else ""
    return f"gone since Kubernetes {row['removed_in']}{by}"


def _locked_from(row: Mapping[str, Any]) -> str:
    return next(str(stage["from"]) for stage in row["stages"] if stage["locked"])


def _word(value: bool) -> str:
    return "true" if value else "false"


def _number(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split("."))
