"""What the stages of the repair of one machine work with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpunodes.engine import history, records
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.fleet import ControlsMachine
from gpunodes.engine.history import EntryKind
from gpunodes.engine.scans import MachineScan
from gpunodes.errors import GpunodesError
from gpunodes.operations.machine_lock import MachineLock
from gpunodes.repair.record import RepairRecord


class Stopped(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The command was interrupted; the repair can be resumed."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long things may take, in seconds."""

    drain: float = 300.0
    drain_hung: float = 30.0
    boot: float = 900.0
    verify: float = 300.0
    settle: float = 10.0
    poll: float = 2.0


def time_limits(settings: Mapping[str, Any]) -> TimeLimits:
    """The limits of the settings."""
    return TimeLimits(
        drain=settings["gpunodes_repair_drain_timeout"],
        drain_hung=settings["gpunodes_repair_drain_timeout_hung"],
        boot=settings["gpunodes_repair_boot_timeout"],
        verify=settings["gpunodes_repair_verify_timeout"],
        settle=settings["gpunodes_repair_settle"],
    )


@dataclass(frozen=True, slots=True)
class Tools:
    """The machine, its node's cluster, the locks and the outputs of one repair."""

    machine: str
    control: ControlsMachine
    lock: MachineLock
    scan: Callable[[], MachineScan]
    """Scan the machine now."""
    report: Callable[[str], None]
    limits: TimeLimits
    now: Callable[[], float]
    """The time of the cluster's annotations and of records, seconds since 1970: that of the control plane."""
    cluster: Cluster | None = None
    """None with --without-cluster."""
    facts: Mapping[str, Any] | None = None
    """The probe's facts before the repair."""
    stop: threading.Event = field(default_factory=threading.Event)

    def check_stop(self) -> None:
        """Raise Stopped if the command was interrupted."""
        if self.stop.is_set():
            raise Stopped("interrupted")

    def save(self, record: RepairRecord) -> None:
        """Write the record before an action; raises Lost if another command holds, or may hold, the lock."""
        records.write(record)
        self.lock.confirm(record)

    def note(
        self,
        record: RepairRecord,
        kind: EntryKind,
        what: str,
        outcome: str = "",
        detail: str = "",
        seconds: float = 0.0,
    ) -> None:
        """Add an entry to the machine's history."""
        history.note(record.machine, record.cluster, kind, what, outcome, detail, seconds=seconds, repair=record.id)

    def note_beginning(self, record: RepairRecord) -> None:
        """Add why and when the repair began, unless the history has an entry of it.

        Another controller may have begun it: the loop guard counts by its start, which the annotation of the node has.
        """
        if not self._noted(record):
            history.note(
                record.machine,
                record.cluster,
                EntryKind.VERDICT,
                record.action,
                detail=record.reason,
                moment=record.started,
                repair=record.id,
            )

    def note_end(self, record: RepairRecord, outcome: str) -> None:
        """Add the end, unless the history has it: a command that was killed may have released the lock already."""
        if EntryKind.END not in self._noted(record):
            self.note(record, EntryKind.END, "repair", outcome, record.why, self.now() - record.started)

    @staticmethod
    def _noted(record: RepairRecord) -> list[EntryKind]:
        """The kinds of the entries of the repair in the machine's history."""
        return [entry.kind for entry in history.read(record.machine, record.cluster) if entry.repair == record.id]
