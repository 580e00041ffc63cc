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
    """What a step needs."""

    SSH = "ssh"
    POWER = "power"


class VerifiedBy(StrEnum):
    """What shows that a step worked."""

    GPU = "gpu"
    BOOT = "boot"


@dataclass(frozen=True, slots=True)
class EscalationStep:
    """One step. ``down_s`` and ``down_hung_s``: seconds within which the machine must go down, or its GPU be reset."""

    name: str
    title: str
    channel: Channel
    verified_by: VerifiedBy
    down_s: float
    down_hung_s: float
    source: str

    def limit(self, *, hung: bool) -> float:
        """Seconds to wait until the machine goes down."""
        return self.down_hung_s if hung else self.down_s


@dataclass(frozen=True, slots=True)
class StartingStep:
    """The step that a repair starts at, and why; ``skipped`` are the steps below it."""

    step: EscalationStep
    why: str
    skipped: Sequence[EscalationStep]


@dataclass(frozen=True, slots=True)
class _Table:
    steps: tuple[EscalationStep, ...]
    starts: dict[str, tuple[str, str]]


@functools.cache
def _table() -> _Table:
    document = tomllib.loads((Path(__file__).parent / "escalation.toml").read_text(encoding="utf-8"))
    steps = tuple(
        EscalationStep(
            **{**row, "channel": Channel(row["channel"]), "verified_by": VerifiedBy(row["verified_by"])}
        )  # the table's keys are the fields
        for row in document["step"]
    )
    return _Table(steps, {row["rule"]: (row["step"], row["why"]) for row in document["start"]})


def steps() -> tuple[EscalationStep, ...]:
    """All steps, the mildest first."""
    return _table().steps


def step(name: str) -> EscalationStep:
    """The step of that name; raises WrongInput."""
    for each in steps():
        if each.name == name:
            return each
    raise WrongInput(f"unknown escalation step {name!r}", f"one of {', '.join(each.name for each in steps())}")


COLD = "cold"
"""The last resort: used once more when a reboot worked but did not make the machine healthy."""
_FIRST = {Action.RESET_GPU: "gpu-reset"}
_FIRST_BOOT = "reboot"


def start(verdict: Verdict, requested: str = "", faults: Collection[str] = ()) -> StartingStep:
    """Where the repair of a machine with this verdict starts.

    ``requested`` is the step that the user named; ``faults`` are known faults that the verdict's findings do not name.
    """
    if requested:
        first, why = requested, "requested by the user"
    else:
        first, why = _FIRST.get(verdict.action, _FIRST_BOOT), f"the verdict's action is {verdict.action.value}"
        for fault in (*(finding.rule for finding in verdict.findings), *faults):
            configured, reason = _table().starts.get(fault, (first, why))
            if _index(configured) > _index(first):
                first, why = configured, reason
    found = step(first)
    return StartingStep(found, why, steps()[: _index(first)])


def next_step(name: str, tried: Collection[str]) -> EscalationStep | None:
    """The next step above ``name`` that was not tried; None at the top."""
    return next((each for each in steps()[_index(name) + 1 :] if each.name not in tried), None)


def armed(name: str, *, hung: bool) -> list[tuple[float, str]]:
    """The steps that the machine performs by itself when step ``name`` fails: seconds from now, and step.

    A machine that hangs during shutdown has no sshd any more, so the following steps are scheduled on it beforehand.
    """
    later, wait = [], step(name).limit(hung=hung)
    for each in steps()[_index(name) + 1 :]:
        if each.channel is Channel.SSH and each.verified_by is VerifiedBy.BOOT:
            later.append((wait, each.name))
            wait += each.limit(hung=hung)
    return later


def _index(name: str) -> int:
    return steps().index(step(name))
