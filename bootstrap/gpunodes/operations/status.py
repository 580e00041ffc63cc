"""Ask the control plane about its nodes, and hold them against the inventory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.engine import events, journal, runner
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Machine
from gpunodes.operations import phases
from gpunodes.operations.tracker import Tracker, View

PHASES = (phases.STATUS,)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster. ``machine`` is its name in the inventory, "" for a node that is not there."""

    name: str
    machine: str
    role: str
    ready: bool
    reason: str
    """Why it is not ready, or that it is cordoned."""
    version: str
    address: str


@dataclass(frozen=True, slots=True)
class Status:
    """The cluster as its control plane sees it."""

    endpoint: str
    version: str
    nodes: Sequence[Node]
    missing: Sequence[str]
    """Machines of the inventory that are no nodes."""

    @property
    def well(self) -> bool:
        return all(node.ready for node in self.nodes)


def run(inventory: Inventory, view: View) -> Status:
    """Read the cluster; raises GpunodesError when there is none, or when its control plane does not answer."""
    control = inventory.control_plane()
    tracker = Tracker([control], PHASES, view)
    view.begin("status", [control])
    folder = journal.open_run("status")
    ended = runner.run(runner.Play("status.yml", inventory.path, [control.name]), folder, tracker.on_event)
    cluster = tracker.answers.get("cluster", {}).get(control.name)
    if not ended.ok or not cluster:
        failure = tracker.failures.get(control.name)
        raise GpunodesError(
            f"{control.name} runs no cluster" if failure is None else f"{control.name}: {events.cause(failure)}",
            "a control plane that answers",
            f"`gpunodes init-master {control.name}` makes one; the log is {ended.log}",
        )
    return assemble(inventory.machines(), cluster)


def assemble(machines: Sequence[Machine], cluster: Mapping[str, Any]) -> Status:
    """Match the cluster's nodes with the inventory's machines, by host name or address."""
    nodes = []
    for node in cluster["nodes"]:
        machine = next((m.name for m in machines if node["name"] == m.name.lower() or node["address"] == m.address), "")
        nodes.append(
            Node(
                name=node["name"],
                machine=machine,
                role=node["role"],
                ready=bool(node["ready"]),
                reason=str(node["reason"] or ("" if node["schedulable"] else "cordoned")),
                version=node["version"],
                address=node["address"],
            )
        )
    present = {node.machine for node in nodes}
    missing = [machine.name for machine in machines if machine.name not in present]
    return Status(cluster["endpoint"], cluster["version"], nodes, missing)
