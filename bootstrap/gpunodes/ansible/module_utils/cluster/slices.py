"""GPUs that NVIDIA's driver for dynamic resource allocation (DRA) offers: in ResourceSlices, by their node.

Drivers and users write these objects: what does not have the expected form is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .. import devices
from ..kube_api import NOT_FOUND, ApiError, Client

DRIVER = "gpu.nvidia.com"
"""The driver, and the DeviceClass of whole GPUs. Source: github.com/kubernetes-sigs/dra-driver-nvidia-gpu, README."""
API = "/apis/resource.k8s.io/v1"
"""Stable since Kubernetes 1.34."""


def is_served(node: Mapping[str, Any]) -> bool:
    """Whether gpunodes lets this driver serve the node's GPUs."""
    return bool((node["metadata"].get("labels") or {}).get(devices.SERVING) == devices.DRA)


def offered(client: Client, node: str = "") -> dict[str, set[str]]:
    """The GPUs by node, or those of one node; each is named ``POOL/DEVICE``."""
    selector = f"spec.driver={DRIVER}" + (f",spec.nodeName={node}" if node else "")
    return by_node(_listed(client, "resourceslices", fieldSelector=selector) or ())


def by_node(found: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """The GPUs in these slices by node; of each pool only the newest generation counts, as for the scheduler."""
    specs = [
        spec for each in found if (spec := each.get("spec") or {}).get("driver") == DRIVER and spec.get("nodeName")
    ]
    newest: dict[tuple[str, str], int] = {}
    for spec in specs:
        key, generation = _key(spec), _generation(spec)
        newest[key] = max(newest.get(key, generation), generation)
    gpus: dict[str, set[str]] = {}
    for spec in specs:
        if _generation(spec) == newest[_key(spec)]:
            pool = _key(spec)[1]
            names = {f"{pool}/{each.get('name')}" for each in spec.get("devices") or () if _is_gpu(each)}
            gpus.setdefault(str(spec["nodeName"]), set()).update(names)
    return gpus


def claims(client: Client, namespace: str) -> list[dict[str, Any]] | None:
    """The claims of a namespace; None if the API server does not serve them in this version."""
    return _listed(client, f"namespaces/{namespace}/resourceclaims")


def _listed(client: Client, path: str, **query: str) -> list[dict[str, Any]] | None:
    """A node's label must not fail every command in a cluster before 1.34."""
    try:
        found: list[dict[str, Any]] = client.get(f"{API}/{path}", **query)["items"]
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        return None
    return found


def allocated(client: Client) -> set[str]:
    """The devices of this driver that are allocated to a claim, as ``POOL/DEVICE``."""
    found = set()
    for claim in _listed(client, "resourceclaims") or ():
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or ():
            if result.get("driver") == DRIVER:
                found.add(f"{result.get('pool')}/{result.get('device')}")
    return found


def claim_template(name: str) -> dict[str, Any]:
    """A template of claims to one GPU."""
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER, "count": 1}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "gpunodes"}},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def _key(spec: Mapping[str, Any]) -> tuple[str, str]:
    return str(spec.get("nodeName")), str((spec.get("pool") or {}).get("name"))


def _generation(spec: Mapping[str, Any]) -> int:
    found = (spec.get("pool") or {}).get("generation")
    return found if isinstance(found, int) else 0


def _is_gpu(device: Mapping[str, Any]) -> bool:
    """Whether a device is a whole GPU."""
    kind = (device.get("attributes") or {}).get("type") or (device.get("attributes") or {}).get(f"{DRIVER}/type") or {}
    return bool(kind.get("string") == "gpu")
