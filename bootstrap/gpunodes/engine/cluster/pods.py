"""Pods as the API has them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gpunodes.ansible.module_utils.cluster import gpu_pods
from gpunodes.engine.cluster.pages import field

_MIRROR = "kubernetes.io/config.mirror"
"""The annotation of a mirror pod, which the kubelet makes for a static pod."""
KEEP = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "metadata.ownerReferences.kind",
    "metadata.ownerReferences.controller",
    field("metadata", "annotations", _MIRROR),
    "metadata.deletionTimestamp",
    "spec.runtimeClassName",
    "spec.resourceClaims.name",
    "spec.resourceClaims.resourceClaimName",
    "spec.containers.resources.limits",
    "spec.containers.resources.requests",
    "spec.initContainers.resources.limits",
    "spec.initContainers.resources.requests",
    "status.phase",
)
"""The fields of a pod that are requested, only those that are used: its user decides how large the others are.

The environment of its containers may hold secrets.
"""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod on a node."""

    namespace: str
    name: str
    uid: str
    owner: str
    """The kind of the Kubernetes controller that owns it, "" for none."""
    mirror: bool
    finished: bool
    ending: bool
    uses_gpus: bool = False
    """It has not ended, and requests GPUs, claims devices, or runs in the RuntimeClass nvidia."""

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def path(self) -> str:
        """Its path in the API."""
        return f"/api/v1/namespaces/{quote(self.namespace, safe='')}/pods/{quote(self.name, safe='')}"


def parse(item: Mapping[str, Any]) -> Pod:
    """The pod of an object of the API."""
    metadata = item["metadata"]
    owners = [owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")]
    return Pod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        owner=owners[0]["kind"] if owners else "",
        mirror=_MIRROR in (metadata.get("annotations") or {}),
        finished=(item.get("status") or {}).get("phase") in {"Succeeded", "Failed"},
        ending="deletionTimestamp" in metadata,
        uses_gpus=gpu_pods.uses_gpu(item),
    )


def is_ready(item: Mapping[str, Any]) -> bool:
    """Whether a pod of the API is ready."""
    conditions = (item.get("status") or {}).get("conditions") or ()
    return any((each.get("type"), each.get("status")) == ("Ready", "True") for each in conditions)


def eviction(pod: Pod) -> dict[str, Any]:
    """The request to evict a pod."""
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid}},
    }
