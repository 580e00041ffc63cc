"""Pods as the API has them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gpunodes.ansible.module_utils import devices

KEEP = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "metadata.ownerReferences",
    "metadata.annotations",
    "metadata.deletionTimestamp",
    "spec.runtimeClassName",
    "spec.resourceClaims",
    "spec.containers.resources",
    "spec.initContainers.resources",
    "status.phase",
)
"""The fields of a pod that are requested; the environment of its containers, which may hold secrets, is not."""
_RUNTIME_CLASS = "nvidia"
"""The RuntimeClass by which pods see GPUs without requesting any (page gpu)."""


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
    """It requests GPUs, claims devices (dynamic resource allocation), or runs in the RuntimeClass nvidia."""

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
        mirror="kubernetes.io/config.mirror" in (metadata.get("annotations") or {}),
        finished=(item.get("status") or {}).get("phase") in {"Succeeded", "Failed"},
        ending="deletionTimestamp" in metadata,
        uses_gpus=_uses_gpus(item.get("spec") or {}),
    )


def _uses_gpus(spec: Mapping[str, Any]) -> bool:
    if spec.get("runtimeClassName") == _RUNTIME_CLASS or spec.get("resourceClaims"):
        return True
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    requested = [(each.get("resources") or {}).get("limits") or {} for each in containers]
    return any(count for limits in requested for count in devices.counts(limits).values())


def eviction(pod: Pod) -> dict[str, Any]:
    """The request to evict a pod."""
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid}},
    }
