"""What serves the GPUs of a node: the device plugin, or NVIDIA's driver for dynamic resource allocation (DRA). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunodes.ansible.module_utils import devices
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import WrongInput
from gpunodes.planner import gpu_sharing
from gpunodes.planner.gpu_case import Case, version_of

SETTING = "gpunodes_gpu_serving"
_LEAST = "1.34"
_SOURCE = "kubernetes.io, Dynamic Resource Allocation: stable in 1.34"


def serving(settings: Mapping[str, Any]) -> str:
    """``dra``, or "" for the device plugin.

    Raises WrongInput together with a setting for which only the device plugin can serve.
    """
    if settings.get(SETTING) != devices.DRA:
        return ""
    others = {gpu_sharing.SETTING: gpu_sharing.sharing(settings), "gpunodes_burn_in": settings.get("gpunodes_burn_in")}
    if needs := [name for name, value in others.items() if value]:
        raise WrongInput(
            f"{SETTING} is {devices.DRA}, and {needs[0]} needs the device plugin",
            "one of them",
            "remove one of them from this pool",
        )
    return devices.DRA


def labels(settings: Mapping[str, Any]) -> dict[str, str]:
    """The label of the node, by which the driver runs there and the device plugin does not; none for the plugin."""
    found = serving(settings)
    return {devices.SERVING: found} if found else {}


def judge(case: Case) -> None:
    """Refuse DRA on a machine whose Kubernetes or runtime lacks what it needs."""
    if not case.requested.serving:
        return
    version = case.requested.kubernetes_version
    if version and version_of(version)[:2] < version_of(_LEAST):
        case.refuse(
            f"Kubernetes {version} does not serve resource.k8s.io/v1, and {SETTING} is {devices.DRA}",
            f"Kubernetes {_LEAST} or newer ({_SOURCE})",
            f"upgrade the cluster, or set {SETTING} to device-plugin",
        )
    if case.requested.runtime != "containerd":
        case.refuse(
            f"{SETTING} is {devices.DRA}, and cri-dockerd does not pass CDI devices on",
            "containerd",
            f"set {SETTING} to device-plugin for nodes with Docker",
        )
    case.explain("dynamic resource allocation", "requested; the device plugin does not run on the node", _SOURCE)


def conflict(machine: str, settings: Mapping[str, Any]) -> Problem | None:
    """Why a machine of a pool that scales cannot be served so."""
    if not serving(settings):
        return None
    return Problem(
        f"its pool scales, and {SETTING} is {devices.DRA}: no GPUs in ResourceSlices are counted for the autoscaler",
        "the device plugin in pools that scale",
        f"set {SETTING} to device-plugin for {machine}, or take max out of its pool in gpunodes_pools",
    )
