"""The nodes that a command will change: found and shown before the user confirms, and before any change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpunodes.engine import journal
from gpunodes.errors import GpunodesError, Interrupted
from gpunodes.identity.matcher import Match
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role
from gpunodes.operations import matching, preflight
from gpunodes.operations.tracker import RunView


@dataclass(frozen=True, slots=True)
class Chosen:
    """Machines and their nodes. ``seen`` is what the machines and the cluster reported."""

    seen: preflight.Inspection
    nodes: Mapping[str, Match]

    @property
    def lines(self) -> list[str]:
        """Each machine with its node, for people."""
        return [
            f"{name}: node {match.node.name}, by its {match.by}" if match.node else f"{name}: {self._no_node}"
            for name, match in self.nodes.items()
        ]

    @property
    def _no_node(self) -> str:
        if not self.seen.control:
            return "a GPU host, not a node"
        return "not a node of the cluster" if self.seen.cluster else "no cluster responds, so its node is unknown"


def choose(
    command: str,
    inventory: Inventory,
    machines: Sequence[Machine],
    view: RunView,
    *,
    needs_cluster: bool = True,
    without_cluster: bool = False,
) -> Chosen:
    """Read the machines and their cluster, and match machines and nodes; nothing is changed.

    ``needs_cluster``: a machine that runs as a node is not changed if its cluster does not respond.
    ``without_cluster``: the inventory has no control plane. Raises
    GpunodesError in that case, and if a machine and a node contradict each other; then no machine is changed.
    """
    view.begin(command, machines)
    folder = journal.open_run(command)
    seen = preflight.inspect(inventory, machines, folder, view, {}, sources=False, without_cluster=without_cluster)
    if seen.interrupted:
        raise Interrupted
    _check_hosts(machines, seen)
    members = [name for name, facts in seen.facts.items() if (facts.get("kubernetes") or {}).get("role")]
    if needs_cluster and members and seen.cluster is None:
        finding = seen.no_cluster()
        raise GpunodesError(
            f"{', '.join(members)} run as nodes, but the cluster is unknown: "
            f"{finding.machine}: {finding.problem.found}",
            "a control plane that responds",
            "restore it first; nothing was changed",
        )
    return Chosen(seen, match(inventory, machines, seen))


def _check_hosts(machines: Sequence[Machine], seen: preflight.Inspection) -> None:
    """Raise GpunodesError for a GPU host that is a node of a cluster, which this command would not ask."""
    for machine in machines:
        facts = seen.facts.get(machine.name) or {}
        if machine.role is Role.GPU_HOST and (facts.get("kubernetes") or {}).get("role"):
            raise GpunodesError(
                f"{machine.name} is in the group gpu_hosts, and runs as a node of {facts['kubernetes']['server']}",
                "a machine of no cluster",
                "move it to the group workers of the cluster's inventory; nothing was changed",
            )


def match(inventory: Inventory, machines: Sequence[Machine], seen: preflight.Inspection) -> dict[str, Match]:
    """The nodes of machines; raises GpunodesError for a contradiction."""
    found = matches(inventory, machines, seen)
    for each in found.values():
        if each.contradiction:
            raise GpunodesError(
                each.contradiction,
                "exactly one node that matches this machine",
                "nothing was changed; see `kubectl get nodes -o wide` and the inventory, and delete a node whose "
                "machine is gone",
            )
    return found


def matches(inventory: Inventory, machines: Sequence[Machine], seen: preflight.Inspection) -> dict[str, Match]:
    """What the matcher finds for machines, by their reports of this run, else by their recorded identities."""
    return matching.matches(inventory, machines, seen.facts, (seen.cluster or {}).get("nodes", ()))
