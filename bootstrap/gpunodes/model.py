"""The words that all parts share: machines, phases, findings, events and results. Frozen, standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpunodes.errors import ExitCode


def printable(text: str) -> str:
    """One line without control characters: what a machine reports must not steer the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def printable_lines(text: str) -> str:
    """The same for several lines."""
    return "\n".join(printable(line) for line in text.split("\n"))


class Role(StrEnum):
    """What a machine is for; the names are those of the inventory's groups, in the singular of kubeadm."""

    CONTROL_PLANE = "control_plane"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the inventory."""

    name: str
    address: str
    role: Role


class Only(StrEnum):
    """Which machines alone a phase concerns: the others have nothing to do in it."""

    GPUS = "gpus"
    """Those with GPUs."""
    CUDA = "cuda"
    """Those for which CUDA or cuDNN is wished."""
    DOCKER = "docker"
    """Those whose runtime is Docker."""
    CONTROL_PLANE = "control plane"
    NODES = "nodes"
    """Those that are in the cluster already."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A step of a run. ``name`` is also the Ansible role that does it and its tag."""

    name: str
    title: str
    purpose: str
    only: tuple[Only, ...] = ()


class Severity(StrEnum):
    """An error stops the run; a warning is only said."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """One preflight check that did not pass on one machine."""

    machine: str
    check: str
    fact: str
    limit: str
    remedy: str
    severity: Severity = Severity.ERROR

    def __str__(self) -> str:
        return f"{self.machine}: {self.check}: {self.fact}; wanted: {self.limit}; {self.remedy}"


class Outcome(StrEnum):
    """How a machine, or a task on it, came out."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    SKIPPED = "skipped"

    @property
    def bad(self) -> bool:
        return self in {Outcome.FAILED, Outcome.UNREACHABLE}


@dataclass(frozen=True, slots=True)
class GpuLevel:
    """How one level of the proof of GPUs came out; ``state`` is ok, failed or skipped."""

    level: str
    state: str
    fact: str
    wanted: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class GpuVerification:
    """A machine's GPUs, level by level as far as it went; ``cause`` says why nothing could be looked at."""

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
    """Ansible began a task on a machine; ``phase`` is the role it belongs to ("" outside roles)."""

    machine: str
    phase: str
    task: str


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """Ansible ended a task on a machine. ``result`` is the module's own answer."""

    machine: str
    phase: str
    task: str
    outcome: Outcome
    seconds: float
    result: Mapping[str, Any] = field(default_factory=dict)


Event = TaskStarted | TaskEnded


@dataclass(frozen=True, slots=True)
class MachineResult:
    """How one machine came out of a run; ``phase`` and ``cause`` are set when it failed."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    phase: str = ""
    cause: str = ""
    changes: Sequence[str] = ()
    """Titles of the tasks that changed something."""
    notes: Sequence[str] = ()
    """What a person must know of it, however it came out; modules return such sentences as ``notes``."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a command did."""

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
        if any(finding.severity is Severity.ERROR for finding in self.findings):
            return ExitCode.FAILED
        bad = sum(machine.outcome.bad for machine in self.machines)
        if bad == 0:
            return ExitCode.DONE
        return ExitCode.FAILED if bad == len(self.machines) else ExitCode.PARTLY
