"""What a node offers pods of its GPUs: whole ones, shares of them, or slices, as its device plugin is set up."""

from __future__ import annotations

import re
from collections.abc import Mapping

GPU = "nvidia.com/gpu"
_NAMES = (GPU, "nvidia.com/mig-")
"""How the resources begin: whole GPUs (or shares and slices by their name), nvidia.com/gpu.shared, and slices by their
profile. Source: github.com/NVIDIA/k8s-device-plugin, README, "Shared Access to GPUs" and MIG_STRATEGY."""


def counts(resources: Mapping[str, object]) -> dict[str, int]:
    """By resource, how many of them a node offers, or a container's limits ask for; whole GPUs come first.

    A quantity that no device plugin writes (it is no whole number, or has more than nine digits) is left out.
    """
    found = {name: str(count) for name, count in sorted(resources.items()) if name.startswith(_NAMES)}
    return {name: int(count) for name, count in found.items() if re.fullmatch("[0-9]{1,9}", count)}
