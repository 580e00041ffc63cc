"""The shared data model: machines, phases, findings, events and results. Frozen, standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import ExitCode, exit_code_for


def printable(text: str) -> str:
    """One line without control characters: text from a machine must not control the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def printable_lines(text: str) -> str:
    """The same for several lines."""
    return "\n".join(printable(line) for line in text.split("\n"))


class Role(StrEnum):
    """What a machine is for: a role in the cluster, or GPUs without a cluster."""

    CONTROL_PLANE = "control_plane"
    WORKER = "worker"
    GPU_HOST = "gpu_host"
    """A machine with GPUs that is not, and does not become, a node of a cluster."""
    STORAGE = "storage"
    """A machine that serves shares; it may be a node, too. Only `gpunodes storage` works on it as such."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the inventory."""

    name: str
    address: str
    role: Role


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """The user's kubeconfig for a cluster whose control planes are in no inventory; ``context`` "": its current one."""

    path: Path
    context: str = ""


class Only(StrEnum):
    """The machines that a phase is limited to: it is skipped on all others."""

    GPUS = "gpus"
    """Machines with GPUs."""
    CUDA = "cuda"
    """Machines for which CUDA or cuDNN is requested."""
    DOCKER = "docker"
    """Machines with the runtime Docker."""
    WITH_DOCKER = "with docker"
    """Machines with the runtime Docker, and those on which Docker is installed."""
    CONTROL_PLANE = "control plane"
    """The control plane that creates the cluster, or the one that this run uses."""
    CONTROL_PLANES = "control planes"
    VIRTUAL_ADDRESS = "virtual address"
    """Control planes that share a virtual address."""
    OTHER_CONTROL_PLANES = "other control planes"
    """Control planes that join a cluster, or leave it."""
    BURN_IN = "burn-in"
    """Machines that are burnt in when they join."""
    NODES = "nodes"
    """Machines that are already in the cluster."""
    SCALING = "scaling"
    """Workers, if pools scale."""
    STORAGE = "storage"
    """Machines with gpunodes_storage."""
    REGISTRY = "registry"
    """Machines of a cluster with a registry of `gpunodes registry up`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a run. ``name`` is also the name of its Ansible role and tag."""

    name: str
    title: str
    purpose: str
    only: tuple[Only, ...] = ()


class Severity(StrEnum):
    """An error stops the run; a warning is only reported."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """A failed preflight check of one machine."""

    machine: str
    check: str
    problem: Problem
    severity: Severity = Severity.ERROR

    def __str__(self) -> str:
        warning = "" if self.severity is Severity.ERROR else " (warning)"
        return f"{self.machine}: {self.check}{warning}: {self.problem}"


class Outcome(StrEnum):
    """The outcome of a run on a machine, or of a task."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    SKIPPED = "skipped"

    @property
    def is_failure(self) -> bool:
        return self in {Outcome.FAILED, Outcome.UNREACHABLE}


@dataclass(frozen=True, slots=True)
class GpuLevel:
    """The result of one level of the GPU verification; ``state`` is ok, failed or skipped."""

    level: str
    state: str
    fact: str
    wanted: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {Problem(self.fact, self.wanted, self.remedy)}"


@dataclass(frozen=True, slots=True)
class GpuVerification:
    """The verification of a machine's GPUs by level; ``cause`` is the reason if nothing could be verified."""

    machine: str
    gpus: int
    levels: Sequence[GpuLevel]
    cause: str = ""

    @property
    def failed(self) -> GpuLevel | None:
        """The first level that failed."""
        return next((level for level in self.levels if level.state == "failed"), None)

    @property
    def healthy(self) -> bool:
        return not self.cause and self.failed is None


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """Ansible started a task on a machine; ``phase`` is the task's role ("" outside roles)."""

    machine: str
    phase: str
    task: str


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """Ansible finished a task on a machine. ``result`` is the module's result."""

    machine: str
    phase: str
    task: str
    outcome: Outcome
    seconds: float
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """What the module tells the user; a machine may report anything in its place, which is left out."""
        told = self.result.get("notes")
        return [str(each) for each in told] if isinstance(told, list) else []


Event = TaskStarted | TaskEnded


@dataclass(frozen=True, slots=True)
class MachineResult:
    """The result of a run on one machine; ``phase`` and ``cause`` are set if it failed."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    phase: str = ""
    cause: str = ""
    changes: Sequence[str] = ()
    """Titles of the tasks that changed something."""
    notes: Sequence[str] = ()
    """Messages for the user, whatever the outcome; modules return them as ``notes``."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a command."""

    command: str
    machines: Sequence[MachineResult]
    findings: Sequence[PreflightFinding] = ()
    log: str = ""
    dry_run: bool = False
    interrupted: bool = False

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        failed = {finding.machine for finding in self.findings if finding.severity is Severity.ERROR}
        failed |= {each.name for each in self.machines if each.outcome.is_failure or each.outcome is Outcome.SKIPPED}
        return exit_code_for(len(failed), len(failed.union(each.name for each in self.machines)))


@dataclass(frozen=True, slots=True)
class CertificateEnd:
    """A certificate; ``not_after`` in seconds since 1970, None with a ``problem`` if it cannot be read."""

    name: str
    path: str
    subject: str
    not_after: int | None
    days: int | None
    """Whole days until the end; negative after it."""
    renewal: str
    """``renew`` by `gpunodes certs renew`, ``kubelet`` by itself, ``none``."""
    problem: str


@dataclass(frozen=True, slots=True)
class MachineCertificates:
    """The certificates of a machine, and what to do about those that end soon; ``cause``: why they are unknown."""

    machine: str
    certificates: Sequence[CertificateEnd]
    warnings: Sequence[str]
    cause: str
