"""Nodes as the API has them. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from gpunodes.ansible.module_utils import devices
from gpunodes.engine.cluster import marks
from gpunodes.repair.maintenance import Maintenance
from gpunodes.repair.policy import Node, pool_of

KEEP = (
    "metadata.name",
    "metadata.uid",
    "metadata.labels",
    "metadata.annotations",
    "metadata.managedFields.manager",
    "metadata.managedFields.fieldsV1.f:spec.f:unschedulable",
    "spec.unschedulable",
    "status.conditions",
    "status.addresses",
    "status.capacity",
    "status.allocatable",
    "status.nodeInfo.bootID",
    "status.nodeInfo.machineID",
    "status.nodeInfo.systemUUID",
)
"""The fields of a node that are requested."""
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"


def path(name: str) -> str:
    """A node's path in the API."""
    return f"/api/v1/nodes/{quote(name, safe='')}"


def parse(item: Mapping[str, Any], pool_label: str) -> Node:
    """The node of an object of the API, in the pool that the label ``pool_label`` names.

    An invalid Node object counts as in maintenance, so that it is skipped and does not stop a repair.
    """
    try:
        return _parse(item, pool_label)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        metadata = item["metadata"]
        why = Maintenance("its Node object cannot be parsed: see `kubectl describe node`")
        control_plane = _CONTROL_PLANE in (metadata.get("labels") or {})
        return Node(metadata["name"], ready=False, control_plane=control_plane, maintenance=why)


def _parse(item: Mapping[str, Any], pool_label: str) -> Node:
    metadata, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    # A removed device plugin leaves the name of its resource behind, with zero devices.
    capacity, labelled = _devices(status.get("capacity") or {}), _number(labels.get(devices.COUNT))
    # GPUs in ResourceSlices are not allocatable: a repair verifies them on the machine.
    by_claims = labels.get(devices.SERVING) == devices.DRA
    info = status.get("nodeInfo") or {}
    conditions = [entry for entry in status.get("conditions", ()) if entry["type"] == "Ready"]
    return Node(
        name=metadata["name"],
        addresses=tuple(entry["address"] for entry in status.get("addresses", ())),
        ready=[entry["status"] for entry in conditions] == ["True"],
        changed=max((_moment(entry.get("lastTransitionTime")) for entry in conditions), default=0.0),
        boot_id=info.get("bootID", ""),
        machine_id=info.get("machineID", ""),
        system_uuid=info.get("systemUUID", ""),
        control_plane=_CONTROL_PLANE in labels,
        pool=pool_of(labels.get(pool_label, ""), gpus=bool(labelled) or capacity is not None),
        cordoned=bool(spec.get("unschedulable")),
        cordoned_by_repair=marks.cordoned_by(item),
        cordon_lifted=marks.cordon_lifted(item),
        cordoned_again=marks.cordoned_again(item),
        rollout=annotations.get(marks.ROLLOUT, ""),
        cordoned_by_rollout=marks.ROLLOUT_CORDON in annotations,
        rolled_out=annotations.get(marks.ROLLED_OUT, ""),
        maintenance=marks.maintenance_of(item),
        needs_repair=annotations.get(marks.NEEDS_REPAIR, ""),
        repairs=tuple(marks.repairs_of(item)),
        capacity=None if by_claims else capacity,
        allocatable=None if by_claims else _devices(status.get("allocatable") or {}),
        labelled=None if by_claims else labelled,
        replicas=devices.replicas(labels),
    )


def _devices(resources: Mapping[str, object]) -> int | None:
    """The number of GPUs, or slices of GPUs, that a node offers under any resource name; None without a resource."""
    found = devices.counts(resources)
    return sum(found.values()) if found else None


def _moment(text: object) -> float:
    """A time of the API in seconds since 1970; 0 for a missing or invalid one."""
    try:
        return dt.datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _number(text: object) -> int | None:
    """A quantity of whole devices; None for a missing or invalid quantity."""
    return int(str(text)) if text is not None and str(text).isdigit() else None
