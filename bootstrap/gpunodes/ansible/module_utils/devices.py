"""GPU resources that a node offers to pods: whole GPUs, shares or slices, depending on its device plugin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GPU = "nvidia.com/gpu"
PLUGIN = "gpunodes.dev/gpu"
"""Node label that the device plugin follows; it is away while the driver is replaced, or GPUs are sliced."""
COUNT = "gpunodes.dev/gpu-count"
"""Node label: the number of GPUs that the machine had when it joined. A node has both of these labels, or neither."""
SHARING = "gpunodes.dev/sharing"
"""Node label: how pods share the node's GPUs, such as time-slicing-4, by gpunodes_gpu_sharing."""
SERVING = "gpunodes.dev/serving"
"""Node label: what serves the node's GPUs, by gpunodes_gpu_serving; without it the device plugin does."""
DRA = "dra"
"""The value of this label, and of the setting, for dynamic resource allocation."""
MPS = "mps"
MODES = ("time-slicing", MPS)
"""How pods share a GPU: in turns, or at the same time with a part of its memory each (CUDA MPS)."""
MIG = "mig"
"""The third mode: each pod has an instance of a GPU, with memory of its own (Multi-Instance GPU)."""
LEAST, MOST = 2, 48
"""Replicas of a GPU. The device plugin v0.19.0 refuses fewer (api/config/v1/replicas.go: "number of replicas must be
>= 2"); MPS has 48 clients at most (docs.nvidia.com/deploy/mps), and more turns are of no use."""
SHARING_WANTED = (
    f"empty, or {{mode: {MODES[0]}, replicas: 4}} with a mode among {', '.join(MODES)} and {LEAST} to {MOST} replicas, "
    f"or {{mode: {MIG}, profiles: {{1g.10gb: 7}}}} with the instances of each GPU, at most 7"
)
_PROFILE = r"[1-9]g\.[1-9][0-9]{0,2}gb"
"""A MIG profile: compute slices, and memory in GB. Those with media engines or graphics (+me, +gfx) are left out."""
_INSTANCES = 7
"""The most instances of a GPU. Source: NVIDIA MIG User Guide, "Supported MIG Profiles"."""
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


def odd(resources: Mapping[str, object]) -> str:
    """The first GPU resource whose quantity no device plugin writes, such as 1k, which is 1000; "" without any."""
    known = counts(resources)
    return next((name for name in sorted(resources) if name.startswith(_NAMES) and name not in known), "")


def requested_sharing(value: object) -> str | None:
    """The value of the label for this value of gpunodes_gpu_sharing: "" without sharing, None for an invalid value."""
    if not isinstance(value, Mapping):
        return None
    if not value or value == {"mode": "none"}:
        return ""
    if value.get("mode") == MIG:
        return _requested_mig(value)
    count = value.get("replicas")
    if set(value) != {"mode", "replicas"} or value["mode"] not in MODES:
        return None
    if not isinstance(count, int) or isinstance(count, bool) or not LEAST <= count <= MOST:
        return None
    return f"{value['mode']}-{count}"


def _requested_mig(value: Mapping[str, Any]) -> str | None:
    profiles = value.get("profiles")
    if set(value) != {"mode", "profiles"} or not isinstance(profiles, Mapping) or not profiles:
        return None
    if not all(re.fullmatch(_PROFILE, str(name)) and _is_positive(count) for name, count in profiles.items()):
        return None
    # The largest first: the driver then finds a place for each of them.
    ordered = sorted(profiles, key=lambda name: [-int(number) for number in re.findall("[0-9]+", name)])
    found = "".join(f"-{name}-{profiles[name]}" for name in ordered)
    return f"{MIG}{found}" if sum(profiles.values()) <= _INSTANCES else None


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def layout(label: object) -> dict[str, int]:
    """The MIG instances of each GPU by their profile, the largest first, by the value of the label; {} without MIG."""
    if not re.fullmatch(f"{MIG}(-{_PROFILE}-[1-7])+", str(label)):
        return {}
    return {name: int(count) for name, count in re.findall(f"-({_PROFILE})-([1-7])", str(label))}


def replicas(labels: Mapping[str, object]) -> int:
    """How many times a node with these labels offers each of its GPUs, 1 unless gpunodes made pods share them."""
    if instances := layout(labels.get(SHARING, "")):
        return sum(instances.values())
    found = re.fullmatch(f"({'|'.join(MODES)})-([1-9][0-9]?)", str(labels.get(SHARING, "")))
    return int(found[2]) if found else 1


def offered(label: object, gpus: int) -> dict[str, int]:
    """The resources that a node with this value of the label offers for its GPUs.

    Instances of one profile only have the name of GPUs. Source: github.com/NVIDIA/k8s-device-plugin, README,
    MIG_STRATEGY: single and mixed.
    """
    instances = layout(label)
    if len(instances) > 1:
        return {f"{_NAMES[1]}{name}": gpus * count for name, count in instances.items()}
    return {GPU: gpus * replicas({SHARING: label})}
