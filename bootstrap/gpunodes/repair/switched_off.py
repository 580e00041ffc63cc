"""The machines that the autoscaler keeps off, by its ConfigMap: they are not broken. Pure.

A machine that is off has no node. Anyone who may write the ConfigMap may have written it: what is no state is ignored,
and its machine counts as any other.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass

from gpunodes import shape
from gpunodes.identity.model import MachineIdentity
from gpunodes.model import printable
from gpunodes.shape import Optional, Pattern

CONFIG_MAP = "gpunodes-autoscaler-state"
"""Its name in kube-system; it has the state of each machine under the name of its node."""
OFF, STOPPING, BY_HAND = "off", "stopping", "by-hand"
_ON_PURPOSE = frozenset({OFF, STOPPING, BY_HAND})
_STATE = {"phase": Pattern("phase", r"[a-z-]{1,20}"), "since": float, "reason": Optional(str)}
_NODE = Pattern("node's name", r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LONGEST = 1 << 20
_SHOWN = 200
_LAST = 253402300799.0
"""The end of the year 9999."""


@dataclass(frozen=True, slots=True)
class Switched:
    """What the autoscaler did with a machine last; ``since`` is in seconds since 1970."""

    phase: str
    since: float
    reason: str = ""

    @property
    def on_purpose(self) -> bool:
        """Whether the machine is off, or on its way there, because nothing needs it or a user wants that."""
        return self.phase in _ON_PURPOSE

    @property
    def described(self) -> str:
        """One sentence for people."""
        return f"off on purpose: {self.why}"

    @property
    def why(self) -> str:
        """Who switched it off, when, and why."""
        what = {
            OFF: "switched off by the autoscaler since",
            STOPPING: "the autoscaler is switching it off since",
            BY_HAND: "switched off by a user, as the autoscaler saw, since",
        }.get(self.phase, f"{self.phase} since")
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
    try:
        document = json.loads(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    except (ValueError, RecursionError):
        return None
    if shape.wrong(document, _STATE) or not 0 <= document["since"] <= _LAST:
        return None
    return Switched(document["phase"], float(document["since"]), document.get("reason", ""))


def of_machines(switched: Mapping[str, Switched], machines: Mapping[str, MachineIdentity]) -> dict[str, Switched]:
    """The state of each machine, by its name: its node is called as the host name that it reported last.

    A machine that never reported one is found by its name in the inventory. Two machines of one node have none.
    """
    names: dict[str, list[str]] = {}
    for name, machine in machines.items():
        names.setdefault(machine.hostname or name.lower(), []).append(name)
    return {found[0]: switched[node] for node, found in names.items() if len(found) == 1 and node in switched}
