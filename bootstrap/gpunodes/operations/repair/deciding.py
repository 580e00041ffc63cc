"""The choice of the machines that are repaired now, made again whenever a repair ends."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpunodes.engine import history
from gpunodes.engine.history import MachineHistory
from gpunodes.engine.scans import MachineScan
from gpunodes.health.model import State
from gpunodes.model import Machine, Role
from gpunodes.operations import cluster_state
from gpunodes.operations.cluster_state import ClusterState
from gpunodes.operations.repair import scanning
from gpunodes.operations.repair.context import RepairCommand
from gpunodes.operations.repair.running import Repairs
from gpunodes.repair import policy
from gpunodes.repair.policy import MachineDecision, Node, RepairCandidate


class Choice:
    """Decides on machines, by their scans, the cluster, the history and the repairs of this command."""

    def __init__(self, command: RepairCommand, repairs: Repairs, scans: dict[str, MachineScan]) -> None:
        self.command = command
        self.repairs = repairs
        self.scans = scans
        self.nodes: dict[str, Node | None] = {}
        """The node of each machine that was decided on, as it was then."""
        self.histories: Mapping[str, MachineHistory] = {}

    def decide(self, names: Sequence[str]) -> list[MachineDecision]:
        """A decision for each of these machines; an error about one of them is its result."""
        command = self.command
        self.histories = history.summaries(command.fleet.cluster_name)
        state = cluster_state.read(command, self.scans, self.repairs.nodes())
        candidates = []
        for name in names:
            try:
                candidates.append(self._candidate(command.machines[name], state))
            except Exception as problem:
                # An error about one machine does not affect the others.
                self.repairs.refuse(name, problem)
        for each in candidates:
            self.nodes[each.name] = each.node
        # Machines repaired by this command, or under repair, were unhealthy at the same time as those that wait.
        others = []
        for machine in command.fleet.all_machines():
            if machine.name in self.scans and machine.name not in names and not self.repairs.recovered(machine.name):
                with contextlib.suppress(Exception):
                    others.append(self._candidate(machine, state))
        return policy.decide(candidates, self._nodes(candidates, state), command.request.limits, command.now(), others)

    def _nodes(self, candidates: Sequence[RepairCandidate], state: ClusterState) -> list[Node]:
        """All nodes; where a control plane may be repaired, those whose member of etcd is away are not ready."""
        found = list(state.nodes.values())
        controls = any(each.named and each.node and each.node.control_plane for each in candidates)
        if not self.command.cluster or not controls:
            return found
        lacking = self.command.cluster.without_etcd(found)
        return [replace(each, ready=each.ready and each.name not in lacking) for each in found]

    def scan_again(self, names: Sequence[str]) -> None:
        """Scan machines again that waited for their repair; their repairs use the new scans, too."""
        self.scans |= scanning.scan_again(self.command, [self.command.machines[name] for name in names], self.scans)

    def _candidate(self, machine: Machine, state: ClusterState) -> RepairCandidate:
        node, why = self._node(machine.name, state)
        past = self._past(machine.name, node)
        verdict = self.scans[machine.name].verdict
        # A machine's control is not free: it reads the machine's settings.
        unreachable = verdict.state is State.UNREACHABLE
        return RepairCandidate(
            name=machine.name,
            verdict=verdict,
            node=node,
            control_plane=machine.role is Role.CONTROL_PLANE,
            named=machine.name in self.command.request.named,
            repairs=past.repairs,
            needs_repair=past.needs_repair,
            busy=state.holder(machine.name, node),
            bmc=unreachable and self.command.fleet.machine_control(machine).has_power(),
            unmatched=why or self._is_server(machine, node),
            off=state.off[machine.name].described if machine.name in state.off else "",
        )

    def _past(self, name: str, node: Node | None) -> MachineHistory:
        """The machine's history of this user; nothing if that says that it was given up, and its node has no such mark.

        Then another user cleared it, or it was made again.
        """
        past = self.histories.get(name, MachineHistory())
        if not self.command.cluster or node is None or node.needs_repair or not past.needs_repair:
            return past
        if not self.command.request.dry_run:
            why = "its node is not marked as needing repair any more"
            history.note(name, self.command.fleet.cluster_name, history.EntryKind.CLEARED, "cleared", "", why)
        return MachineHistory()

    def _is_server(self, machine: Machine, node: Node | None) -> str:
        """Why a node may not be repaired that is a control plane, "" if it may.

        Only the lock over SSH excludes other commands while an API stops, and it is on control planes of the inventory.
        """
        controls = any(each.role is Role.CONTROL_PLANE for each in self.command.fleet.all_machines())
        if controls or node is None or not node.control_plane or machine.role is Role.CONTROL_PLANE:
            return ""
        return "its node is a control plane, and the inventory has no group control_plane; repair it by hand"

    def _node(self, name: str, state: ClusterState) -> tuple[Node | None, str]:
        before = self.nodes.get(name)
        if before and self.command.cluster and (name in self.repairs.busy() or name in self.repairs.results):
            # Its scan is older than its reboot.
            return state.nodes.get(before.name), ""
        return state.machines[name]
