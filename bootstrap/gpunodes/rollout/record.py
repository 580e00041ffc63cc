"""The state of a roll-out on one machine, written before each stage so that another command can resume it. Pure."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpunodes import shape
from gpunodes.health.model import State
from gpunodes.shape import Maybe, Moment, Optional, Pattern, one_of


class Disruption(StrEnum):
    """What a work interrupts on a node, and so which pods are evicted before it."""

    NODE = "node"
    """All pods."""
    GPU_PODS = "gpu-pods"
    """Only pods that use GPUs."""
    NOTHING = "nothing"
    """None: the node is neither cordoned nor drained."""


class Stage(StrEnum):
    """The stages of one machine, in order."""

    COLLECT = "collect"
    CORDON = "cordon"
    PREPARE = "prepare"
    DRAIN = "drain"
    APPLY = "apply"
    VERIFY = "verify"
    UNDO = "undo"
    """Undo what a failed apply did."""
    UNCORDON = "uncordon"
    HOLD = "hold"
    """The work failed and was not undone: the node stays cordoned, and the record stays in its Lease."""
    RELEASE = "release"
    END = "end"


class RolloutOutcome(StrEnum):
    """How a roll-out ended on a machine."""

    DONE = "done"
    UNCHANGED = "unchanged"
    """There was nothing to do."""
    SKIPPED = "skipped"
    """It was not begun: maintenance, a cordon of others, an unhealthy machine."""
    NOT_DRAINED = "not-drained"
    """Its pods could not be evicted; its node was given back."""
    UNDONE = "undone"
    """The work failed and was undone; its node was given back."""
    FAILED = "failed"

    @property
    def good(self) -> bool:
        return self in {RolloutOutcome.DONE, RolloutOutcome.UNCHANGED}

    @property
    def stops(self) -> bool:
        """Whether no further machine is begun after it."""
        return self in {RolloutOutcome.FAILED, RolloutOutcome.UNDONE}


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One machine of a roll-out. Times are seconds since 1970; every stage is idempotent."""

    id: str
    """The roll-out's id."""
    work: str
    machine: str
    cluster: str
    """The control plane's address in the inventory."""
    node: str
    disrupts: Disruption
    started: float
    stage: Stage = Stage.COLLECT
    drain_until: float = 0.0
    """Until when pods of Jobs may go on; 0 before the stage DRAIN."""
    applied: bool = False
    """The work was begun on it: from then on its node is given back only after a verification."""
    undoes: bool = False
    """The work can be undone."""
    before: State = State.HEALTHY
    """The machine's state before the work."""
    gpus: int | None = None
    """How many GPUs it should have."""
    capacity: int | None = None
    """GPUs, or slices of them, that its node must offer; None if it offers none."""
    outcome: RolloutOutcome | None = None
    why: str = ""
    written: float = 0.0
    """When it was written, by the control plane's clock: of two records of a machine the later one counts."""

    def to(self, stage: Stage, **changes: Any) -> RolloutRecord:
        """The record at another stage."""
        return dataclasses.replace(self, stage=stage, **changes)

    def text(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


NAME = Pattern("a name", r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,251}[A-Za-z0-9])?")
_SHAPE = {
    "id": NAME,
    "work": NAME,
    "machine": NAME,
    "cluster": str,
    "node": NAME,
    "disrupts": one_of(*Disruption),
    "started": Moment(),
    "stage": one_of(*Stage),
    "drain_until": Moment(),
    "applied": bool,
    "undoes": bool,
    "before": one_of(*State),
    "gpus": Maybe(int),
    "capacity": Maybe(int),
    "outcome": Maybe(one_of(*RolloutOutcome)),
    "why": str,
}
_WRITTEN = Optional(Moment())
"""Records of earlier versions do not have it."""


def parse(text: str) -> RolloutRecord:
    """The record in ``text``, which may come from the cluster; unknown keys are ignored. Raises ValueError."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a record of a roll-out: {error}") from error
    if wrong := shape.wrong(document, {**_SHAPE, "written": _WRITTEN}):
        raise ValueError(f"not a record of a roll-out: {wrong}")
    values = {name: document[name] for name in _SHAPE} | {"written": document.get("written", 0.0)}
    values["disrupts"], values["stage"] = Disruption(values["disrupts"]), Stage(values["stage"])
    values["before"] = State(values["before"])
    values["outcome"] = RolloutOutcome(values["outcome"]) if values["outcome"] else None
    return RolloutRecord(**values)
