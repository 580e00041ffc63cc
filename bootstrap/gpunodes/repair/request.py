"""What a user requests of a repair command."""

from __future__ import annotations

from dataclasses import dataclass

from gpunodes.repair.policy import RepairLimits


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """What the user requests."""

    command: str
    limits: RepairLimits
    named: frozenset[str] = frozenset()
    """Machines that the user named themselves, not by a pattern."""
    first: str = ""
    """The escalation step to start at."""
    reason: str = ""
    force_drain: bool = False
    bug_report: bool = False
    without_cluster: bool = False
    dry_run: bool = False
    confirmed: frozenset[str] | None = None
    """The machines that the user was asked about: no other one is repaired. None: all may be."""

    def allows(self, machine: str) -> bool:
        """Whether the user allows the repair of a machine."""
        return self.confirmed is None or machine in self.confirmed
