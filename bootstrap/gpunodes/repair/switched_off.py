"""The machines that the autoscaler keeps off, by its ConfigMap: they are not broken. Pure.

A machine that is off has no node. Anyone who may write the ConfigMap may have written it: what is no state is ignored,
and its machine counts as any other.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, TypeVar

from gpunodes import shape
from gpunodes.identity.matcher import Match
from gpunodes.identity.model import MachineIdentity
from gpunodes.model import printable
from gpunodes.shape import Optional, Pattern

CONFIG_MAP = "gpunodes-autoscaler-state"
"""Its name in kube-system; it has the state of each machine under the name of its node."""
_ON_PURPOSE: Mapping[str, str] = {
    "off": "switched off by the autoscaler since",
    "stopping": "the autoscaler is switching it off since",
    "by-hand": "off, and not by the autoscaler, since",
    "starting": "the autoscaler is switching it on since",
    "giving-up": "it did not come into service, and the autoscaler is switching it off since",
    "failed": "it did not come into service, and was switched off by the autoscaler since",
}
"""Phases (autoscale/state.py) in which nobody else may switch a machine, and what they are called."""
_BY_HAND = "by-hand"
_WITH_NODE = frozenset({"stopping", "starting", "giving-up"})
_STATE = {"phase": Pattern("phase", r"[a-z-]{1,20}"), "since": float, "reason": Optional(str)}
_NODE = Pattern("node's name", r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LONGEST = 1 << 20
_SHOWN = 200
_LAST = 253402300799.0
"""The end of the year 9999."""
_Of = TypeVar("_Of")


class _Rank(IntEnum):
    """Why a machine may be the one of a node's name; the lowest comes first."""

    NODE = 0
    INVENTORY = 1
    REPORTED = 2
    CONTRADICTED = 3


@dataclass(frozen=True, slots=True)
class Switched:
    """What the autoscaler did with a machine last; ``since`` is in seconds since 1970."""

    phase: str
    since: float
    reason: str = ""

    @property
    def on_purpose(self) -> bool:
        """Whether the machine is off, or on its way there or back, because the autoscaler or a user wants that."""
        return self.phase in _ON_PURPOSE

    def is_off(self, *, ready: bool | None) -> bool:
        """Whether that still holds where the machine has a node; ``ready``: whether that is, None without a node.

        A node of a machine that is off or failed is newer than the record: the autoscaler deletes it first.
        """
        if ready is None or not self.on_purpose:
            return self.on_purpose
        return self.phase in _WITH_NODE or (self.phase == _BY_HAND and not ready)

    @property
    def described(self) -> str:
        """One sentence for people."""
        return f"off on purpose: {self.why}"

    @property
    def why(self) -> str:
        """Who switched it off, when, and why."""
        what = _ON_PURPOSE.get(self.phase, f"{self.phase} since")
        moment = dt.datetime.fromtimestamp(self.since, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
        reason = f" ({printable(self.reason)[:_SHOWN]})" if self.reason else ""
        return f"{what} {moment}{reason}"


def parse(data: object) -> dict[str, Switched]:
    """The state of each node in the data of the ConfigMap; entries of another form are left out."""
    if not isinstance(data, Mapping):
        return {}
    found = {name: _parsed(text) for name, text in data.items() if not shape.wrong(name, _NODE)}
    return {name: state for name, state in found.items() if state}


def _parsed(text: object) -> Switched | None:
    document: Any = None
    try:
        document = json.loads(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    except (ValueError, RecursionError):
        return None
    if shape.wrong(document, _STATE) or not 0 <= document["since"] <= _LAST:
        return None
    return Switched(document["phase"], float(document["since"]), document.get("reason", ""))


def of_machines(
    switched: Mapping[str, _Of],
    machines: Mapping[str, MachineIdentity],
    matches: Mapping[str, Match] = MappingProxyType({}),
) -> dict[str, _Of]:
    """The state of each machine, by its name; ``matches`` are the machines' matches with the nodes that exist.

    A machine without a node is found by the host name that it reported last, else by its name in the inventory. It can
    report any: the machine whose node has the name comes first, then the one that the inventory calls so, then one that
    no node contradicts. Two machines of one rank have no state.
    """
    names: dict[str, dict[_Rank, list[str]]] = {}
    for name, machine in machines.items():
        match = matches.get(name, Match())
        node = match.node.name if match.node else machine.hostname or name.lower()
        names.setdefault(node, {}).setdefault(_rank(name, node, match), []).append(name)
    best = {node: ranks[min(ranks)] for node, ranks in names.items() if node in switched}
    return {found[0]: switched[node] for node, found in best.items() if len(found) == 1}


def _rank(name: str, node: str, match: Match) -> _Rank:
    if match.node:
        return _Rank.NODE
    if name.lower() == node:
        return _Rank.INVENTORY
    return _Rank.CONTRADICTED if match.contradiction else _Rank.REPORTED
