"""Repairs that a command left unfinished: records of this user, Leases whose holder is dead, and forgotten cordons."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gpunodes.engine import history, records
from gpunodes.engine.fleet import match_nodes, unmatched
from gpunodes.engine.leases.objects import ObservedLease, lock_name
from gpunodes.errors import GpunodesError, sentence
from gpunodes.identity.matcher import Match
from gpunodes.operations.repair.context import RepairCommand
from gpunodes.repair import record as recording
from gpunodes.repair import resume
from gpunodes.repair.policy import Node
from gpunodes.repair.record import RepairOutcome, RepairRecord

Records = dict[str, RepairRecord]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Unfinished repairs, by machine."""

    records: Mapping[str, RepairRecord] = field(default_factory=dict)
    mismatched: Mapping[str, str] = field(default_factory=dict)
    """Machines whose repair was started for a node that is not theirs, and why."""


def find(command: RepairCommand, names: Collection[str] | None = None) -> Unfinished:
    """The unfinished repairs of the machines with these names, by default of all; those not to resume are dropped.

    A plan drops none, and has none of those that another command works on: it is refused as any machine under repair.
    """
    found = records.read(command.fleet.cluster_name)
    mismatched: dict[str, str] = {}
    _drop_outdated(command, found, resume.without_cluster)
    if command.leases and command.cluster:
        locks = command.leases.observe()
        _add_from_locks(command, found, locks)
        live = {seen.name for seen in locks if seen.live}
        if command.request.dry_run:
            found = {name: record for name, record in found.items() if lock_name(record.node) not in live}
        nodes = command.cluster.nodes()
        by_name = {node.name: node for node in nodes}

        def outdated(record: RepairRecord) -> str:
            node = by_name.get(record.node)
            why = resume.outdated(record, node) if record.node else ""
            return why or (resume.without_budget(record, node) if lock_name(record.node) not in live else "")

        _drop_outdated(command, found, outdated)
        matches = _matches(command, found, nodes)
        _add_forgotten(command, found, nodes, locks, matches)
        mismatched = _mismatched(found, matches)
    chosen = {name: record for name, record in found.items() if names is None or name in names}
    return Unfinished(chosen, mismatched)


def parse(command: RepairCommand, text: str) -> RepairRecord:
    """The repair that another command stored in its lock; raises ValueError.

    The cluster is not trusted to choose another cluster's records, or to mark the machine as named by the user.
    """
    return dataclasses.replace(recording.parse(text), cluster=command.fleet.cluster_name, named=False)


def _add_from_locks(command: RepairCommand, found: Records, locks: Sequence[ObservedLease]) -> None:
    for seen in locks:
        if seen.live or not seen.record:
            continue
        with contextlib.suppress(ValueError):
            record = parse(command, seen.record)
            if lock_name(record.node) != seen.name:
                continue  # gpunodes never writes such a record
            # The record on disk is written before that in the lock: for the same repair it is the newer one.
            if found.get(record.machine, record).id != record.id or record.machine not in found:
                found[record.machine] = record


def _drop_outdated(command: RepairCommand, found: Records, outdated: Callable[[RepairRecord], str]) -> None:
    """Drop the repairs that must not be resumed: those of which ``outdated`` tells why."""
    for name, record in list(found.items()):
        if why := outdated(record):
            del found[name]
            command.report(name, f"its repair {record.id} is not resumed: {why}")
            if command.request.dry_run:
                continue
            try:
                _drop(command, record, why)
            except Exception as problem:
                # The other machines go on; it is dropped again by the next command.
                command.report(name, f"its record stays: {sentence(problem)}")


def _drop(command: RepairCommand, record: RepairRecord, why: str) -> None:
    """Drop a repair that must not be resumed: the machine is judged again."""
    # Not while another command of this user goes on with it, and may reset GPUs.
    with records.claimed(record.machine, record.cluster):
        # The history first: a repair in neither the records nor the history would be forgotten.
        outcome = RepairOutcome.NOT_REPAIRED.value
        cluster = command.fleet.cluster_name
        history.note(record.machine, cluster, history.EntryKind.END, "repair", outcome, why, repair=record.id)
        records.remove(record)
        if command.cluster and record.node:
            with contextlib.suppress(GpunodesError):
                command.cluster.forget(record.node, record.id)
    if command.leases and record.node:
        # Another command may hold it by now, and keeps it.
        with contextlib.suppress(GpunodesError):
            stored = command.leases.take(record.node)
            # Another repair, or a roll-out, may have left its record there since.
            with contextlib.suppress(ValueError):
                if recording.parse(stored).id == record.id:
                    command.leases.release(record.node)
            command.leases.release_unused(record.node)


def _matches(command: RepairCommand, found: Records, nodes: Sequence[Node]) -> dict[str, Match]:
    """The nodes of all machines; those with an unfinished repair are scanned, since they may be in another boot."""
    again = [machine for machine in command.fleet.all_machines() if machine.name in found]
    return match_nodes(command.fleet, nodes, command.fleet.scan(again) if again else {})


def _add_forgotten(
    command: RepairCommand,
    found: Records,
    nodes: Sequence[Node],
    locks: Sequence[ObservedLease],
    matches: Mapping[str, Match],
) -> None:
    """Add the repairs of nodes that a repair cordoned and that have neither a record nor a lock."""
    known = {record.node for record in found.values()}
    locked = {seen.name for seen in locks}
    names_of = {match.node.name: name for name, match in matches.items() if match.node}
    for node in nodes:
        if lock_name(node.name) in locked or node.name in known:
            continue
        if node.cordoned_by_repair and not node.needs_repair:
            name = names_of.get(node.name, node.name)
            found.setdefault(name, resume.of_cordon(node, name, command.fleet.cluster_name, command.now()))


def _mismatched(found: Mapping[str, RepairRecord], matches: Mapping[str, Match]) -> dict[str, str]:
    mismatched = {}
    for name, record in found.items():
        match = matches.get(name)
        if not record.node or not match or (match.node and match.node.name == record.node):
            continue
        actual = f"the machine is the node {match.node.name}" if match.node else unmatched(match)
        mismatched[name] = f"its repair was started for the node {record.node}, but {actual}"
    return mismatched
