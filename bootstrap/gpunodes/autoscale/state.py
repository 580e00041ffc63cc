"""What the power server remembers of each machine: one JSON text for each, in a ConfigMap. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpunodes import shape
from gpunodes.ansible.module_utils import devices
from gpunodes.autoscale.plan import TEMPLATE, NodeShape, node_shape
from gpunodes.model import printable
from gpunodes.planner import versions
from gpunodes.shape import Maybe, Named, Optional, one_of

_MAX_TEXT = 200
"""Bytes of a reason or an error that are kept."""
MOST_REST = 2 * _MAX_TEXT + 200
"""Bytes of a state without what is saved of its node."""
_MOST_NAMES = 500
RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage", "pods"})
"""Resources that each node offers."""
_OS, _ARCHITECTURE = "kubernetes.io/os", "kubernetes.io/arch"
SYSTEM_LABELS = {
    name: text
    for prefix in ("", "beta.")
    for name, text in ((f"{prefix}{_OS}", "linux"), (f"{prefix}{_ARCHITECTURE}", "amd64"))
}
"""Labels of the kubelet by which pods, those of DaemonSets above all, select nodes; their values if none are known."""


class Phase(StrEnum):
    """What the power server does with a machine."""

    OFF = "off"
    """It is off because nothing needs it; it has no node."""
    STARTING = "starting"
    """It was switched on; its node is not in service yet."""
    ON = "on"
    """Its node is in service."""
    STOPPING = "stopping"
    """Its node is drained; it is shut down, and its node is deleted afterwards."""
    GIVING_UP = "giving-up"
    """It did not come into service, or its BMC refused; it is switched off, and until then not used."""
    FAILED = "failed"
    """It was given up, and is off; ``since`` then. It is tried again later."""
    BY_HAND = "by-hand"
    """Someone else switched it off: it stays off until someone switches it on."""
    LEFT_ALONE = "left-alone"
    """Someone else switched it on: nothing is done to it until its node is ready, or it is off."""


class Kubelet(StrEnum):
    """What the network shows of a machine's kubelet."""

    RUNS = "runs"
    DOWN = "down"
    """The machine refuses connections to its kubelet's port: its system runs, and its kubelet does not."""
    SILENT = "silent"
    """Nothing responds: it is off, not in its network, or behind a firewall."""


@dataclass(frozen=True, slots=True)
class SavedNode:
    """What a node loses when it is deleted while its machine is off."""

    shape: NodeShape
    annotations: Mapping[str, str]

    def fitted(self, most: int) -> SavedNode:
        """What of it fits into ``most`` bytes: taints, GPUs and ``RESOURCES`` always, then gpunodes' names first.

        Then NVIDIA's names, and other resources. A node may write any number of labels and annotations to itself, and
        all states are in one ConfigMap.
        """
        always = {*RESOURCES, *devices.counts(self.shape.capacity)}
        capacity = {name: text for name, text in self.shape.capacity.items() if name in always}
        others = {name: text for name, text in self.shape.capacity.items() if name not in always}
        left = most - len(_json([*self.shape.taints, capacity]))
        entries = [
            *((_rank("nvidia.com/"), len(_json([name, text])), "resource", name) for name, text in others.items()),
            *((_rank(key), len(_json([key, text])), "label", key) for key, text in self.shape.labels.items()),
            *((_rank(key), len(_json([key, text])), "note", key) for key, text in self.annotations.items()),
        ]
        kept: set[tuple[str, str]] = set()
        for _, size, kind, key in sorted(entries):
            if size <= left and len(kept) < _MOST_NAMES:
                kept.add((kind, key))
                left -= size
        labels = {key: text for key, text in self.shape.labels.items() if ("label", key) in kept}
        notes = {key: text for key, text in self.annotations.items() if ("note", key) in kept}
        capacity |= {name: text for name, text in others.items() if ("resource", name) in kept}
        return SavedNode(NodeShape(labels, self.shape.taints, capacity), notes)


def _rank(key: str) -> int:
    if key in SYSTEM_LABELS:
        return 0
    prefixes = ("gpunodes.dev/", "nvidia.com/")
    return next((number for number, prefix in enumerate(prefixes) if key.startswith(prefix)), len(prefixes))


@dataclass(frozen=True, slots=True)
class MachineState:
    """Times are seconds since 1970."""

    phase: Phase
    since: float
    reason: str = ""
    error: str = ""
    """What went wrong last, "" while nothing did."""
    used: float = 0.0
    """When it was last in service, or switched on; 0 if never."""
    saved: SavedNode | None = None
    served: float = 0.0
    """When its node was last known to be in service, 0 if never: its kubelet had a valid certificate then."""
    needs_join: bool = False
    """Its certificate has probably ended: it is not switched on until its node registers again."""
    kubelet: str = ""
    """The version of its kubelet as its node reported it last, "" if it never did."""

    def text(self) -> str:
        """As it is stored."""
        saved = None
        if self.saved:
            saved = {**self.saved.shape.document(), "annotations": dict(self.saved.annotations)}
        return _json({
            "phase": self.phase.value,
            "since": round(self.since),
            "reason": _cut(self.reason),
            "error": _cut(self.error),
            "used": round(self.used),
            "served": round(self.served),
            "needs_join": self.needs_join,
            "kubelet": self.kubelet,
            "saved": saved,
        })  # fmt: skip


def _json(value: Any) -> str:
    """ASCII: each character is a byte."""
    return json.dumps(value, separators=(",", ":"))


def _cut(text: str) -> str:
    text = printable(text)[:_MAX_TEXT]
    while len(_json(text)) > _MAX_TEXT:
        text = text[:-1]
    return text


_SHAPE = {
    "phase": one_of(*Phase),
    "since": float,
    "reason": str,
    "error": str,
    "used": float,
    # Those of an earlier release do not have them.
    "served": Optional(float),
    "needs_join": Optional(bool),
    "kubelet": Optional(str),
    "saved": Maybe({**TEMPLATE, "annotations": Named(str, 1000)}),
}


def parse(text: str) -> MachineState | None:
    """The state in a text; None for a text that is none: then the machine counts as not yet known."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if shape.wrong(document, _SHAPE):
        return None
    saved = document["saved"]
    return MachineState(
        Phase(document["phase"]),
        float(document["since"]),
        document["reason"],
        document["error"],
        float(document["used"]),
        SavedNode(node_shape(saved), saved["annotations"]) if saved else None,
        float(document.get("served", document["used"])),
        document.get("needs_join", False),
        versions.known(document.get("kubelet")),
    )
