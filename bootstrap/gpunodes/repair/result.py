"""The result of a repair command. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpunodes.errors import ExitCode
from gpunodes.health.model import State, Verdict
from gpunodes.repair.policy import Decision
from gpunodes.repair.record import RepairOutcome


@dataclass(frozen=True, slots=True)
class MachineRepair:
    """The result for one machine. ``outcome`` is None if no repair was started."""

    machine: str
    decision: Decision
    why: str
    outcome: RepairOutcome | None = None
    verdict: Verdict | None = None
    step: str = ""
    """The escalation step that the repair starts at, or that fixed the machine."""
    skipped: Sequence[str] = ()
    repair: str = ""
    seconds: float = 0.0
    evidence: str = ""
    """The folder with the evidence, "" for none."""

    @property
    def healthy(self) -> bool:
        if self.outcome is not None:
            return self.outcome.good
        fine = self.verdict is None or self.verdict.state in {State.HEALTHY, State.OFF}
        return self.decision is Decision.NOTHING and fine


@dataclass(frozen=True, slots=True)
class RepairResult:
    """The result of a repair command."""

    command: str
    machines: Sequence[MachineRepair]
    dry_run: bool = False
    interrupted: bool = False

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        return ExitCode.DONE if all(each.healthy for each in self.machines) else ExitCode.PARTLY
