"""The nodes of the cluster, the commands that work on them, and the machine of each node, read at one moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.fleet import Fleet, match_nodes, match_switched, unmatched
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.leases.holders import described
from gpunodes.engine.leases.objects import lock_name
from gpunodes.engine.scans import MachineScan
from gpunodes.health.model import Verdict
from gpunodes.identity.matcher import Match
from gpunodes.model import Machine, Role
from gpunodes.repair import policy
from gpunodes.repair.policy import Node
from gpunodes.repair.switched_off import Switched

Scans = Mapping[str, MachineScan]


class Command(Protocol):
    """What is needed of a command. ``cluster`` and ``leases`` are None with --without-cluster."""

    @property
    def fleet(self) -> Fleet: ...
    @property
    def cluster(self) -> Cluster | None: ...
    @property
    def leases(self) -> Leases | None: ...


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All nodes by name, locked ones marked as cordoned; without those of machines that are off on purpose."""

    nodes: Mapping[str, Node]
    machines: Mapping[str, tuple[Node | None, str]]
    """Each machine's node and "", or None and why it may not be repaired."""
    holders: Mapping[str, str]
    """The other commands that hold locks, by the lock's name."""
    off: Mapping[str, Switched] = field(default_factory=dict)
    """The machines that the autoscaler keeps off; they count in no pool."""

    def holder(self, machine: str, node: Node | None) -> str:
        """The other command that holds the lock of a machine, "" if none does."""
        return self.holders.get(lock_name(machine, node.name if node else ""), "")


def read(command: Command, scans: Scans, own: Collection[str] = ()) -> ClusterState:
    """The present state; ``own`` are the nodes (or machines) that this command works on now."""
    if not command.cluster or not command.leases:
        return _of_inventory(command, scans, own)
    live = {seen.name: seen for seen in command.leases.observe(watched=True) if seen.live}
    every = command.cluster.nodes()
    switched = command.cluster.switched_off()
    nodes = {node.name: _locked(node) if lock_name(node.name) in live else node for node in every}
    others = {name: seen for name, seen in live.items() if name not in map(lock_name, own)}
    matches = match_nodes(command.fleet, every, scans)
    # While a machine stops, it still has its node, which alone identifies it.
    with_node = {name: match.node.name for name, match in matches.items() if match.node}
    gone = {node for node, each in switched.items() if node in nodes and each.is_off(ready=nodes[node].ready)}
    without_node = match_switched(command.fleet, switched, every, scans)
    off = {name: each for name, each in without_node.items() if name not in with_node}
    off |= {name: switched[node] for name, node in with_node.items() if node in gone}
    return ClusterState(
        {name: node for name, node in nodes.items() if name not in gone},
        {name: (None, off[name].described) if name in off else _node(nodes, match) for name, match in matches.items()},
        {name: f"{described(seen.holder)}, since {seen.since}" for name, seen in others.items()},
        off,
    )


def _node(nodes: Mapping[str, Node], match: Match) -> tuple[Node | None, str]:
    return (nodes[match.node.name], "") if match.node else (None, unmatched(match))


def _of_inventory(command: Command, scans: Scans, own: Collection[str]) -> ClusterState:
    """The state with --without-cluster: a stand-in for the node of each machine."""
    every = [(machine.name, _stand_in(command, machine, scans)) for machine in command.fleet.all_machines()]
    nodes = {node.name: _locked(node) if node.name in own else node for _, node in every}
    return ClusterState(nodes, {name: (nodes[node.name], "") for name, node in every}, {})


def _stand_in(command: Command, machine: Machine, scans: Scans) -> Node:
    """The stand-in of a machine's node: its pool by the inventory and its verdict."""
    verdict: Verdict | None = scans[machine.name].verdict if machine.name in scans else None
    gpus = verdict is None or verdict.gpus_expected is None or verdict.gpus_expected > 0
    pool = policy.pool_of(command.fleet.pool_label(machine.name), gpus=gpus)
    if machine.role is Role.GPU_HOST:
        # It never joins the cluster: it says nothing of the pools of nodes.
        pool = policy.HOST_POOL
    return Node(machine.name.lower(), control_plane=machine.role is Role.CONTROL_PLANE, pool=pool)


def _locked(node: Node) -> Node:
    return dataclasses.replace(node, cordoned=True, cordoned_by_repair=node.cordoned_by_repair or "a repair")
