"""What a command that rolls something out works with."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.fleet import Fleet, repair_settings
from gpunodes.engine.leases.held import Leases
from gpunodes.model import Machine, Role
from gpunodes.operations.repair.context import connected

Report = Callable[[str, str], None]
"""Report a message about a machine (its name, "" for the whole roll-out) and the text."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long things may take, in seconds."""

    drain: float = 600.0
    verify: float = 900.0
    poll: float = 5.0
    """Between two looks at something that changes."""
    patience: float = 600.0
    """Without any machine that can be begun, before the command ends; the roll-out can be resumed."""


@dataclass(frozen=True, slots=True)
class RolloutCommand:
    """A command that rolls something out."""

    fleet: Fleet
    machines: Mapping[str, Machine]
    """All machines of the inventory, by name."""
    report: Report
    limits: TimeLimits
    cluster: Cluster
    leases: Leases
    name: str
    """The command as it is typed."""
    stop: threading.Event = field(default_factory=threading.Event)
    """The user stopped the command: machines end their present stage."""

    def now(self) -> float:
        """The control plane's time, seconds since 1970."""
        return self.leases.now()

    def is_control_plane(self, name: str) -> bool:
        """Whether a machine is a control plane by the inventory."""
        return name in self.machines and self.machines[name].role is Role.CONTROL_PLANE


def new_id(work: str) -> str:
    """The id of a new roll-out."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{work}-{secrets.token_hex(3)}"


def time_limits(settings: Mapping[str, Any]) -> TimeLimits:
    """The limits of the settings."""
    return TimeLimits(
        drain=float(settings["gpunodes_rollout_drain_timeout"]),
        verify=float(settings["gpunodes_rollout_verify_timeout"]),
    )


@contextlib.contextmanager
def opened(fleet: Fleet, command: str, report: Report) -> Iterator[RolloutCommand]:
    """The command, with a session with the cluster's API while inside; raises WrongInput and NoResponse."""
    given = repair_settings(fleet.settings())
    with connected(fleet, given, command) as (cluster, leases):
        machines = {machine.name: machine for machine in fleet.all_machines()}
        yield RolloutCommand(fleet, machines, report, time_limits(given), cluster, leases, command)
