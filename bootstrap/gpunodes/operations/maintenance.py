"""Nodes that people keep for themselves: repairs leave them alone, and nothing new is scheduled to them."""

from __future__ import annotations

import contextlib
import getpass
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpunodes.ansible.module_utils.gpunodes.identity import Matcher
from gpunodes.engine.cluster import Cluster
from gpunodes.engine.leases import Leases
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import Machine
from gpunodes.operations.repair import Fleet, missing
from gpunodes.repair.maintenance import Maintenance


@dataclass(frozen=True, slots=True)
class MaintainedNode:
    """A node's maintenance: what it is, or what it was until it was ended."""

    node: str
    machine: str
    """Its name in the inventory, "" for a node that is not there."""
    maintenance: Maintenance | None
    """None where there was none to end."""
    cordoned: bool
    """The node is cordoned, whoever did it."""


def begin(
    fleet: Fleet, machines: Sequence[Machine], reason: str, until: float | None, *, cordon: bool = True
) -> list[MaintainedNode]:
    """Keep repairs from the machines' nodes, and pods if ``cordon``, until a time (seconds since 1970; None: no end).

    Raises Held while somebody works on one of them, and WrongInput for a machine that is no node: none is changed then.
    """
    with _nodes(fleet, machines) as (cluster, nodes, now):
        # Whoever asks whether it is over goes by the control plane's clock.
        ends = None if until is None else float(int(until + now - time.time()))
        made = Maintenance(reason, f"{getpass.getuser()}@{socket.gethostname()}", float(int(now)), ends)
        for name in nodes:
            cluster.begin_maintenance(name, made, cordon=cordon)
            if cluster.node(name) is None:
                raise GpunodesError(f"the node {name} went meanwhile", "a node, which is what is kept")
            cluster.event(name, "MaintenanceBegun", made.described(), warning=False)
        return _kept(cluster, nodes)


def end(fleet: Fleet, machines: Sequence[Machine]) -> list[MaintainedNode]:
    """End the maintenance of the machines' nodes, and lift the cordons that were made for it; raises as ``begin``."""
    with _nodes(fleet, machines) as (cluster, nodes, _):
        ended = {name: cluster.end_maintenance(name) for name in nodes}
        for name in [name for name, was in ended.items() if was]:
            cluster.event(name, "MaintenanceEnded", f"by {getpass.getuser()}@{socket.gethostname()}", warning=False)
        left = {node.name: node.cordoned for node in cluster.nodes()}
        return [MaintainedNode(name, nodes[name], was, left.get(name, False)) for name, was in ended.items()]


def listed(fleet: Fleet) -> list[MaintainedNode]:
    """All nodes that are in maintenance, those whose time is over included."""
    with contextlib.closing(fleet.session()) as session:
        cluster = Cluster(session)
        nodes = cluster.nodes()
        machines = fleet.identities({})
        matcher = Matcher([node.identity for node in nodes], machines.values())
        found = {name: matcher.match(machine, sure=False).node for name, machine in machines.items()}
        names = {node.name: name for name, node in found.items() if node}
        return _kept(cluster, {node.name: names.get(node.name, "") for node in nodes})


@contextlib.contextmanager
def _nodes(fleet: Fleet, machines: Sequence[Machine]) -> Iterator[tuple[Cluster, dict[str, str], float]]:
    """The cluster, the locked nodes of machines with their names, and the control plane's time."""
    with contextlib.closing(fleet.session()) as session:
        cluster = Cluster(session)
        nodes = {}
        known = fleet.identities(fleet.scan(machines))
        matcher = Matcher([node.identity for node in cluster.nodes()], known.values())
        for machine in machines:
            match = matcher.match(known[machine.name])
            if match.node is None:
                raise WrongInput(
                    f"{machine.name}: {missing(match)}", "a node, which is what is kept", "see `gpunodes status`"
                )
            nodes[match.node.name] = machine.name
        leases = Leases(cluster, "maintenance")
        with leases.holding(nodes):
            yield cluster, nodes, leases.now()


def _kept(cluster: Cluster, names: dict[str, str]) -> list[MaintainedNode]:
    return [
        MaintainedNode(node.name, names[node.name], node.maintenance, node.cordoned)
        for node in cluster.nodes()
        if node.maintenance and node.name in names
    ]
