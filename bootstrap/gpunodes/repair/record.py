"""The state of one machine's repair, written before each stage so that another command can resume it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpunodes.shape import LATEST


class Stage(StrEnum):
    """The stages of a repair, in order; GIVE_UP and UNDO replace UNCORDON when the repair fails."""

    SCAN = "scan"
    LOCK = "lock"
    COLLECT = "collect"
    CORDON = "cordon"
    DRAIN = "drain"
    ESCALATE = "escalate"
    VERIFY = "verify"
    UNCORDON = "uncordon"
    GIVE_UP = "give-up"
    """Mark the node: it needs manual repair."""
    UNDO = "undo"
    """Restore the node's previous state: it could not be drained."""
    RELEASE = "release"
    """Release the lock."""
    END = "end"


class RepairOutcome(StrEnum):
    """How the repair of a machine ended."""

    REPAIRED = "repaired"
    NOT_REPAIRED = "not-repaired"
    """Its previous state was restored."""
    NEEDS_REPAIR = "needs-repair"
    """No step helped; it stays cordoned and marked."""

    @property
    def good(self) -> bool:
        return self is RepairOutcome.REPAIRED


@dataclass(frozen=True, slots=True)
class RepairRecord:
    """One repair. Times are seconds since 1970: of the control plane, with --without-cluster of the controller.

    ``stage`` is the current stage, or the stage in which the command ended; every stage is idempotent.
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
    """The driver hangs: processes that use it never end gracefully."""
    node: str = ""
    """The machine's node; empty with --without-cluster."""
    first_step: str = ""
    """The escalation step that it starts at."""
    named: bool = False
    """The user named the machine itself, not by a pattern."""
    own_cordon: bool = False
    """It made the cordon of its node; false before that, and if the node was cordoned already."""
    force_drain: bool = False
    bug_report: bool = False
    """Whether to run nvidia-bug-report.sh too."""
    boot_id: str = ""
    """The boot that the reboot must end."""
    gpus: int | None = None
    """How many GPUs it should have."""
    capacity: int | None = None
    """GPUs, or slices of them, that the node must offer; None if no device plugin offers any."""
    resets: tuple[str, ...] = ()
    """PCI addresses of the GPUs to reset; empty for all."""
    step: str = ""
    ordered_at: float = 0.0
    """When the current escalation step was ordered; 0 before that."""
    armed: tuple[tuple[str, float], ...] = ()
    """Escalation steps that the machine performs by itself, and when."""
    tried: tuple[str, ...] = ()
    outcome: RepairOutcome | None = None
    why: str = ""

    def to(self, stage: Stage, **changes: Any) -> RepairRecord:
        """The record at another stage."""
        return dataclasses.replace(self, stage=stage, **changes)

    def text(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def parse(text: str) -> RepairRecord:
    """The record in ``text``; unknown keys, such as a newer version's, are ignored. Raises ValueError.

    The text may come from a lock in the cluster, so the type of every field is checked.
    """
    try:
        document = json.loads(text)
        known = {field.name for field in dataclasses.fields(RepairRecord)}
        values = {name: value for name, value in document.items() if name in known}
        values["stage"] = Stage(values.get("stage", Stage.SCAN))
        values["outcome"] = RepairOutcome(values["outcome"]) if values.get("outcome") else None
        values["armed"] = tuple((str(name), float(due)) for name, due in values.get("armed", ()))
        for name in ("tried", "resets"):
            values[name] = tuple(str(each) for each in values.get(name, ()))
        record = RepairRecord(**values)
        moments = [record.started, record.ordered_at, *(due for _, due in record.armed)]
        if not all(0 <= moment < LATEST for moment in moments):
            raise ValueError(f"its times are {moments}")
    except (TypeError, AttributeError, RecursionError, ArithmeticError, ValueError) as error:
        raise ValueError(f"not a repair record: {error}") from error
    for field in dataclasses.fields(RepairRecord):
        if not isinstance(getattr(record, field.name), _TYPES.get(str(field.type), object)):
            raise ValueError(f"not a repair record: {field.name} is {getattr(record, field.name)!r}")
    return record


_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "float": (int, float),
    "int | None": (int, type(None)),
}
