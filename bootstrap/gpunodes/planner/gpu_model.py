"""The data model of GPU plans: requested software, the GPUs of a machine, and its plan. Frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import ExitCode, exit_code_for
from gpunodes.planner import gpu_sharing

Facts = Mapping[str, Any]


class Flavour(StrEnum):
    """The flavour of NVIDIA's kernel modules."""

    OPEN = "open"
    PROPRIETARY = "proprietary"


class Source(StrEnum):
    """The source of packages."""

    NVIDIA = "nvidia"
    """NVIDIA's CUDA repository."""
    DISTRIBUTION = "distribution"
    """The operating system's own archive."""
    TOOLKIT = "nvidia-container-toolkit"
    """NVIDIA's repository of the container toolkit."""
    EXISTING = "existing"
    """Of a driver only: others installed it, from wherever."""


SOURCES: Mapping[str, str] = {
    Source.NVIDIA: "NVIDIA's repository",
    Source.DISTRIBUTION: "the distribution",
    Source.TOOLKIT: "NVIDIA's repository of the container toolkit",
    Source.EXISTING: "others",
}
"""Their names in messages."""


class Group(StrEnum):
    """The part of the installation that a package belongs to, in the order of installation."""

    HEADERS = "headers"
    DRIVER = "driver"
    FABRIC_MANAGER = "fabric_manager"
    CUDA = "cuda"
    CUDNN = "cudnn"
    TOOLKIT = "toolkit"


@dataclass(frozen=True, slots=True)
class RequestedSoftware:
    """The software requested for a machine. An empty value means: a compatible version."""

    kubernetes_version: str
    """Minor or exact version."""
    driver: str = ""
    """A branch, ``580``, or an exact version, ``580.95.05``."""
    cuda: tuple[str, ...] = ()
    """Versions of the CUDA toolkit on the host: minor ones, ``13.0``, or exact ones, ``13.0.2``."""
    cudnn: str = ""
    """A major version, ``9``, a minor version, ``9.10``, or an exact version, ``9.14.0.64``."""
    runtime: str = "containerd"
    """``containerd`` or ``docker``."""
    source: str = ""
    """``nvidia``, ``distribution`` or ``existing``."""
    gates: Mapping[str, bool] = field(default_factory=dict)
    """Additional feature gates of the kubelet."""
    sharing: str = ""
    """How pods share a GPU, ``time-slicing-4``; empty: they do not."""
    serving: str = ""
    """What serves the GPUs: ``dra``; empty: the device plugin."""
    unsupported_os: bool = False
    """A system that no row knows is treated as the nearest one."""

    @property
    def branch(self) -> str:
        """The branch of the requested driver, "" for any."""
        return self.driver.partition(".")[0]

    @property
    def exact_driver(self) -> str:
        """The exact version of the requested driver, "" if only its branch or nothing is requested."""
        return self.driver if "." in self.driver else ""

    def without_kubernetes(self) -> RequestedSoftware:
        """The same request for a machine that is not a node."""
        return replace(self, kubernetes_version="", gates={}, sharing="", serving="")

    def settings(self) -> dict[str, Any]:
        """The settings for this request; ``requested_of`` parses them."""
        return {
            "gpunodes_driver_branch": self.driver,
            "gpunodes_driver_source": self.source,
            "gpunodes_cuda_versions": list(self.cuda),
            "gpunodes_cudnn_version": self.cudnn,
            "gpunodes_runtime": self.runtime,
            "gpunodes_feature_gates": dict(self.gates),
            gpu_sharing.SETTING: gpu_sharing.setting_of(self.sharing),
            "gpunodes_gpu_serving": self.serving or "device-plugin",
            "gpunodes_unsupported_os": self.unsupported_os,
        }


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU on the PCI bus."""

    address: str
    """Its PCI address, "" for an expected GPU."""
    device: str
    """Its PCI device id, four hexadecimal digits."""
    product: str
    generation: str
    """A generation in the table `drivers`."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package to install."""

    group: Group
    name: str
    version: str
    """A shell pattern (``580.*``) that its version must match; empty: any."""
    same_version_as: str
    """The package with exactly the same upstream version; empty: none."""
    source: Source
    why: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something was chosen, and the source of that fact."""

    choice: str
    why: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What gpunodes installs on a machine. Without a GPU: no package, and it joins as a CPU node."""

    machine: str
    gpus: tuple[Gpu, ...] = ()
    expected: bool = False
    """Whether its GPUs are only expected: in machines that will boot a copy of this machine's disk."""
    generations: tuple[str, ...] = ()
    flavour: Flavour | None = None
    branch: str = ""
    source: Source | None = None
    packages: tuple[Package, ...] = ()
    """In the order of installation."""
    module_stream: str = ""
    """The dnf module stream to enable first; empty: none."""
    hold: tuple[str, ...] = ()
    """Shell patterns of installed packages that upgrades must not touch."""
    blacklist_nouveau: bool = False
    fabric_manager: bool = False
    persistence: bool = False
    runtime: str = "containerd"
    cri_dockerd: bool = False
    """Whether the runtime needs cri-dockerd with this Kubernetes version."""
    gates: Mapping[str, bool] = field(default_factory=dict)
    """Feature gates of the kubelet to set."""
    sharing: str = ""
    """How pods share a GPU, ``time-slicing-4``; empty: they do not."""
    serving: str = ""
    """What serves the GPUs: ``dra``; empty: the device plugin."""
    reboot_needed: str | None = None
    """Why the machine must be rebooted after the installation, or None."""
    labels: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()

    def group(self, group: Group) -> tuple[Package, ...]:
        """The packages of one group."""
        return tuple(package for package in self.packages if package.group is group)


@dataclass(frozen=True, slots=True)
class Planned:
    """The result for one machine: a plan, or conflicts, or why its facts could not be read."""

    name: str
    requested: RequestedSoftware
    plan: Plan | None = None
    conflicts: tuple[Problem, ...] = ()
    unreachable: str = ""
    facts: Facts | None = None


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans of several machines."""

    kubernetes: str
    machines: Sequence[Planned]
    interrupted: bool = False

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        return exit_code_for(sum(machine.plan is None for machine in self.machines), len(self.machines))
