"""GPU resources that a node offers to pods: whole GPUs, shares or slices, depending on its device plugin."""

from __future__ import annotations

import re
from collections.abc import Mapping

GPU = "nvidia.com/gpu"
SHARING = "gpunodes.dev/sharing"
"""Node label: how pods share the node's GPUs, such as time-slicing-4, by gpunodes_gpu_sharing."""
TIME_SLICING = "time-slicing"
LEAST, MOST = 2, 48
"""Replicas of a GPU. The device plugin v0.19.0 refuses fewer (api/config/v1/replicas.go: "number of replicas must be
>= 2"); MPS, the other way to share one, has 48 clients at most (docs.nvidia.com/deploy/mps): more are of no use."""
SHARING_WANTED = f"empty, or {{mode: {TIME_SLICING}, replicas: 4}} with {LEAST} to {MOST} replicas of each GPU"
_NAMES = (GPU, "nvidia.com/mig-")
"""Prefixes of resource names: nvidia.com/gpu for whole GPUs (or shares and slices under the same name) and
nvidia.com/gpu.shared, nvidia.com/mig- for slices by profile. Source: github.com/NVIDIA/k8s-device-plugin, README,
"Shared Access to GPUs" and MIG_STRATEGY."""


def counts(resources: Mapping[str, object]) -> dict[str, int]:
    """Number of GPU resources that a node offers or a container's limits request, by name; whole GPUs come first.

    A quantity that no device plugin writes (not a whole number, or more than nine digits) is ignored.
    """
    found = {name: str(count) for name, count in sorted(resources.items()) if name.startswith(_NAMES)}
    return {name: int(count) for name, count in found.items() if re.fullmatch("[0-9]{1,9}", count)}


def requested_replicas(value: object) -> int:
    """How many pods get one GPU by this value of gpunodes_gpu_sharing: 1 without sharing, 0 for an invalid value."""
    if not isinstance(value, Mapping):
        return 0
    if not value or value == {"mode": "none"}:
        return 1
    count = value.get("replicas")
    if set(value) != {"mode", "replicas"} or value["mode"] != TIME_SLICING:
        return 0
    return count if isinstance(count, int) and not isinstance(count, bool) and LEAST <= count <= MOST else 0


def replicas(labels: Mapping[str, object]) -> int:
    """How many times a node with these labels offers each of its GPUs, 1 unless gpunodes made pods share them."""
    found = re.fullmatch(f"{TIME_SLICING}-([1-9][0-9]?)", str(labels.get(SHARING, "")))
    return int(found[1]) if found else 1
