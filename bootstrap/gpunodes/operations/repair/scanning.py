"""The scans before the decision: of the machines, a second time of those to repair, and of the rest of their pools."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

from gpunodes.engine.fleet import match_switched
from gpunodes.engine.scans import MachineScan
from gpunodes.health.model import State, Verdict
from gpunodes.model import Machine
from gpunodes.operations import cluster_state, switched_off
from gpunodes.operations.repair.context import RepairCommand
from gpunodes.repair import policy


def scan(
    command: RepairCommand, machines: Sequence[Machine], earlier: Mapping[str, MachineScan] | None
) -> dict[str, MachineScan]:
    """The scans on which the decision is based, by machine; ``earlier`` replaces the first scan, if it is given."""
    scans = dict(earlier) if earlier else _scan(command, machines)
    if command.request.limits.by_hand:
        return scans
    scans |= _second_scan(command, machines, scans)
    return _marked(command, scans | _scan_of_pools(command, machines, scans))


def scan_again(
    command: RepairCommand, machines: Sequence[Machine], scans: Mapping[str, MachineScan]
) -> dict[str, MachineScan]:
    """New scans of those of these machines that were to be repaired by ``scans``: they waited, and may have changed."""
    if command.request.limits.by_hand:
        return {}
    waited = [machine for machine in machines if _needs_repair(command, scans[machine.name].verdict)]
    again = _scan(command, waited)
    return _marked(command, again | _second_scan(command, waited, again))


def _scan(command: RepairCommand, machines: Sequence[Machine]) -> dict[str, MachineScan]:
    return dict(command.fleet.scan(machines)) if machines else {}


def _marked(command: RepairCommand, scans: dict[str, MachineScan]) -> dict[str, MachineScan]:
    """Machines that do not respond since the autoscaler keeps them off are not unreachable."""
    if not command.cluster or not any(seen.verdict.state is State.UNREACHABLE for seen in scans.values()):
        return scans
    switched = command.cluster.switched_off()
    off = match_switched(command.fleet, switched, command.cluster.nodes() if switched else [], scans)
    return {
        name: dataclasses.replace(seen, verdict=switched_off.marked(seen.verdict, off)) for name, seen in scans.items()
    }


def _second_scan(
    command: RepairCommand, machines: Sequence[Machine], scans: Mapping[str, MachineScan]
) -> dict[str, MachineScan]:
    """A finding that a second scan does not confirm is no reason for a reboot."""
    to_confirm = [machine for machine in machines if _needs_repair(command, scans[machine.name].verdict)]
    if not to_confirm:
        return {}
    time.sleep(command.settings["gpunodes_repair_rescan_pause"])
    again = _scan(command, to_confirm)
    for name, seen in again.items():
        if not _needs_repair(command, seen.verdict):
            first, second = scans[name].verdict.action.value, seen.verdict.action.value
            command.report(name, f"not repaired: the second scan's action is {second}, not {first}")
    return again


def _scan_of_pools(
    command: RepairCommand, machines: Sequence[Machine], scans: Mapping[str, MachineScan]
) -> dict[str, MachineScan]:
    """Scan the other machines of the pools in which a machine is to be repaired: a pool is judged as a whole."""
    to_repair = [machine for machine in machines if _needs_repair(command, scans[machine.name].verdict)]
    others = [machine for machine in command.fleet.all_machines() if machine.name not in scans]
    if not to_repair or not others:
        return {}
    state = cluster_state.read(command, scans)
    pools = {policy.pool_name(node) for node, _ in (state.machines[machine.name] for machine in to_repair) if node}
    elsewhere = {node.name for node in state.nodes.values() if pools and policy.pool_name(node) not in pools}
    return _scan(command, [machine for machine in others if machine.name.lower() not in elsewhere])


def _needs_repair(command: RepairCommand, verdict: Verdict) -> bool:
    return verdict.action in command.request.limits.actions and verdict.state is not State.UNREACHABLE
