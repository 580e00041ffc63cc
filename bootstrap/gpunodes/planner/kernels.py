"""Which kernels a machine may get: those for which its driver builds. And which packages upgrades leave alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpunodes.planner import tables
from gpunodes.planner.gpu_case import Case, cite, installed_driver
from gpunodes.planner.gpu_installed import installed_from
from gpunodes.planner.gpu_model import Facts, RequestedSoftware
from gpunodes.planner.gpu_offers import unbuilt_for

OWN_PACKAGES = (
    *("kubelet", "kubeadm", "kubectl", "cri-tools", "kubernetes-cni", "cri-dockerd"),
    *("containerd", "containerd.io", "docker.io", "docker-ce", "docker-ce-*", "docker-buildx-plugin"),
    *("cuda-*", "libcudnn*", "cudnn*"),
)
"""Shell patterns of the packages that gpunodes installs, besides the driver's: other commands upgrade them."""


def refused(facts: Facts, releases: Iterable[str]) -> dict[str, str]:
    """The kernels for which the machine's installed driver does not build, with the reason and its source.

    Nothing for machines without GPUs or without a driver from packages. Whether an unknown kernel builds is not known
    here: DKMS decides before the machine boots it.
    """
    case = Case("", facts, RequestedSoftware(""))
    installed = installed_from(case)
    _, branch, flavour = installed or (None, "", None)
    if not case.gpus or flavour is None:
        return {}
    version = installed_driver(case.gpu.get("driver") or {})
    rows = {release: unbuilt_for(case, branch, flavour, release) for release in releases}
    return {
        release: f"the {flavour} modules of driver {version} do not build for it: {row['why']} ({cite('drivers', row)})"
        for release, row in rows.items()
        if row
    }


def has_built_driver(facts: Facts) -> bool:
    """Whether a machine has GPUs and a driver whose modules must exist for each kernel that it boots."""
    case = Case("", facts, RequestedSoftware(""))
    return bool(case.gpus) and bool(installed_driver(case.gpu.get("driver") or {}))


def kept_packages() -> list[str]:
    """Shell patterns of the packages that upgrades of the operating system leave alone: those of gpunodes."""
    held = [pattern for offer in tables.read("drivers")["offer"] for pattern in offer["hold"]]
    toolkit = tables.read("toolkit")["packages"]["names"]
    return list(dict.fromkeys([*OWN_PACKAGES, *held, *toolkit]))
