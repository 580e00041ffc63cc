"""The way of one machine: from what a step brought to the step that follows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpunodes.repair import escalation
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage

ORDER = (
    Stage.SCAN,
    Stage.LOCK,
    Stage.COLLECT,
    Stage.CORDON,
    Stage.DRAIN,
    Stage.ESCALATE,
    Stage.VERIFY,
    Stage.UNCORDON,
    Stage.RELEASE,
    Stage.END,
)


@dataclass(frozen=True, slots=True)
class RemainingPod:
    """A pod that did not leave, and why."""

    name: str
    """namespace/name"""
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class DrainResult:
    """How far the emptying of a node came within its limit."""

    gone: int = 0
    refused: Sequence[RemainingPod] = ()
    """A disruption budget, or the API, did not let them be evicted."""
    ending: Sequence[RemainingPod] = ()
    """Evicted, and not ended."""
    deleted: Sequence[RemainingPod] = ()
    """Deleted by force, whatever they and their budgets say."""
    alone: Sequence[RemainingPod] = ()
    """Nothing would start them elsewhere: they stay, and the reboot interrupts them."""

    @property
    def empty(self) -> bool:
        return not self.refused and not self.ending


class StepOutcome(StrEnum):
    """What became of a rung."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It could not be tried."""


def named(pods: Sequence[RemainingPod], most: int = 5) -> str:
    """Pods in one line; no more than ``most`` by name."""
    more = f" and {len(pods) - most} more" if len(pods) > most else ""
    return ", ".join(str(pod) for pod in pods[:most]) + more


def drained(record: RepairRecord, result: DrainResult) -> RepairRecord:
    """A node that is not empty is rebooted only where it hangs: there nothing would ever end by itself.

    A disruption budget is respected even so, unless the user forces.
    """
    if result.refused:
        hint = "--force-drain" if record.hung and not record.force_drain else "the budgets' owners"
        return record.to(
            Stage.UNDO,
            outcome=RepairOutcome.NOT_REPAIRED,
            why=f"these pods may not be evicted: {named(result.refused)}; {hint} can change that",
        )
    if result.ending and not record.hung:
        return record.to(
            Stage.UNDO,
            outcome=RepairOutcome.NOT_REPAIRED,
            why=f"these pods did not end in time: {named(result.ending)}; a longer gpunodes_repair_drain_timeout helps",
        )
    return record.to(Stage.ESCALATE, step=record.first, asked=0.0)


def escalated(record: RepairRecord, result: StepOutcome, why: str) -> RepairRecord:
    """After a rung: the proof, the next rung, or the end of the ladder."""
    tried = (*record.tried, record.step)
    if result is StepOutcome.SUCCEEDED:
        return record.to(Stage.VERIFY, tried=tried)
    return _next(record.to(Stage.ESCALATE, tried=tried), why)


def verified(record: RepairRecord, why: str, boot_id: str = "") -> RepairRecord:
    """After the proof: ``why`` is what failed, "" when the machine is well; ``boot_id`` is the boot that was looked at.

    A reboot that took and did not help is not repeated warm; once more cold, and then somebody must come.
    """
    if not why:
        return record.to(Stage.UNCORDON, outcome=RepairOutcome.REPAIRED, why="")
    if escalation.step(record.step).proof is escalation.VerifiedBy.GPU:
        return _next(record, why)
    if escalation.COLD not in record.tried:
        return record.to(Stage.ESCALATE, step=escalation.COLD, asked=0.0, boot_id=boot_id, why=why)
    return _give_up(record, why)


def _next(record: RepairRecord, why: str) -> RepairRecord:
    higher = escalation.next_step(record.step, record.tried)
    if higher is None:
        # A cold cycle that could not be made is not why the machine is sick: what the proof said before it is.
        return _give_up(record, record.why or why)
    return record.to(Stage.ESCALATE, step=higher.name, asked=0.0)


def _give_up(record: RepairRecord, why: str) -> RepairRecord:
    return record.to(Stage.GIVE_UP, outcome=RepairOutcome.NEEDS_REPAIR, why=why)
