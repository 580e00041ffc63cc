"""The data model of verdicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum


class Action(StrEnum):
    """What to do about a machine, from nothing to a manual repair; ordered by ``rank``."""

    NONE = "none"
    RESTART_APP = "restart_app"
    RESET_GPU = "reset_gpu"
    REBOOT = "reboot"
    REPAIR = "repair"

    @property
    def rank(self) -> int:
        return list(Action).index(self)


class State(StrEnum):
    """The state of a machine; ordered by ``rank``, the worst last."""

    HEALTHY = "healthy"
    OFF = "off"
    """The autoscaler keeps it off, so it does not respond."""
    DEGRADED = "degraded"
    """It works, but something must be restarted, reset or watched."""
    UNKNOWN = "unknown"
    """Too little could be read: the verdict says what to supply."""
    SICK = "sick"
    """A GPU cannot be used."""
    HUNG = "hung"
    """A task is stuck in the NVIDIA driver: only a reboot ends it."""
    UNREACHABLE = "unreachable"

    @property
    def rank(self) -> int:
        return list(State).index(self)


class LineKind(Enum):
    """What a line of a kernel log, or a message of nvidia-smi, reports."""

    XID = "Xid"
    SXID = "SXid"
    HUNG_TASK = "hung task"
    OTHER_HUNG_TASK = "hung task elsewhere"
    SOFT_LOCKUP = "soft lockup"
    CRASH = "crash in the driver"
    OFF_BUS = "fallen off the bus"
    INIT_FAILED = "start-up failure"
    INIT_CAUSE = "cause of a start-up failure"
    NOT_PROBED = "GPU of another driver"
    MISMATCH = "version mismatch"
    GSP_TIMEOUT = "GSP timeout"
    RESET_REQUIRED = "reset required"
    UVM_FATAL = "UVM fatal error"
    AER = "PCIe AER"
    SMI_MESSAGE = "nvidia-smi's message"
    ROW_MISSING = "number without a row in nvidia-smi's table"
    GPU_LISTED = "GPU in nvidia-smi's list"
    GPU_FOUND = "GPU that the kernel found on the PCI bus"
    QUOTED = "a kernel line that a program quotes"
    IMITATED = "a program's message in the kernel's words"


@dataclass(frozen=True, slots=True)
class Time:
    """When a line was written, as far as its header shows."""

    monotonic: float | None = None
    """Seconds since boot."""
    epoch: float | None = None
    """Seconds since 1970. Without a time zone in the header, UTC is assumed; without a year, 1972."""
    dated: bool = True
    """``epoch`` has a year."""
    text: str = ""
    """The time as written."""

    def before(self, other: Time) -> bool:
        """Whether this is certainly earlier; False if the two have no kind of time in common."""
        if self.epoch is not None and other.epoch is not None and self.dated == other.dated:
            return self.epoch < other.epoch
        if self.monotonic is not None and other.monotonic is not None:
            return self.monotonic < other.monotonic
        return False


@dataclass(frozen=True, slots=True)
class LogRecord:
    """Equal lines, counted: one kind, one GPU (its PCI address, or empty), one code and detail."""

    kind: LineKind
    gpu: str = ""
    code: int = 0
    detail: str = ""
    count: int = 1
    first: Time = Time()
    last: Time = Time()
    evidence: tuple[str, ...] = ()
    processes: int = 0
    """The number of different processes in the lines; counted up to `MANY_PROCESSES`."""
    proven: bool = False
    """Of a stuck task: its stack shows that it is in the driver. Otherwise only its name says so."""


MANY_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found, with the log lines as evidence."""

    rule: str
    gpu: str
    action: Action
    state: State
    """The best state that a machine with this finding can be in."""
    count: int = 1
    first: str = ""
    last: str = ""
    evidence: tuple[str, ...] = ()
    source: str = ""
    message: str = ""
    """The meaning and what to do, in one sentence."""
    code: int | None = None
    """The Xid or SXid."""
    hung: bool = False
    """A task is stuck in the driver."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A saved file that a verdict is based on; ``kinds`` is what it was recognised as, empty for nothing."""

    path: str
    kinds: tuple[str, ...] = ()
    problem: str = ""
    """Why it could not be read, unpacked or recognised."""


NOT_RECOGNISED = "not recognised; wanted: a kernel log, a journal, nvidia-smi output, or an archive of them"
"""The problem of a file that says nothing about GPUs."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of one machine, and the reasons."""

    name: str
    source: str
    """``live`` or ``file``."""
    state: State
    action: Action
    hung_in_driver: bool = False
    xids: tuple[int, ...] = ()
    sxids: tuple[int, ...] = ()
    boot_id: str | None = None
    gpus_expected: int | None = None
    gpus_seen: int | None = None
    findings: tuple[Finding, ...] = ()
    files: tuple[SavedFile, ...] = ()
    """The saved files, for the source ``file``."""
    kernel_lines: int = 0
    """The number of kernel lines that were read."""
    wanted: str = ""
    """For the state `UNKNOWN`: why, and what to supply. For the state `OFF`: since when, and why."""


@dataclass(frozen=True, slots=True)
class ScanSummary:
    """A scan, and what the history has about repairs; None where it has nothing about these machines (saved logs)."""

    verdicts: Sequence[Verdict]
    ended: float
    """Seconds since 1970."""
    seconds: float
    """How long it took, with the repairs after it."""
    needs_repair: Collection[str] | None = None
    """The machines that repairs gave up."""
    repairs: Mapping[str, int] | None = None
    """How many repairs ended with each outcome."""


@dataclass(frozen=True, slots=True)
class SiteRules:
    """A site's own actions by code; ``none`` marks a code as harmless."""

    xids: Mapping[int, Action] = field(default_factory=dict)
    sxids: Mapping[int, Action] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a code."""

    kind: str
    """``Xid`` or ``SXid``."""
    code: int
    title: str
    action: Action
    advice: str
    source: str


@dataclass(frozen=True, slots=True)
class RuleText:
    """The description of a rule."""

    name: str
    title: str
    evidence: str
    action: str
    source: str
