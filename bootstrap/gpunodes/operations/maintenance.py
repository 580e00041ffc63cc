"""Nodes in maintenance: they are not repaired, and no new pods are scheduled to them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpunodes.engine.cluster.api import OnWait
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.fleet import Fleet, match_nodes, missing
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.leases.holders import user_at_host
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import Machine
from gpunodes.repair.maintenance import Maintenance


@dataclass(frozen=True, slots=True)
class MaintainedNode:
    """A node's maintenance, current or just ended."""

    node: str
    machine: str
    """Its name in the inventory, "" for a node that is not in the inventory."""
    maintenance: Maintenance | None
    """None if there was none to end."""
    cordoned: bool
    """The node is cordoned, by maintenance or otherwise."""


def begin(
    fleet: Fleet,
    machines: Sequence[Machine],
    reason: str,
    until: float | None,
    *,
    cordon: bool = True,
    on_wait: OnWait = lambda _: None,
) -> list[MaintainedNode]:
    """Put the machines' nodes into maintenance until a time (seconds since 1970; None: no end), cordoned if ``cordon``.

    Raises Held if another command works on one of them, and WrongInput for a machine without a node: none is changed.
    """
    with _nodes(fleet, machines, on_wait) as (cluster, nodes, leases):
        now = leases.now()
        # The end is compared with the control plane's clock.
        ends = None if until is None else float(int(until + now - time.time()))
        new = Maintenance(reason, user_at_host(), float(int(now)), ends)
        for name in nodes:
            leases.confirm(name)
            cluster.begin_maintenance(name, new, cordon=cordon)
            if cluster.node(name) is None:
                raise GpunodesError(f"the node {name} was deleted in the meantime", "an existing node")
            cluster.event(name, "MaintenanceBegun", new.described(), warning=False)
        return _maintained(cluster, nodes)


def end(fleet: Fleet, machines: Sequence[Machine], on_wait: OnWait = lambda _: None) -> list[MaintainedNode]:
    """End the maintenance of the machines' nodes, and undo its cordons; raises like ``begin``."""
    with _nodes(fleet, machines, on_wait) as (cluster, nodes, leases):
        ended = {}
        for name in nodes:
            leases.confirm(name)
            ended[name] = cluster.end_maintenance(name)
        for name in [name for name, was in ended.items() if was]:
            cluster.event(name, "MaintenanceEnded", f"by {user_at_host()}", warning=False)
        cordoned = {node.name: node.cordoned for node in cluster.nodes()}
        return [MaintainedNode(name, nodes[name], was, cordoned.get(name, False)) for name, was in ended.items()]


def listed(fleet: Fleet, on_wait: OnWait = lambda _: None) -> list[MaintainedNode]:
    """All nodes in maintenance, including expired maintenance."""
    with contextlib.closing(fleet.session()) as session:
        cluster = Cluster(session, on_wait=on_wait)
        nodes = cluster.nodes()
        matches = match_nodes(fleet, nodes, {}, confirmed=False)
        names = {match.node.name: name for name, match in matches.items() if match.node}
        return _maintained(cluster, {node.name: names.get(node.name, "") for node in nodes})


@contextlib.contextmanager
def _nodes(
    fleet: Fleet, machines: Sequence[Machine], on_wait: OnWait
) -> Iterator[tuple[Cluster, dict[str, str], Leases]]:
    """The cluster, the locked nodes of machines with their names, and their locks."""
    with contextlib.closing(fleet.session()) as session:
        cluster = Cluster(session, on_wait=on_wait)
        nodes = {}
        scans = fleet.scan(machines)
        matches = match_nodes(fleet, cluster.nodes(), scans)
        for machine in machines:
            match = matches[machine.name]
            if match.node is None:
                raise WrongInput(f"{machine.name}: {missing(match)}", "a machine with a node", "see `gpunodes status`")
            nodes[match.node.name] = machine.name
        leases = Leases(cluster, "maintenance")
        with leases.holding(nodes):
            yield cluster, nodes, leases


def _maintained(cluster: Cluster, names: dict[str, str]) -> list[MaintainedNode]:
    return [
        MaintainedNode(node.name, names[node.name], node.maintenance, node.cordoned)
        for node in cluster.nodes()
        if node.maintenance and node.name in names
    ]
