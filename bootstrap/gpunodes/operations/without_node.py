"""A machine without a node that is switched on: it never joined, or its node was deleted while it was off.

The machine itself knows which of both it is: so SSH is waited for first, then its node, if its kubelet registers one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpunodes.engine import power as powers
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.fleet import InventoryFleet, match_nodes, match_switched
from gpunodes.engine.machine_control import MachineControl, Membership
from gpunodes.engine.power import Order
from gpunodes.errors import GpunodesError
from gpunodes.model import Machine
from gpunodes.operations.autoscale import switched_on
from gpunodes.operations.repair.context import Report
from gpunodes.repair import verification
from gpunodes.repair.policy import Node

SSH, NODE = "ssh", "node"
"""What was waited for."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A machine that is switched on, and how long that may take; ``confirm`` raises if its lock may be lost."""

    fleet: InventoryFleet
    machine: Machine
    control: MachineControl
    report: Report
    confirm: powers.Confirm
    limit_s: float
    poll_s: float
    stop: threading.Event
    """The user stopped the command."""

    def until(self, why_not: Callable[[], str], remedy: str) -> None:
        """Wait until ``why_not`` returns ""; raises GpunodesError in the end, if the lock is lost or on ``stop``."""
        deadline = time.monotonic() + self.limit_s
        while why := why_not():
            self.confirm()
            if time.monotonic() > deadline:
                name = self.machine.name
                raise GpunodesError(
                    f"{name} is on, but after {self.limit_s:.0f} s {why}", "a machine that works", remedy
                )
            if self.stop.wait(self.poll_s):
                raise stopped(self.machine, "on")


def stopped(machine: Machine, stays: str) -> GpunodesError:
    """Why a machine is not waited for any longer."""
    return GpunodesError(
        f"{machine.name} was switched on, and is not waited for: the command was stopped",
        "a machine that works",
        f"it stays {stays}; `gpunodes power {machine.name} on --wait` goes on",
    )


def switch_on(wait: Wait, bmc: powers.Power, cluster: Cluster | None) -> Node | None:
    """Switch it on, and wait for what can be expected of it: its node, which is returned, or only SSH.

    It is SSH without a ``cluster``, and for a machine that is no member. Raises PowerProblem and GpunodesError.
    """
    name = wait.machine.name
    # Before it is switched on: that ends its state.
    is_scaled = cluster is not None and name in match_switched(wait.fleet, cluster.switched_off(), cluster.nodes(), {})
    powers.change(bmc, Order.ON, wait.confirm)
    if cluster:
        switched_on.end_off(wait.fleet, wait.machine, cluster.session, wait.report)
    wait.report(name, f"it has no node: waiting until it responds over SSH, at most {wait.limit_s:.0f} s")
    wait.until(lambda: _silent(wait), f"see its console, and `gpunodes health {name}`")
    if cluster is None:
        wait.report(name, "it responds over SSH; there is no cluster whose node it could be")
        return None
    membership = wait.control.membership()
    if membership is Membership.ENDED:
        wait.report(name, f"it responds over SSH; the certificate of its kubelet has ended: `gpunodes join {name}`")
        return None
    if membership is not Membership.MEMBER and not is_scaled:
        which = (
            "it is no member of a cluster: " if membership is Membership.NONE else "if it is no member of a cluster, "
        )
        wait.report(name, f"it responds over SSH; {which}`gpunodes join {name}` makes it one")
        return None
    why = "its kubelet is a member of a cluster" if membership is Membership.MEMBER else "its pool scales"
    wait.report(name, f"it responds over SSH; {why}: waiting until its node is ready, at most {wait.limit_s:.0f} s")
    found: list[Node] = []
    remedy = f"see `journalctl -u kubelet` there; `gpunodes join {name}` joins it anew"
    wait.until(lambda: _not_ready(wait, cluster, found), remedy)
    # Its node registered with a taint, which nobody else removes if the autoscaler is gone.
    switched_on.end_off(wait.fleet, wait.machine, cluster.session, wait.report)
    return found[0]


def _silent(wait: Wait) -> str:
    seen = wait.fleet.scan([wait.machine], full=False)[wait.machine.name]
    return "" if seen.verdict.boot_id else "it does not respond over SSH"


def _not_ready(wait: Wait, cluster: Cluster, ready: list[Node]) -> str:
    """Why its node is not ready, "" if it is: then the node is added to ``ready``."""
    seen = wait.fleet.scan([wait.machine], full=False)[wait.machine.name]
    why, _ = verification.unhealthy(seen.verdict, seen.facts, None)
    if why:
        return why
    nodes = cluster.nodes()
    match = match_nodes(wait.fleet, nodes, {wait.machine.name: seen})[wait.machine.name]
    if match.node is None:
        return match.contradiction or "its node has not registered"
    found = next(each for each in nodes if each.name == match.node.name)
    why = verification.unready(found, found.expected, seen.verdict.boot_id or "")
    ready += [] if why else [found]
    return why
