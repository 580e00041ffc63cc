"""The result of a command that rolls something out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpunodes.errors import ExitCode
from gpunodes.rollout.record import RolloutOutcome


@dataclass(frozen=True, slots=True)
class MachineRollout:
    """The result for one machine. ``outcome`` is None if it was not begun, or not ended."""

    machine: str
    outcome: RolloutOutcome | None
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The result of a roll-out, or of a part of it: an unfinished one can be resumed."""

    id: str
    work: str
    machines: Sequence[MachineRollout]
    finished: bool = True
    """Nothing of it is left to resume in the cluster."""
    stopped: str = ""
    """Why it stopped before its end."""
    interrupted: bool = False
    then: str = ""
    """The work that follows, whose record stands in the cluster now; "" if nothing does."""

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        good = all(each.outcome is not None and each.outcome.good for each in self.machines)
        return ExitCode.DONE if good and self.finished else ExitCode.PARTLY
