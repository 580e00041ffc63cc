"""Which pods use GPUs of their node: those that leave it before its driver is replaced. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import devices

RUNTIME_CLASS = "nvidia"
"""The RuntimeClass whose containers get GPUs without requesting them."""
_DRIVER = "nvidia.com"
"""The drivers and device classes of NVIDIA's GPUs are gpu.nvidia.com, mig.nvidia.com and compute-domain.nvidia.com.
Source: github.com/kubernetes-sigs/dra-driver-nvidia-gpu, README."""
_ENDED = {"Succeeded", "Failed"}


def uses_gpu(pod: Mapping[str, Any], claims: Sequence[Mapping[str, Any]] | None = None) -> bool:
    """Whether a pod, an object of the API, uses a GPU by a request, its RuntimeClass, a claim, or a device of its host.

    ``claims`` are the ResourceClaims of its namespace. Of a claim that is not among them nobody knows what it is for:
    its pod counts as one that uses a GPU, as do all pods with claims without ``claims``.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    if status.get("phase") in _ENDED:
        return False
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    return (
        spec.get("runtimeClassName") == RUNTIME_CLASS
        or any(map(_requests, containers))
        or any(map(_is_device, spec.get("volumes") or ()))
        or any(_is_for_gpus(name, claims) for name in _claims(spec, status))
    )


def _requests(container: Mapping[str, Any]) -> bool:
    resources = container.get("resources") or {}
    return any(any(devices.counts(resources.get(kind) or {}).values()) for kind in ("limits", "requests"))


def _is_device(volume: Mapping[str, Any]) -> bool:
    """Whether a volume is one of the driver's devices on the machine."""
    return str((volume.get("hostPath") or {}).get("path") or "").startswith("/dev/nvidia")


def _claims(spec: Mapping[str, Any], status: Mapping[str, Any]) -> list[str]:
    """The names of a pod's ResourceClaims, "" for one that is not created yet."""
    made = {each.get("name"): each.get("resourceClaimName") for each in status.get("resourceClaimStatuses") or ()}
    return [
        str(each.get("resourceClaimName") or made.get(each.get("name")) or "")
        for each in spec.get("resourceClaims") or ()
    ]


def _is_for_gpus(name: str, claims: Sequence[Mapping[str, Any]] | None) -> bool:
    claim = next((each for each in claims or () if each["metadata"]["name"] == name), None)
    if claim is None:
        return True
    requests = ((claim.get("spec") or {}).get("devices") or {}).get("requests") or ()
    allocation = (claim.get("status") or {}).get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or ()
    options = [option for request in requests for option in (request, *(request.get("firstAvailable") or ()))]
    # Since v1beta2 the class is in `exactly`; before it was in the request itself.
    classes = [(option.get("exactly") or option).get("deviceClassName") for option in options]
    names = [*classes, *(result.get("driver") for result in results)]
    return any(str(each) == _DRIVER or str(each).endswith(f".{_DRIVER}") for each in names)
