"""How far the repair of one machine has come: written before each step, so that another command can go on from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """The steps of a repair, in order; GIVE_UP and UNDO end it in another way than UNCORDON."""

    SCAN = "scan"
    LOCK = "lock"
    COLLECT = "collect"
    CORDON = "cordon"
    DRAIN = "drain"
    ESCALATE = "escalate"
    VERIFY = "verify"
    UNCORDON = "uncordon"
    GIVE_UP = "give-up"
    """Mark the node: it needs repair by hand."""
    UNDO = "undo"
    """Give the node back as it was: it could not be emptied, or nothing was wrong any more."""
    RELEASE = "release"
    """Let the lock go."""
    END = "end"


class RepairOutcome(StrEnum):
    """How the repair of a machine ended."""

    REPAIRED = "repaired"
    NOT_NEEDED = "not-needed"
    """It was well when we looked again."""
    NOT_REPAIRED = "not-repaired"
    """Given back as it was."""
    NEEDS_REPAIR = "needs-repair"
    """Nothing helped; it stays cordoned and marked."""

    @property
    def good(self) -> bool:
        return self in {RepairOutcome.REPAIRED, RepairOutcome.NOT_NEEDED}


@dataclass(frozen=True, slots=True)
class RepairRecord:
    """One repair. Times are seconds since 1970.

    ``step`` is what is being done, or was when the command ended; each step can be done again without harm.
    """

    id: str
    machine: str
    cluster: str
    """The control plane's address in the inventory: two clusters may have machines of one name."""
    started: float
    reason: str
    action: str
    """The verdict's action."""
    stage: Stage = Stage.SCAN
    hung: bool = False
    """The driver hangs: a graceful end of anything that uses it cannot be waited for."""
    node: str = ""
    """The machine's node; empty where the cluster is left out."""
    first: str = ""
    """The rung that it starts at."""
    named: bool = False
    """Its user named the machine itself, not by a pattern."""
    force_drain: bool = False
    bug_report: bool = False
    """nvidia-bug-report.sh is to be run too."""
    boot_id: str = ""
    """The boot that is to end."""
    gpus: int | None = None
    """How many GPUs it should have."""
    capacity: int | None = None
    """GPUs, or slices of them, that the node is to offer; None where nothing offers any."""
    resets: tuple[str, ...] = ()
    """PCI addresses of the GPUs that a GPU reset names; none for all."""
    step: str = ""
    asked: float = 0.0
    """When the present rung was asked for; 0 when it was not yet."""
    armed: tuple[tuple[str, float], ...] = ()
    """Rungs that the machine climbs by itself, and when."""
    tried: tuple[str, ...] = ()
    outcome: RepairOutcome | None = None
    why: str = ""

    def to(self, stage: Stage, **changes: Any) -> RepairRecord:
        """The record at another step."""
        return dataclasses.replace(self, stage=stage, **changes)

    def text(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def parse(text: str) -> RepairRecord:
    """The record that ``text`` holds; keys that a newer version added are left out. Raises ValueError.

    It may come from a lock in the cluster: what has not the type of its field is no record.
    """
    try:
        read = json.loads(text)
        known = {field.name for field in dataclasses.fields(RepairRecord)}
        values = {name: value for name, value in read.items() if name in known}
        values["stage"] = Stage(values.get("stage", Stage.SCAN))
        values["outcome"] = RepairOutcome(values["outcome"]) if values.get("outcome") else None
        values["armed"] = tuple((str(name), float(due)) for name, due in values.get("armed", ()))
        for name in ("tried", "resets"):
            values[name] = tuple(str(each) for each in values.get(name, ()))
        record = RepairRecord(**values)
        moments = [record.started, record.asked, *(due for _, due in record.armed)]
        if not all(0 <= moment < _LATEST for moment in moments):
            raise ValueError(f"its times are {moments}")
    except (TypeError, AttributeError, RecursionError, ArithmeticError, ValueError) as error:
        raise ValueError(f"not a record of a repair: {error}") from error
    for field in dataclasses.fields(RepairRecord):
        if not isinstance(getattr(record, field.name), _TYPES.get(str(field.type), object)):
            raise ValueError(f"not a record of a repair: {field.name} is {getattr(record, field.name)!r}")
    return record


_LATEST = 253402300800.0
"""The year 10000, in seconds since 1970: no clock is that late."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "float": (int, float),
    "int | None": (int, type(None)),
}
