"""Escalation: its steps, the step a repair starts at, and the one that follows. They are data in escalation.toml."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpunodes.errors import WrongInput
from gpunodes.health.model import Action, Verdict


class Channel(StrEnum):
    """What a rung needs."""

    SSH = "ssh"
    POWER = "power"


class VerifiedBy(StrEnum):
    """What shows that a rung took."""

    GPU = "gpu"
    BOOT = "boot"


@dataclass(frozen=True, slots=True)
class EscalationStep:
    """One means of repair. ``gone`` and ``gone_hung``: seconds within which it must be seen to work."""

    name: str
    title: str
    over: Channel
    proof: VerifiedBy
    gone: float
    gone_hung: float
    source: str

    def limit(self, *, hung: bool) -> float:
        """Seconds to wait until the machine goes down."""
        return self.gone_hung if hung else self.gone


@dataclass(frozen=True, slots=True)
class StartingStep:
    """The rung that a repair starts at, and why; ``skipped`` are the rungs below it."""

    step: EscalationStep
    why: str
    skipped: Sequence[EscalationStep]


@dataclass(frozen=True, slots=True)
class _Table:
    steps: tuple[EscalationStep, ...]
    starts: dict[str, tuple[str, str]]


@functools.cache
def _table() -> _Table:
    read = tomllib.loads((Path(__file__).parent / "escalation.toml").read_text(encoding="utf-8"))
    steps = tuple(
        EscalationStep(
            **{**row, "over": Channel(row["over"]), "proof": VerifiedBy(row["proof"])}
        )  # the table's keys are the fields
        for row in read["step"]
    )
    return _Table(steps, {row["rule"]: (row["step"], row["why"]) for row in read["start"]})


def steps() -> tuple[EscalationStep, ...]:
    """All rungs, the mildest first."""
    return _table().steps


def step(name: str) -> EscalationStep:
    """The rung of that name; raises WrongInput."""
    for each in steps():
        if each.name == name:
            return each
    raise WrongInput(f"there is no rung {name!r}", f"one of {', '.join(each.name for each in steps())}")


COLD = "cold"
"""The last resort: it is climbed to once more when a rung took and did not help."""
_FIRST = {Action.RESET_GPU: "gpu-reset"}
_FIRST_BOOT = "reboot"


def start(verdict: Verdict, asked: str = "", faults: Collection[str] = ()) -> StartingStep:
    """Where the repair of a machine with this verdict starts.

    ``asked`` is the rung that the user named, ``faults`` what is known beside the verdict's findings.
    """
    if asked:
        first, why = asked, "as asked"
    else:
        first, why = _FIRST.get(verdict.action, _FIRST_BOOT), f"the verdict asks for {verdict.action.value}"
        for fault in (*(finding.rule for finding in verdict.findings), *faults):
            named, reason = _table().starts.get(fault, (first, why))
            if _index(named) > _index(first):
                first, why = named, reason
    found = step(first)
    return StartingStep(found, why, steps()[: _index(first)])


def next_step(name: str, tried: Collection[str]) -> EscalationStep | None:
    """The next rung above ``name`` that was not tried; None at the top."""
    return next((each for each in steps()[_index(name) + 1 :] if each.name not in tried), None)


def armed(name: str, *, hung: bool) -> list[tuple[float, str]]:
    """The rungs that the machine itself climbs when the rung ``name`` does not end it: seconds from now, and rung.

    A machine that hangs in its shutdown has no sshd any more: what shall happen then is left with it before.
    """
    later, wait = [], step(name).limit(hung=hung)
    for each in steps()[_index(name) + 1 :]:
        if each.over is Channel.SSH and each.proof is VerifiedBy.BOOT:
            later.append((wait, each.name))
            wait += each.limit(hung=hung)
    return later


def _index(name: str) -> int:
    return steps().index(step(name))
