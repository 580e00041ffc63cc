"""Where the cluster's roll-out stands: read from the cluster alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpunodes.engine.fleet import Fleet
from gpunodes.engine.leases.holders import described
from gpunodes.operations.rolling import context, unfinished
from gpunodes.operations.rolling.context import Report
from gpunodes.rollout import state
from gpunodes.rollout.record import RolloutRecord
from gpunodes.rollout.state import Rollout


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """The roll-out of a cluster. ``rollout`` is None if there is none, or its record is not valid."""

    rollout: Rollout | None = None
    holder: str = ""
    """The command that works on it, "" if none does."""
    machines: Mapping[str, RolloutRecord] = field(default_factory=dict)
    """The records of machines that are worked on, or were left unfinished."""
    left: tuple[str, ...] = ()
    """Nodes with marks of a roll-out."""
    problem: str = ""
    """Why the record cannot be read."""


def read(fleet: Fleet, report: Report) -> RolloutStatus:
    """The roll-out of the cluster; takes no lock. Raises NoResponse without an API."""
    with context.opened(fleet, "rollout status", report) as command:
        seen = command.leases.observe_rollout()
        left = tuple(node.name for node in command.cluster.nodes() if node.rollout)
        if seen is None or not seen.record:
            holder = described(seen.holder) if seen and seen.live else ""
            return RolloutStatus(holder=holder, left=left)
        holder = described(seen.holder) if seen.live else ""
        try:
            rollout = state.parse(seen.record)
        except ValueError as error:
            return RolloutStatus(holder=holder, left=left, problem=str(error))
        machines = unfinished.find(command, rollout.id, command.leases.observe(), live=True)
        return RolloutStatus(rollout, holder, machines, left)
