"""The ladder: its rungs, where a repair starts on it, and which rung comes next. The rungs are data in ladder.toml."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpunodes.errors import WrongInput
from gpunodes.health.model import Action, Verdict


class Over(StrEnum):
    """What a rung needs."""

    SSH = "ssh"
    POWER = "power"


class Proof(StrEnum):
    """What shows that a rung took."""

    GPU = "gpu"
    BOOT = "boot"


@dataclass(frozen=True, slots=True)
class Rung:
    """One means of repair. ``gone`` and ``gone_hung``: seconds within which it must be seen to work."""

    name: str
    title: str
    over: Over
    proof: Proof
    gone: float
    gone_hung: float
    source: str

    def limit(self, *, hung: bool) -> float:
        """Seconds to wait until the machine goes down."""
        return self.gone_hung if hung else self.gone


@dataclass(frozen=True, slots=True)
class Start:
    """The rung that a repair starts at, and why; ``skipped`` are the rungs below it."""

    rung: Rung
    why: str
    skipped: Sequence[Rung]


@dataclass(frozen=True, slots=True)
class _Table:
    rungs: tuple[Rung, ...]
    starts: dict[str, tuple[str, str]]


@functools.cache
def _table() -> _Table:
    read = tomllib.loads((Path(__file__).parent / "ladder.toml").read_text(encoding="utf-8"))
    rungs = tuple(
        Rung(**{**row, "over": Over(row["over"]), "proof": Proof(row["proof"])})  # the table's keys are the fields
        for row in read["rung"]
    )
    return _Table(rungs, {row["rule"]: (row["rung"], row["why"]) for row in read["start"]})


def rungs() -> tuple[Rung, ...]:
    """All rungs, the mildest first."""
    return _table().rungs


def rung(name: str) -> Rung:
    """The rung of that name; raises WrongInput."""
    for each in rungs():
        if each.name == name:
            return each
    raise WrongInput(f"there is no rung {name!r}", f"one of {', '.join(each.name for each in rungs())}")


COLD = "cold"
"""The last resort: it is climbed to once more when a rung took and did not help."""
_FIRST = {Action.RESET_GPU: "gpu-reset"}
_FIRST_BOOT = "reboot"


def start(verdict: Verdict, asked: str = "", faults: Collection[str] = ()) -> Start:
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
    found = rung(first)
    return Start(found, why, rungs()[: _index(first)])


def above(name: str, tried: Collection[str]) -> Rung | None:
    """The next rung above ``name`` that was not tried; None at the top."""
    return next((each for each in rungs()[_index(name) + 1 :] if each.name not in tried), None)


def armed(name: str, *, hung: bool) -> list[tuple[float, str]]:
    """The rungs that the machine itself climbs when the rung ``name`` does not end it: seconds from now, and rung.

    A machine that hangs in its shutdown has no sshd any more: what shall happen then is left with it before.
    """
    later, wait = [], rung(name).limit(hung=hung)
    for each in rungs()[_index(name) + 1 :]:
        if each.over is Over.SSH and each.proof is Proof.BOOT:
            later.append((wait, each.name))
            wait += each.limit(hung=hung)
    return later


def _index(name: str) -> int:
    return rungs().index(rung(name))
