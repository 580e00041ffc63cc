"""A work and its machines in memory, for tests of roll-outs; the cluster and its machines are those of repair_fleet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gpunodes.engine import records
from gpunodes.engine.cluster import marks
from gpunodes.errors import GpunodesError
from gpunodes.operations.rolling import commands, context, works
from gpunodes.operations.rolling.work import Target
from gpunodes.rollout import record as recording
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.record import Disruption, RolloutOutcome
from gpunodes.rollout.result import RolloutResult
from gpunodes.rollout.state import Following

from tests import repair_fleet
from tests.repair_fleet import Fleet

LEASE = "gpunodes-rollout"


class Killed(BaseException):
    """The command dies here, as by kill -9: nothing after this runs."""


@dataclass
class MemoryWork:
    """Brings each machine to a version; ``failing`` maps machines to the stage that fails there."""

    place: Fleet
    version: str = "2"
    disrupts: Disruption = Disruption.NODE
    undoes: bool = False
    failing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    done: list[tuple[str, str]] = field(default_factory=list)
    """Machine and stage, in order."""
    during: Callable[[str, Target], None] = lambda stage, target: None
    name: str = "memory"
    mutex: threading.Lock = field(default_factory=threading.Lock)

    @property
    def parameters(self) -> Mapping[str, str]:
        return {"version": self.version}

    def needed(self, target: Target) -> str:
        found = self.versions.get(target.name, "1")
        return "" if found == self.version else f"{found} -> {self.version}"

    def prepare(self, target: Target) -> None:
        self._do("prepare", target)

    def apply(self, target: Target) -> None:
        self._do("apply", target)
        self.versions[target.name] = self.version

    def verify(self, target: Target) -> str:
        try:
            self._do("verify", target)
        except GpunodesError as problem:
            return str(problem)
        return ""

    def undo(self, target: Target) -> None:
        self._do("undo", target)
        self.versions[target.name] = "1"

    def stages(self, machine: str) -> list[str]:
        return [stage for name, stage in self.done if name == machine]

    def _do(self, stage: str, target: Target) -> None:
        with self.mutex:
            self.done.append((target.name, stage))
        self.during(stage, target)
        if stage in self.failing.get(target.name, "").split():
            raise GpunodesError(f"{stage} of {target.name} fails")


def hurry(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    """Use the test's own state folder and very short time limits."""
    repair_fleet.hurry(monkeypatch, state)
    made = context.TimeLimits
    monkeypatch.setattr(context, "TimeLimits", lambda **given: made(**{**given, "poll": 0.01, "patience": 0.1}))


def known(monkeypatch: pytest.MonkeyPatch, work: MemoryWork) -> MemoryWork:
    """Register a work, so that its roll-out can be resumed."""
    monkeypatch.setitem(works.WORKS, work.name, lambda fleet, parameters: work)
    return work


def roll_out(
    place: Fleet,
    work: MemoryWork,
    machines: Sequence[str] = (),
    then: Sequence[Following] = (),
    report: Callable[[str, str], None] = lambda *_: None,
    **options: Any,
) -> RolloutResult:
    """Roll a work out; ``options`` are fields of RolloutOptions."""
    chosen = [each for each in place.all_machines() if not machines or each.name in machines]
    return commands.roll_out(place, chosen, work, RolloutOptions(**options), report, "test", then)


def resume(place: Fleet) -> RolloutResult:
    """Resume the roll-out of a fleet."""
    return commands.resume(place, lambda *_: None)


def outcomes(result: RolloutResult) -> dict[str, RolloutOutcome | None]:
    """The outcome of each machine."""
    return {each.machine: each.outcome for each in result.machines}


def clean(place: Fleet) -> None:
    """Nothing of the roll-out is left but that it ended well: no lock, no cordon, no mark, no record."""
    assert place.api.leases == {}
    assert records.read_kind("test", records.ROLLOUTS, recording.parse) == {}
    for node in place.api.nodes.values():
        assert not node["spec"].get("unschedulable")
        assert {*node["metadata"]["annotations"]} <= {marks.ROLLED_OUT}
