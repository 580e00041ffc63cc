"""Nodes as the power server needs them, and what it changes on them. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from gpunodes.ansible.module_utils import devices
from gpunodes.ansible.module_utils.scaling import PROVIDER
from gpunodes.autoscale.plan import NodeShape, PlannedMachine
from gpunodes.autoscale.state import MOST_REST, RESOURCES, SYSTEM_LABELS, SavedNode
from gpunodes.engine.cluster import nodes
from gpunodes.engine.cluster.marks import Patch
from gpunodes.identity.matcher import Matcher
from gpunodes.planner import versions
from gpunodes.planner.node_templates import amount
from gpunodes.repair.policy import Node

KEEP = (*nodes.KEEP, "spec.taints", "spec.providerID", "status.nodeInfo.kubeletVersion")
STARTING = "gpunodes.dev/starting"
"""Taint of a node that has registered, but is not in service yet."""
STOPPING = "gpunodes.dev/stopping"
"""Taint of a node whose machine is about to be switched off: the autoscaler takes its own away when it starts anew."""
MORE_GPUS = "gpunodes.dev/more-gpus"
"""Taint of a node that offers more GPUs than its machine is known to have: root there writes what it offers."""
DISABLED = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
"""Annotation with which the autoscaler leaves a node alone."""
POWER_OFF = "gpunodes.dev/power-off"
"""Annotation with the boot id in which a machine without a BMC shuts itself down (``planner/registration.py``)."""
_MARK = "gpunodes.dev/autoscaler-disabled"
"""Annotation: DISABLED was set by this server, not by a user."""
# What the kubelet, the network add-on, the node controller and the autoscaler write themselves.
_LABELS_OF_OTHERS = ("kubernetes.io/", "beta.kubernetes.io/")
_ANNOTATIONS_OF_OTHERS = (
    "node.alpha.kubernetes.io/",
    "volumes.kubernetes.io/",
    "csi.volume.kubernetes.io/",
    "flannel.alpha.coreos.com/",
    "kubeadm.alpha.kubernetes.io/",
    "cluster-autoscaler.kubernetes.io/",
    "alpha.kubernetes.io/",
    _MARK,
    POWER_OFF,
)
_OWN_TAINTS = (STARTING, STOPPING, MORE_GPUS)
_OF_AUTOSCALER = ("ToBeDeletedByClusterAutoscaler", "DeletionCandidateOfClusterAutoscaler")
"""Taints that the autoscaler itself sets, and takes away again while it runs."""
_TAINTS_OF_OTHERS = ("node.kubernetes.io/", *_OF_AUTOSCALER)
_NETWORK_UP = ("NetworkUnavailable", "False")
"""Type and status of the condition that flannel sets when it has its subnet (pkg/subnet/kube/kube.go)."""
# A node writes its resources itself, and its taints when it registers: with many, it must not fill the states of all.
_MOST_DEVICES = 16
"""Names of GPU resources that count, for MIG has one for each profile, and of other devices and huge pages."""
_LONGEST_NAME, _LONGEST_QUANTITY = 80, 32
_MOST_TAINTS = 2000
"""Bytes of the taints that are saved."""


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A node as the API has it."""

    node: Node
    provider: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    taints: Sequence[Mapping[str, str]]
    resources: Mapping[str, str]
    """Its allocatable resources that pods ask for."""
    kubelet: str = ""
    """The version of its kubelet, such as v1.36.3, "" if it reports none."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """How many GPUs it offers, by resource; all that it reports."""
    odd: str = ""
    """A resource for GPUs whose quantity no device plugin writes, "" without any."""
    network_up: bool = False
    """Whether a network add-on has reported that pods can use its network: a node that registers anew lacks that."""

    @property
    def is_starting(self) -> bool:
        return any(taint["key"] == STARTING for taint in self.taints)

    def saved(self, most: int) -> SavedNode:
        """What is given back to it when it registers anew, as far as a state of ``most`` bytes has room for it."""
        labels = {
            key: text
            for key, text in self.labels.items()
            if key in SYSTEM_LABELS or not key.startswith(_LABELS_OF_OTHERS)
        }
        notes = {key: text for key, text in self.annotations.items() if not key.startswith(_ANNOTATIONS_OF_OTHERS)}
        taints = [dict(each) for each in self.taints if not each["key"].startswith((*_TAINTS_OF_OTHERS, *_OWN_TAINTS))]
        whole = SavedNode(NodeShape(labels, _bounded(taints), dict(self.resources)), notes)
        return whole.fitted(most - MOST_REST)


def seen(item: Mapping[str, Any], pool_label: str) -> SeenNode | None:
    """The node of an object of the API; None for an object that cannot be read."""
    try:
        metadata, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
        taints = [
            {"key": str(each["key"]), "value": str(each.get("value") or ""), "effect": str(each["effect"])}
            for each in spec.get("taints") or ()
        ]
        offered = status.get("allocatable") or {}
        gpus = devices.counts(offered)
        listed = [name for name in gpus if len(name) <= _LONGEST_NAME]
        wanted = {*RESOURCES, *listed[:_MOST_DEVICES], *_others(offered, gpus.keys())[:_MOST_DEVICES]}
        return SeenNode(
            nodes.parse(item, pool_label),
            str(spec.get("providerID") or ""),
            {str(key): str(text) for key, text in (metadata.get("labels") or {}).items()},
            {str(key): str(text) for key, text in (metadata.get("annotations") or {}).items()},
            taints,
            {name: text for name in sorted(wanted) if 0 < len(text := str(offered.get(name, ""))) <= _LONGEST_QUANTITY},
            versions.known((status.get("nodeInfo") or {}).get("kubeletVersion")),
            gpus,
            devices.odd(offered),
            any((each["type"], each["status"]) == _NETWORK_UP for each in status.get("conditions") or ()),
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _others(offered: Mapping[str, Any], gpus: Set[str]) -> list[str]:
    """The names of other resources that pods may request, such as rdma/ib; GPUs that no device plugin writes are none.

    Each node has those of huge pages, mostly with 0.
    """
    return [
        name
        for name in sorted(offered.keys() - gpus - RESOURCES)
        if len(name) <= _LONGEST_NAME and amount(str(offered[name])) > 0 and not devices.odd({name: offered[name]})
    ]


def is_own(found: SeenNode, machine: PlannedMachine) -> bool:
    """Whether a node with the name of a machine was joined for the plan, and its UUID and machine-id may be its own."""
    match = Matcher([found.node.identity]).match(machine.identity)
    return found.provider == PROVIDER + machine.name and not match.contradiction


def may_go(found: SeenNode, machine: PlannedMachine, boot_id: str, *, any_boot: bool) -> bool:
    """Whether a node is what a machine left that is off now; ``boot_id`` is its last known boot, "" for none.

    ``any_boot``: the machine is off for certain, so a boot that began since has ended, too. Then the node's UUID or
    machine-id must be the machine's: another machine of its name may have made it.
    """
    if boot_id in ("", found.node.boot_id):
        return is_own(found, machine)
    rebooted = dataclasses.replace(machine.identity, boot_id=boot_id, responded=True)
    match = Matcher([found.node.identity]).match(rebooted)
    return any_boot and is_own(found, machine) and not match.contradiction


def _bounded(taints: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The taints, or those at both ends of a very long list: kubectl adds at its beginning, gpunodes at its end."""
    last, kept, left = len(taints) - 1, set[int](), _MOST_TAINTS
    for number in (each for first in range(len(taints) // 2 + 1) for each in (first, last - first)):
        if 0 <= number <= last and number not in kept:
            left -= len(json.dumps(taints[number]))
            if left < 0:
                break
            kept.add(number)
    return [each for number, each in enumerate(taints) if number in kept]


def restored(found: SeenNode, saved: SavedNode) -> Patch | None:
    """The patch that gives a node that registered anew what it had before; None if it has all of it."""
    labels = {key: text for key, text in saved.shape.labels.items() if key not in found.labels}
    notes = {key: text for key, text in saved.annotations.items() if key not in found.annotations}
    present = {(taint["key"], taint["effect"]) for taint in found.taints}
    missing = [dict(each) for each in saved.shape.taints if (each["key"], each["effect"]) not in present]
    if not labels and not notes and not missing:
        return None
    patch: Patch = {"metadata": {"labels": labels, "annotations": notes}}
    if missing:
        patch["spec"] = {"taints": [*map(dict, found.taints), *missing]}
    return patch


def stopping(found: SeenNode) -> Patch | None:
    """The patch that keeps new pods off a node that is about to go; None if it has the taint."""
    if any(each["key"] == STOPPING for each in found.taints):
        return None
    return {"spec": {"taints": [*map(dict, found.taints), {"key": STOPPING, "effect": "NoSchedule"}]}}


def stays(found: SeenNode) -> Patch | None:
    """The patch that undoes ``stopping`` and the taints of the autoscaler, which it lifts only when it starts anew."""
    left = [dict(each) for each in found.taints if each["key"] not in (STOPPING, *_OF_AUTOSCALER)]
    return {"spec": {"taints": left}} if len(left) < len(found.taints) else None


def lifted(found: SeenNode, boot_id: str) -> Patch | None:
    """The patch that takes the starting taint away; None in another boot."""
    if found.node.boot_id != boot_id:
        return None
    return {"spec": {"taints": [dict(each) for each in found.taints if each["key"] != STARTING]}}


def kept_on(found: SeenNode, why: str) -> Patch | None:
    """The patch with which the autoscaler leaves a node alone for ``why``, or no longer for ""; None for no change.

    An annotation that a user set stays.
    """
    own, is_set = _MARK in found.annotations, DISABLED in found.annotations
    if why and not is_set:
        return {"metadata": {"annotations": {DISABLED: "true", _MARK: why}}}
    if not why and own:
        return {"metadata": {"annotations": {DISABLED: None, _MARK: None}}}
    return None


def kept_free(found: SeenNode, why: str) -> Patch | None:
    """The patch that keeps new pods off a node for ``why``, or no longer for ""; None for no change."""
    left = [dict(each) for each in found.taints if each["key"] != MORE_GPUS]
    if bool(why) == (len(left) < len(found.taints)):
        return None
    return {"spec": {"taints": [*left, *([{"key": MORE_GPUS, "effect": "NoSchedule"}] if why else [])]}}


def given_back(found: SeenNode) -> Patch | None:
    """The patch that takes away what nobody lifts without an autoscaler and this server; None if nothing is there.

    Their taints, the order to shut down, and the mark of ``kept_on``; an annotation that a user set stays.
    """
    left = [dict(each) for each in found.taints if each["key"] not in (*_OWN_TAINTS, *_OF_AUTOSCALER)]
    own = (DISABLED, _MARK, POWER_OFF) if _MARK in found.annotations else (POWER_OFF,)
    notes = dict.fromkeys(key for key in own if key in found.annotations)
    patch: Patch = {"metadata": {"annotations": notes}} if notes else {}
    if len(left) < len(found.taints):
        patch["spec"] = {"taints": left}
    return patch or None


def too_many(found: SeenNode, known: Sequence[Mapping[str, str]]) -> str:
    """How a node offers more GPUs than any of the ``known`` resources have, "" if it does not, or none are known."""
    counts = [devices.counts(each) for each in known]
    if found.odd:
        # Only for root there: a name of the node's own choice is not repeated.
        return "it offers a number of GPUs that no device plugin writes"
    for name, count in found.gpus.items():
        most = max((each.get(name, 0) for each in counts), default=count)
        if count > most:
            return (
                f"it offers {count} {name[:_LONGEST_NAME]}, and {most} are known: it gets no pods; if its machine has "
                "so many, run `gpunodes autoscale up`"
            )
    return ""


def not_in_service(found: SeenNode, expected: Mapping[str, str], *, network: bool = False) -> str:
    """Why a node that registered is not in service yet, "" if it is; ``expected`` are the resources it had before.

    ``network``: its network add-on reports when it is up. A kubelet is ready before: the add-on's files of the last
    boot are there, and the sandboxes of pods fail.
    """
    if not found.node.ready:
        return "its kubelet is not ready"
    if network and not found.network_up:
        return "its network add-on is not up"
    offered = devices.counts(found.resources)
    for name, count in devices.counts(expected).items():
        if offered.get(name, 0) < count:
            return f"it offers {offered.get(name, 0)} of {count} {name}"
    labelled = (found.node.labelled or 0) * found.node.replicas
    if sum(offered.values()) < labelled:
        return f"it offers {sum(offered.values())} of {labelled} GPUs"
    return ""
