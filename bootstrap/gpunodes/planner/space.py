"""Free space: what the plan of a machine still needs, by file system. Pure; the sizes are in the table `space`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpunodes.ansible.module_utils.host.spec import data_folders
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import Role
from gpunodes.planner import gpu, tables
from gpunodes.planner.gpu_case import installed_driver
from gpunodes.planner.gpu_model import Group

_PREBUILT = ("linux-modules-nvidia", "kmod-nvidia")
"""Packages with modules that are built already."""

PATHS = {
    "usr": "/usr",
    "cache": "/var/cache",
    "lib": "/var/lib",
    "boot": "/boot",
    "tmp": "/tmp",  # noqa: S108 - its free space is compared, nothing is written
}
"""The folder of each file system in the table, except that of the container runtime and the kubelet's."""
_DATA = ("images", "kubelet")
"""What gpunodes_data_directory moves."""


@dataclass(frozen=True, slots=True)
class Need:
    """What needs space, where, and how much in MiB."""

    title: str
    path: str
    mib: int
    is_data: bool = False
    """Whether gpunodes_data_directory moves it."""


def problems(
    facts: Mapping[str, Any], role: Role, plan: gpu.Plan, requested: gpu.RequestedSoftware
) -> Iterator[Problem]:
    """One problem for each file system that has less free space than the machine's software needs."""
    where = {disk["path"]: disk for disk in facts["disks"]}
    by_device: dict[int, list[Need]] = {}
    for need in needs(facts, role, plan, requested):
        if disk := _disk(need.path, where):
            by_device.setdefault(disk["device"], []).append(need)
    disks = {disk["device"]: disk for disk in reversed(facts["disks"])}
    for device, found in by_device.items():
        disk = disks[device]
        total = sum(need.mib for need in found)
        if disk["free_mib"] < total:
            parts = ", ".join(f"{need.mib} for {need.title}" for need in found)
            # A disk that is mounted on a folder of its own is no place to leave.
            moves = any(need.is_data and disk["mount"] != need.path for need in found)
            can_move = moves and not facts["data_directory"]["path"]
            other = "; or set gpunodes_data_directory to a directory on a larger disk" if can_move else ""
            yield Problem(
                f"{disk['free_mib']} MiB are free on {disk['mount']}",
                f"at least {total} MiB: {parts}",
                f"free some space there, or enlarge it{other}",
            )


def _disk(path: str, disks: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The file system of a path: that of the nearest parent of which it is known."""
    while path not in disks and path != "/":
        path = path.rpartition("/")[0] or "/"
    return disks.get(path)


def needs(facts: Mapping[str, Any], role: Role, plan: gpu.Plan, requested: gpu.RequestedSoftware) -> list[Need]:
    """What is not installed yet, in the order of the table; CUDA once for each version."""
    counts = {**_node(facts, role, requested), **_gpu(facts, plan, requested)}
    folders = data_folders(requested.runtime)
    own = {
        "images": folders["docker" if requested.runtime == "docker" else "containerd"],
        "kubelet": folders["kubelet"],
    }
    directory = facts["data_directory"]["path"]
    paths = {**PATHS, **(dict.fromkeys(_DATA, directory) if directory else own)}
    return [
        Need(row["title"], paths[row["where"]], row["mib"] * counts[row["for"]], row["where"] in _DATA)
        for row in tables.read("space")["space"]
        if counts.get(row["for"])
    ]


def _node(facts: Mapping[str, Any], role: Role, requested: gpu.RequestedSoftware) -> dict[str, int]:
    """How often the machine needs each row of the node's own software.

    Images are pulled as soon as the packages are installed: a machine with Kubernetes' packages has them, and a node
    in a cluster has used the space that its first pods need.
    """

    def absent(*names: str) -> bool:
        return not any(facts["packages"].get(name) for name in names)

    node = role is not Role.GPU_HOST
    kubernetes = node and (absent("kubelet") or absent("kubeadm"))
    joined = bool(facts["kubernetes"]["role"])
    docker = requested.runtime == "docker"
    return {
        "kubernetes": int(kubernetes),
        # Docker needs it, too.
        "containerd": int((node or docker) and absent("containerd", "containerd.io")),
        "docker": int(docker and absent("docker.io", "docker-ce")),
        "images": int(kubernetes),
        "control_plane": int(role is Role.CONTROL_PLANE and not joined),
        "pods": int(node and not joined),
    }


def _gpu(facts: Mapping[str, Any], plan: gpu.Plan, requested: gpu.RequestedSoftware) -> dict[str, int]:
    """The same for the software of GPUs. An installed driver that does not meet the request is replaced."""
    if not plan.gpus:
        return {}
    found = facts.get("gpu") or {}
    driver = bool(plan.group(Group.DRIVER)) and not _installed(found.get("driver") or {}, plan.branch)
    prebuilt = any(package.name.startswith(_PREBUILT) for package in plan.packages)
    present = set(found.get("cuda") or ())
    cudas = [version for version in dict.fromkeys(requested.cuda) if version not in present]
    return {
        "device_plugin": int(not facts["kubernetes"]["role"]),
        "dra": int(bool(plan.serving) and not facts["kubernetes"]["role"]),
        "driver": int(driver),
        "headers": int(driver and not prebuilt and not (found.get("headers") or {}).get("running")),
        "build": int(driver and not prebuilt),
        "toolkit": int(bool(plan.group(Group.TOOLKIT)) and not found.get("toolkit")),
        "cuda": len(cudas) if plan.group(Group.CUDA) else 0,
        "cudnn": int(bool(plan.group(Group.CUDNN)) and not found.get("cudnn")),
    }


def _installed(driver: Mapping[str, Any], branch: str) -> bool:
    """Whether the driver of the plan is installed from packages."""
    return bool(driver.get("packages")) and installed_driver(driver).partition(".")[0] == branch
