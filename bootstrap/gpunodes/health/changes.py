"""Changes of the states of machines since their last notice. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpunodes.health.model import State, Verdict


@dataclass(frozen=True, slots=True)
class StateChange:
    """A machine whose state is another one than before."""

    before: State
    verdict: Verdict

    @property
    def recovered(self) -> bool:
        return self.verdict.state is State.HEALTHY


def changes(verdicts: Sequence[Verdict], before: Mapping[str, State]) -> list[StateChange]:
    """The machines whose state changed, in the order of ``verdicts``; a machine not in ``before`` was healthy."""
    return [
        StateChange(last, verdict)
        for verdict in verdicts
        if (last := before.get(verdict.name, State.HEALTHY)) is not verdict.state
    ]
