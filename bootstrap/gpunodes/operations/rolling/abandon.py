"""Forget an unfinished roll-out: give its nodes back, then delete its record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from gpunodes.engine import history, records
from gpunodes.engine.fleet import Fleet, match_nodes
from gpunodes.engine.history import EntryKind
from gpunodes.engine.leases.errors import Held
from gpunodes.engine.locks import Taken
from gpunodes.errors import GpunodesError, WrongInput, sentence
from gpunodes.operations.rolling import context, unfinished
from gpunodes.operations.rolling.context import Report, RolloutCommand
from gpunodes.repair import findings, verification
from gpunodes.repair.policy import Node
from gpunodes.rollout import record as recording
from gpunodes.rollout import state
from gpunodes.rollout.record import RolloutOutcome, RolloutRecord
from gpunodes.rollout.result import MachineRollout, RolloutResult


def abandon(fleet: Fleet, report: Report) -> RolloutResult:
    """Give the nodes of the unfinished roll-out back and forget it.

    A node on which the work was begun is given back if it is healthy; otherwise it is marked as needing repair. Raises
    Held if a command works on the roll-out, WrongInput if there is none.
    """
    with context.opened(fleet, "rollout abandon", report) as command:
        text = command.leases.take_rollout()
        try:
            nodes = [node for node in command.cluster.nodes() if node.rollout]
            if not text and not nodes:
                raise WrongInput("no roll-out is unfinished", "one", "see `gpunodes rollout status`")
            machines = _give_back_all(command, nodes, text)
            complete = all(each.outcome is not None for each in machines)
            command.leases.release_rollout(keep=not complete)
        except BaseException:
            with contextlib.suppress(GpunodesError):
                command.leases.release_rollout(keep=True)
            raise
        known = _parsed(text)
        ids = sorted({node.rollout for node in nodes})
        return RolloutResult(
            known.id if known else (ids[0] if ids else "unknown"), known.work if known else "", machines, complete
        )


def _parsed(text: str) -> state.Rollout | None:
    try:
        return state.parse(text)
    except ValueError:
        return None


def _give_back_all(command: RolloutCommand, nodes: list[Node], text: str) -> list[MachineRollout]:
    known = _parsed(text)
    found = unfinished.find(command, known.id, command.leases.observe()) if known else {}
    matches = match_nodes(command.fleet, command.cluster.nodes(), {}, confirmed=False)
    names = {match.node.name: name for name, match in matches.items() if match.node}
    by_node: Mapping[str, RolloutRecord] = {record.node: record for record in found.values()}
    marked = {node.name: node for node in nodes}
    results = []
    for name in [*marked, *(name for name in by_node if name not in marked)]:
        machine = by_node[name].machine if name in by_node else names.get(name, name)
        try:
            results.append(_give_back(command, name, machine, by_node.get(name)))
        except Exception as problem:
            why = f"its node was not given back: {sentence(problem)}"
            if not isinstance(problem, Held | Taken):
                command.leases.release_unused(name)
            command.report(machine, why)
            results.append(MachineRollout(machine, None, why))
    return results


def _give_back(command: RolloutCommand, name: str, machine: str, record: RolloutRecord | None) -> MachineRollout:
    """Give one node back under its lock; without a record it counts as changed, since nobody knows."""
    control_plane = command.is_control_plane(machine)
    with records.claimed(machine, command.fleet.cluster_name):
        stored = command.leases.take(name, None, alone=control_plane)
        with contextlib.suppress(ValueError):
            record = max((each for each in (recording.parse(stored), record) if each), key=lambda each: each.written)
        node, rollout = command.cluster.node(name), record.id if record else ""
        returned = node is not None and command.cluster.return_plugin(name)
        if returned:
            command.report(machine, "the device plugin returns to its node")
        if node is not None and node.rollout:
            rollout = node.rollout
            began = record is None or record.applied
            why = _unhealthy(command, machine, record, name, wait=returned) if began else ""
            # The check may have taken minutes.
            command.leases.confirm(name)
            if why:
                command.cluster.give_up(name, rollout, f"a roll-out was abandoned on it: {why}")
            command.cluster.end_rollout(name, rollout, command.now())
        else:
            why = ""
        outcome = RolloutOutcome.FAILED if why else RolloutOutcome.SKIPPED
        shown = f"it needs repair: {why}; then `gpunodes uncordon {machine}`" if why else "its node was given back"
        seconds = command.now() - record.started if record else 0.0
        history.note(
            machine,
            command.fleet.cluster_name,
            EntryKind.ROLLOUT,
            "abandon",
            outcome.value,
            shown,
            seconds=seconds,
            repair=rollout,
        )
        command.leases.release(name)
        if record:
            with contextlib.suppress(OSError):
                records.remove(_on_disk(record, machine, command.fleet.cluster_name), records.ROLLOUTS)
        command.report(machine, shown)
        return MachineRollout(machine, outcome, shown)


def _on_disk(record: RolloutRecord, machine: str, cluster: str) -> RolloutRecord:
    """The record under which this controller may have it; what a record in the cluster says is no path."""
    return record.to(record.stage, machine=machine, cluster=cluster)


def _unhealthy(command: RolloutCommand, machine: str, record: RolloutRecord | None, name: str, *, wait: bool) -> str:
    """What is wrong with the node ``name`` on which the work was begun, "" for nothing.

    Looked at once; with ``wait`` until its device plugin offers the GPUs.
    """
    deadline = time.monotonic() + (command.limits.verify if wait else 0)
    while True:
        node = command.cluster.node(name)
        capacity = record.capacity if record else node.expected if node else None
        why = verification.unready(node, capacity)
        if not why:
            break
        if time.monotonic() >= deadline:
            return why
        time.sleep(command.limits.poll)
    if machine not in command.machines:
        return "its machine is not in the inventory, and cannot be checked"
    seen = command.fleet.scan([command.machines[machine]], full=False)[machine]
    why, _ = verification.unhealthy(seen.verdict, seen.facts, record.gpus if record else None)
    return f"{why} ({findings.describe(seen.verdict)})" if why else ""
