"""What a repair command works with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.fleet import Fleet, repair_settings
from gpunodes.engine.leases.held import Leases
from gpunodes.errors import WrongInput
from gpunodes.model import Machine, Role
from gpunodes.repair.request import RepairRequest

Report = Callable[[str, str], None]
"""Report a message about a machine: its name and the text."""


@dataclass(frozen=True, slots=True)
class RepairCommand:
    """A repair command. ``cluster`` and ``leases`` are None with --without-cluster."""

    fleet: Fleet
    machines: Mapping[str, Machine]
    """The selected machines, by name."""
    request: RepairRequest
    report: Report
    settings: Mapping[str, Any]
    """The cluster-wide settings."""
    cluster: Cluster | None = None
    leases: Leases | None = None

    def now(self) -> float:
        """The time that the cluster's annotations and Leases use, seconds since 1970."""
        return self.leases.now() if self.leases else time.time()

    def is_control_plane(self, name: str) -> bool:
        """Whether a selected machine is a control plane."""
        return name in self.machines and self.machines[name].role is Role.CONTROL_PLANE


@contextlib.contextmanager
def avoidable() -> Iterator[None]:
    """Inside, an error for want of a cluster suggests --without-cluster: only some commands have that option."""
    try:
        yield
    except (NoResponse, WrongInput) as error:
        wrong = error.problem
        remedy = f"{wrong.remedy}, or skip the cluster with --without-cluster"
        raise type(error)(wrong.found, wrong.wanted, remedy) from error


@contextlib.contextmanager
def connected(fleet: Fleet, given: Mapping[str, Any], command: str) -> Iterator[tuple[Cluster, Leases]]:
    """A session with the cluster's API while inside, and the locks of this command; raises NoResponse without one."""
    with contextlib.ExitStack() as held:
        session = fleet.session()
        held.callback(session.close)
        cluster = Cluster(session, str(given["gpunodes_repair_pool_label"]))
        leases = Leases(cluster, command)
        held.callback(leases.close)
        cluster.call_once("GET", "/version")
        yield cluster, leases


@contextlib.contextmanager
def opened(
    fleet: Fleet, machines: Sequence[Machine], request: RepairRequest, report: Report
) -> Iterator[RepairCommand]:
    """The command, with a session with the cluster's API while inside.

    Raises WrongInput for wrong settings, and NoResponse if the control plane does not respond.
    """
    given = repair_settings(fleet.settings())
    by_name = {machine.name: machine for machine in machines}
    if request.without_cluster:
        yield RepairCommand(fleet, by_name, request, report, given)
        return
    with contextlib.ExitStack() as held:
        with avoidable():
            cluster, leases = held.enter_context(connected(fleet, given, request.command))
        yield RepairCommand(fleet, by_name, request, report, given, cluster, leases)
