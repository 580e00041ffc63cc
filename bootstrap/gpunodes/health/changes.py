"""Changes of the states of machines since their last notice. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpunodes.health.model import State, Verdict

FINE = frozenset({State.HEALTHY, State.OFF})
"""The states in which nothing is wrong with a machine, as far as that is known."""


@dataclass(frozen=True, slots=True)
class StateChange:
    """A machine whose state is another one than before."""

    before: State
    verdict: Verdict

    @property
    def recovered(self) -> bool:
        return self.verdict.state is State.HEALTHY


def changes(verdicts: Sequence[Verdict], before: Mapping[str, State]) -> list[StateChange]:
    """The machines whose state changed, in the order of ``verdicts``; a machine not in ``before`` was healthy.

    A machine that is switched off on purpose, or comes back from that healthy, is no news.
    """
    return [
        StateChange(last, verdict)
        for verdict in verdicts
        if (last := before.get(verdict.name, State.HEALTHY)) is not verdict.state and not {last, verdict.state} <= FINE
    ]
