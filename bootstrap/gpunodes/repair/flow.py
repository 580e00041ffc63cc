"""The state machine of a repair: from the result of one stage to the next stage. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpunodes.repair import escalation
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage


@dataclass(frozen=True, slots=True)
class RemainingPod:
    """A pod that remains on the node, and why."""

    name: str
    """namespace/name"""
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class DrainResult:
    """The result of draining a node within its time limit."""

    refused: Sequence[RemainingPod] = ()
    """A disruption budget, or the API, refused their eviction."""
    terminating: Sequence[RemainingPod] = ()
    """Evicted, but not terminated yet."""
    deleted: Sequence[RemainingPod] = ()
    """Deleted by force, regardless of their disruption budgets."""
    unmanaged: Sequence[RemainingPod] = ()
    """They have no controller that would recreate them elsewhere: they stay, and the reboot interrupts them."""

    @property
    def complete(self) -> bool:
        return not self.refused and not self.terminating


class StepOutcome(StrEnum):
    """The outcome of an escalation step."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It could not be attempted."""


def pod_list(pods: Sequence[RemainingPod], most: int = 5) -> str:
    """Pods in one line; no more than ``most`` by name."""
    more = f" and {len(pods) - most} more" if len(pods) > most else ""
    return ", ".join(str(pod) for pod in pods[:most]) + more


def drained(record: RepairRecord, result: DrainResult) -> RepairRecord:
    """A node that is not fully drained is rebooted only if its driver hangs: its pods would never terminate.

    Disruption budgets are respected even then, unless --force-drain is given.
    """
    if result.refused:
        forcible = record.hung and not record.force_drain
        remedy = "use --force-drain" if forcible else "ask the owners of their disruption budgets"
        return record.to(
            Stage.UNDO,
            outcome=RepairOutcome.NOT_REPAIRED,
            why=f"these pods cannot be evicted: {pod_list(result.refused)}; {remedy}",
        )
    if result.terminating and not record.hung:
        return record.to(
            Stage.UNDO,
            outcome=RepairOutcome.NOT_REPAIRED,
            why=f"these pods did not terminate in time: {pod_list(result.terminating)}; "
            "increase gpunodes_repair_drain_timeout",
        )
    return record.to(Stage.ESCALATE, step=record.first_step, ordered_at=0.0)


def escalated(record: RepairRecord, result: StepOutcome, why: str) -> RepairRecord:
    """After an escalation step: verification, the next step, or giving up."""
    tried = (*record.tried, record.step)
    if result is StepOutcome.SUCCEEDED:
        return record.to(Stage.VERIFY, tried=tried)
    return _next(record.to(Stage.ESCALATE, tried=tried), why)


def verified(record: RepairRecord, why: str, boot_id: str = "") -> RepairRecord:
    """After verification: ``why`` is what failed, "" for a healthy machine; ``boot_id`` is the boot that was scanned.

    A reboot that did not fix the machine is followed by one cold cycle, and then by manual repair.
    """
    if not why:
        return record.to(Stage.UNCORDON, outcome=RepairOutcome.REPAIRED, why="")
    if escalation.step(record.step).verified_by is escalation.VerifiedBy.GPU:
        return _next(record, why)
    if escalation.COLD not in record.tried:
        return record.to(Stage.ESCALATE, step=escalation.COLD, ordered_at=0.0, boot_id=boot_id, why=why)
    return _give_up(record, why)


def _next(record: RepairRecord, why: str) -> RepairRecord:
    higher = escalation.next_step(record.step, record.tried)
    if higher is None:
        # If the cold cycle could not be performed, the verification before it tells why the machine is unhealthy.
        return _give_up(record, record.why or why)
    return record.to(Stage.ESCALATE, step=higher.name, ordered_at=0.0)


def _give_up(record: RepairRecord, why: str) -> RepairRecord:
    return record.to(Stage.GIVE_UP, outcome=RepairOutcome.NEEDS_REPAIR, why=why)
