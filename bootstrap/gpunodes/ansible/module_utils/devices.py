"""GPU resources that a node offers to pods: whole GPUs, shares or slices, depending on its device plugin."""

from __future__ import annotations

import re
from collections.abc import Mapping

GPU = "nvidia.com/gpu"
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
