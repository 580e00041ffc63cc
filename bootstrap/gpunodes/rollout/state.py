"""The record of the cluster's one roll-out: what is rolled out to which machines, how, and how far it is. Pure.

It is the text of an annotation of the Lease ``gpunodes-rollout``. Its content comes back from the cluster, so it is
data: the name of a work leads to a known class, which checks its parameters again; machines must be in the inventory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpunodes import shape
from gpunodes.errors import WrongInput
from gpunodes.rollout import options as rollout_options
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.record import NAME, RolloutOutcome
from gpunodes.shape import Many, Moment, Named, Optional, one_of

MOST_BYTES = 200_000
"""The longest record: all annotations of an object have at most 256 KiB (Kubernetes, TotalAnnotationSizeLimitB)."""
_MOST = 20_000
_LONGEST_WHY = 300
ADDONS = "add-ons"
"""The last part of an upgrade of Kubernetes: not a work, since no machine is worked on."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A machine on which the roll-out ended otherwise than well, and why."""

    outcome: RolloutOutcome
    why: str


@dataclass(frozen=True, slots=True)
class Following:
    """What is rolled out next, by the same command, if a roll-out ends well."""

    work: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    machines: Sequence[str] = ()
    """None for ADDONS."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A roll-out. Each of its machines is in one of ``waiting``, ``running``, ``done`` and ``ended``."""

    id: str
    work: str
    """The name of the work, as in operations/rolling/works.py."""
    parameters: Mapping[str, str]
    """What the work's class needs to make it again."""
    options: RolloutOptions
    started: float
    """Seconds since 1970, by the control plane's clock."""
    by: str
    """user@host"""
    waiting: Sequence[str] = ()
    running: Sequence[str] = ()
    done: Sequence[str] = ()
    canaries: Sequence[str] = ()
    """The workers that were done first."""
    ended: Mapping[str, Ended] = field(default_factory=dict)
    soak_since: float = 0.0
    """When the canaries were done; 0 before that."""
    soaked: bool = False
    """The canaries stayed healthy: the others may be begun."""
    stopped: str = ""
    """Why no further machine is begun, "" while it goes on."""
    then: Sequence[Following] = ()
    """What follows, in order."""

    @property
    def machines(self) -> list[str]:
        """All of its machines."""
        return [*self.done, *self.running, *self.ended, *self.waiting]

    def begun(self, machine: str) -> Rollout:
        """The work begins on a machine."""
        return dataclasses.replace(
            self,
            waiting=[name for name in self.waiting if name != machine],
            running=[*self.running, machine],
        )

    def with_end(self, machine: str, outcome: RolloutOutcome, why: str, *, canary: bool = False) -> Rollout:
        """The work ended on a machine, or it is not begun; ``canary``: it was one of the first."""
        left = dataclasses.replace(
            self,
            waiting=[name for name in self.waiting if name != machine],
            running=[name for name in self.running if name != machine],
        )
        if outcome.good:
            canaries = [*self.canaries, machine] if canary and outcome is RolloutOutcome.DONE else self.canaries
            return dataclasses.replace(left, done=[*self.done, machine], canaries=canaries)
        return dataclasses.replace(left, ended={**self.ended, machine: Ended(outcome, why[:_LONGEST_WHY])})

    @property
    def ended_well(self) -> bool:
        """Whether nothing of it is left to do, and it ended well on all machines."""
        return not (self.waiting or self.running or self.ended or self.stopped)

    def next(self, identity: str, now: float) -> Rollout:
        """The roll-out that follows, with the same options."""
        first, *rest = self.then
        return Rollout(identity, first.work, first.parameters, self.options, now, self.by, first.machines, then=rest)

    def resumed(self, order: Sequence[str]) -> Rollout:
        """The roll-out as a new command goes on with it: all machines that are not done wait again, in ``order``."""
        known = set(self.machines) - set(self.done)
        return dataclasses.replace(
            self,
            waiting=[name for name in order if name in known],
            running=(),
            ended={},
            soak_since=0.0 if self.stopped else self.soak_since,
            stopped="",
        )

    def text(self) -> str:
        """The record as one line of JSON; raises WrongInput if it is too long for the cluster."""
        document = {
            **{name: getattr(self, name) for name in _SHAPE},
            "options": self.options.document(),
            "ended": {name: {"outcome": each.outcome, "why": each.why} for name, each in self.ended.items()},
            "then": [dataclasses.asdict(each) for each in self.then],
        }
        text = json.dumps(document, separators=(",", ":"))
        if len(text) > MOST_BYTES:
            count = max(len(self.machines), *(len(each.machines) for each in self.then), 0)
            raise WrongInput(
                f"{count} machines are too many for one roll-out",
                "a record that fits into an object of Kubernetes",
                "roll it out to one group after the other: --only GROUP",
            )
        return text


_NAMES = Many(NAME, _MOST)
_SHAPE: dict[str, Any] = {
    "id": NAME,
    "work": NAME,
    "parameters": Named(str, 100, NAME),
    "options": {},
    "started": Moment(),
    "by": str,
    "waiting": _NAMES,
    "running": _NAMES,
    "done": _NAMES,
    "canaries": _NAMES,
    "ended": Named({"outcome": one_of(*RolloutOutcome), "why": str}, _MOST, NAME),
    "soak_since": Moment(),
    "soaked": bool,
    "stopped": str,
}
_PARAMETERS = _SHAPE["parameters"]
_THEN = Optional(Many({"work": NAME, "parameters": _PARAMETERS, "machines": _NAMES}, 10))
"""Records of earlier versions have none."""


def parse(text: str) -> Rollout:
    """The roll-out in ``text``, which comes from the cluster; unknown keys are ignored. Raises ValueError."""
    try:
        document = json.loads(text)
        if wrong := shape.wrong(document, {**_SHAPE, "then": _THEN}):
            raise ValueError(wrong)
        values = {name: document[name] for name in _SHAPE}
        values["options"] = rollout_options.parse(document["options"])
    except (ValueError, RecursionError, WrongInput) as error:
        raise ValueError(f"the record of the roll-out is not valid: {error}") from error
    values["ended"] = {
        name: Ended(RolloutOutcome(each["outcome"]), each["why"]) for name, each in document["ended"].items()
    }
    then = [Following(each["work"], each["parameters"], each["machines"]) for each in document.get("then", ())]
    made = Rollout(**values, then=then)
    if len(set(made.machines)) != len(made.machines) or not set(made.canaries) <= set(made.done):
        raise ValueError("the record of the roll-out is not valid: a machine is in several of its lists")
    return made


def names(machines: Collection[str], most: int = 5) -> str:
    """Machines in one line; no more than ``most`` by name."""
    shown = list(machines)[:most]
    return ", ".join(shown) + (f" and {len(machines) - most} more" if len(machines) > most else "")
