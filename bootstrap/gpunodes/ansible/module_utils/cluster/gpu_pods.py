"""Which pods use GPUs of their node: those that leave it before its driver is replaced. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .. import devices

RUNTIME_CLASS = "nvidia"
"""The RuntimeClass whose containers get GPUs without requesting them."""
_DRIVER = "nvidia.com"
"""The drivers and device classes of NVIDIA's GPUs are gpu.nvidia.com, mig.nvidia.com and compute-domain.nvidia.com.
Source: github.com/kubernetes-sigs/dra-driver-nvidia-gpu, README."""
_BY_NAME = "deviceclass.resource.kubernetes.io/"
"""How a container requests a device of a DeviceClass by its name, without a claim in its pod.
Source: github.com/kubernetes/api, resource/v1/types.go, ResourceDeviceClassPrefix."""
_ENDED = {"Succeeded", "Failed"}


def requested(pod: Mapping[str, Any]) -> Counter[str]:
    """The GPU resources that a pod occupies by requests, by name, as the scheduler counts them; none after it ended.

    Sidecars run at the same time as the containers, another init container only with the sidecars before it.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    lasting, most = Counter[str](), Counter[str]()
    if status.get("phase") in _ENDED:
        return most
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            lasting += _counts(container)
        else:
            most |= lasting + _counts(container)
    return most | sum(map(_counts, spec.get("containers") or ()), lasting)


def has_request(pod: Mapping[str, Any]) -> bool:
    """Whether a pod occupies GPUs by a request, of a resource or of a DeviceClass by its name; not after it ended."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    return status.get("phase") not in _ENDED and (bool(requested(pod)) or any(map(_requests_by_class, containers)))


def uses_gpu(pod: Mapping[str, Any], claims: Sequence[Mapping[str, Any]] | None = None) -> bool:
    """Whether a pod, an object of the API, uses a GPU by a request, its RuntimeClass, a claim, or a device of its host.

    ``claims`` are the ResourceClaims of its namespace. Of a claim that is not among them nobody knows what it is for:
    its pod counts as one that uses a GPU, as do all pods with claims without ``claims``.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    if status.get("phase") in _ENDED:
        return False
    return (
        spec.get("runtimeClassName") == RUNTIME_CLASS
        or has_request(pod)
        or any(map(_is_device, spec.get("volumes") or ()))
        or any(_is_for_gpus(name, claims) for name in _claims(spec, status))
    )


def _counts(container: Mapping[str, Any]) -> Counter[str]:
    """The GPU resources of a container: its limits and requests are equal, where it has both."""
    resources = container.get("resources") or {}
    return Counter(devices.counts(resources.get("limits") or {})) | Counter(
        devices.counts(resources.get("requests") or {})
    )


def _requests_by_class(container: Mapping[str, Any]) -> bool:
    limits = (container.get("resources") or {}).get("limits") or {}
    return any(name.startswith(_BY_NAME) and _is_nvidia(name[len(_BY_NAME) :]) for name in limits)


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
    return any(_is_nvidia(str(each)) for each in names)


def _is_nvidia(name: str) -> bool:
    """Whether a driver or a DeviceClass is one of NVIDIA's."""
    return name == _DRIVER or name.endswith(f".{_DRIVER}")
