"""The way of one machine: from what a step brought to the step that follows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpunodes.repair import ladder
from gpunodes.repair.record import Outcome, Record, Step

ORDER = (
    Step.LOOK,
    Step.LOCK,
    Step.COLLECT,
    Step.CORDON,
    Step.DRAIN,
    Step.CLIMB,
    Step.VERIFY,
    Step.UNCORDON,
    Step.RELEASE,
    Step.END,
)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that did not leave, and why."""

    name: str
    """namespace/name"""
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class Drained:
    """How far the emptying of a node came within its limit."""

    gone: int = 0
    refused: Sequence[Pod] = ()
    """A disruption budget, or the API, did not let them be evicted."""
    ending: Sequence[Pod] = ()
    """Evicted, and not ended."""
    deleted: Sequence[Pod] = ()
    """Deleted by force, whatever they and their budgets say."""
    alone: Sequence[Pod] = ()
    """Nothing would start them elsewhere: they stay, and the reboot interrupts them."""

    @property
    def empty(self) -> bool:
        return not self.refused and not self.ending


class Climbed(StrEnum):
    """What became of a rung."""

    TOOK = "took"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It could not be tried."""


def named(pods: Sequence[Pod], most: int = 5) -> str:
    """Pods in one line; no more than ``most`` by name."""
    more = f" and {len(pods) - most} more" if len(pods) > most else ""
    return ", ".join(str(pod) for pod in pods[:most]) + more


def drained(record: Record, result: Drained) -> Record:
    """A node that is not empty is rebooted only where it hangs: there nothing would ever end by itself.

    A disruption budget is respected even so, unless the user forces.
    """
    if result.refused:
        hint = "--force-drain" if record.hung and not record.force_drain else "the budgets' owners"
        return record.to(
            Step.UNDO,
            outcome=Outcome.NOT_REPAIRED,
            why=f"these pods may not be evicted: {named(result.refused)}; {hint} can change that",
        )
    if result.ending and not record.hung:
        return record.to(
            Step.UNDO,
            outcome=Outcome.NOT_REPAIRED,
            why=f"these pods did not end in time: {named(result.ending)}; a longer gpunodes_repair_drain_timeout helps",
        )
    return record.to(Step.CLIMB, rung=record.first, asked=0.0)


def climbed(record: Record, result: Climbed, why: str) -> Record:
    """After a rung: the proof, the next rung, or the end of the ladder."""
    tried = (*record.tried, record.rung)
    if result is Climbed.TOOK:
        return record.to(Step.VERIFY, tried=tried)
    return _next(record.to(Step.CLIMB, tried=tried), why)


def verified(record: Record, why: str, boot_id: str = "") -> Record:
    """After the proof: ``why`` is what failed, "" when the machine is well; ``boot_id`` is the boot that was looked at.

    A reboot that took and did not help is not repeated warm; once more cold, and then somebody must come.
    """
    if not why:
        return record.to(Step.UNCORDON, outcome=Outcome.REPAIRED, why="")
    if ladder.rung(record.rung).proof is ladder.Proof.GPU:
        return _next(record, why)
    if ladder.COLD not in record.tried:
        return record.to(Step.CLIMB, rung=ladder.COLD, asked=0.0, boot_id=boot_id, why=why)
    return _give_up(record, why)


def _next(record: Record, why: str) -> Record:
    higher = ladder.above(record.rung, record.tried)
    if higher is None:
        # A cold cycle that could not be made is not why the machine is sick: what the proof said before it is.
        return _give_up(record, record.why or why)
    return record.to(Step.CLIMB, rung=higher.name, asked=0.0)


def _give_up(record: Record, why: str) -> Record:
    return record.to(Step.GIVE_UP, outcome=Outcome.NEEDS_REPAIR, why=why)
