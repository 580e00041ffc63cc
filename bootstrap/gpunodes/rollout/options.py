"""How a roll-out proceeds: its budget, canaries, windows and waits. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpunodes import shape
from gpunodes.repair import policy
from gpunodes.repair.policy import Budget
from gpunodes.rollout import times
from gpunodes.rollout.times import Window
from gpunodes.shape import Many

MOST_CANARIES = 1000
_ONE = Budget(1)


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """What the user and the settings allow. Durations are in seconds."""

    max_unavailable: Budget = _ONE
    """How many nodes of a pool may be unavailable at once, for whatever reason."""
    canary: int = 0
    """So many workers first; 0 for none."""
    soak_s: float = 0.0
    """How long the canaries must stay healthy before others are begun."""
    windows: tuple[Window, ...] = ()
    """The hours in which a machine may be begun; empty: always."""
    wait_for_jobs_s: float = 0.0
    """How long pods of Jobs may go on before their node is drained."""

    def document(self) -> dict[str, Any]:
        """The options in the roll-out's record."""
        return {
            "max_unavailable": str(self.max_unavailable),
            "canary": self.canary,
            "soak_s": self.soak_s,
            "windows": [str(each) for each in self.windows],
            "wait_for_jobs_s": self.wait_for_jobs_s,
        }


_SHAPE = {
    "max_unavailable": str,
    "canary": int,
    "soak_s": float,
    "windows": Many(str, 100),
    "wait_for_jobs_s": float,
}


def parse(document: Mapping[str, Any]) -> RolloutOptions:
    """The options of a record; raises ValueError for others than ``document`` makes, WrongInput for wrong values."""
    if wrong := shape.wrong(document, _SHAPE):
        raise ValueError(wrong)
    found = RolloutOptions(
        policy.budget(document["max_unavailable"]),
        document["canary"],
        document["soak_s"],
        tuple(times.window(each) for each in document["windows"]),
        document["wait_for_jobs_s"],
    )
    if not 0 <= found.canary <= MOST_CANARIES or found.soak_s < 0 or found.wait_for_jobs_s < 0:
        raise ValueError("its options are out of range")
    return found
