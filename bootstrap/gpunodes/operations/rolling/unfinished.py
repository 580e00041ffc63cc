"""What another command left of a roll-out: the records of its machines, on this controller and in their Leases."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from gpunodes.engine import records
from gpunodes.engine.leases.objects import ObservedLease, lock_name
from gpunodes.operations.rolling.context import RolloutCommand
from gpunodes.operations.rolling.work import Work
from gpunodes.repair.policy import Node
from gpunodes.rollout import flow
from gpunodes.rollout import record as recording
from gpunodes.rollout.record import Disruption, RolloutRecord


def find(
    command: RolloutCommand, rollout: str, locks: Sequence[ObservedLease], *, live: bool = False
) -> dict[str, RolloutRecord]:
    """The records of a roll-out's machines, by machine; with ``live`` also of those that another command works on.

    Of two of a machine, on this controller and in its Lease, the later one: other controllers may have gone on since.
    """
    on_disk = records.read_kind(command.fleet.cluster_name, records.ROLLOUTS, recording.parse)
    found = {name: record for name, record in on_disk.items() if record.id == rollout}
    busy = {seen.name for seen in locks if seen.live}
    for seen in locks:
        with contextlib.suppress(ValueError):
            record = recording.parse(seen.record)
            if record.id != rollout or lock_name(record.node) != seen.name:
                continue  # another roll-out's; or gpunodes never writes such a record
            # The same command writes to disk first: then the record there may be the newer one.
            if seen.live or record.machine not in found or record.written > found[record.machine].written:
                found[record.machine] = dataclasses.replace(record, cluster=command.fleet.cluster_name)
    return {name: record for name, record in found.items() if live or lock_name(record.node) not in busy}


def left(command: RolloutCommand, rollout: str, nodes: Mapping[str, Node | None]) -> dict[str, RolloutRecord]:
    """As ``find`` with ``live``, without machines on which the roll-out has ended well, by their ``nodes``.

    The command was killed between the release of such a machine's Lease and the removal of its file, which is removed.
    """
    locks = command.leases.observe()
    found, leased = find(command, rollout, locks, live=True), {seen.name for seen in locks if seen.record}
    for name, node in nodes.items():
        ended = node is not None and node.rolled_out == rollout != node.rollout and lock_name(node.name) not in leased
        if ended and name in found:
            records.remove(found.pop(name), records.ROLLOUTS)
    return found


def to_resume(
    command: RolloutCommand, work: Work, rollout: str, nodes: Sequence[Node], matches: Mapping[str, Node | None]
) -> dict[str, RolloutRecord]:
    """The records of machines that were changed, to continue from, by machine; the others are chosen again.

    Those that another command has locked are left out. What a record says of the work is replaced by what its class
    says.
    """
    locks = command.leases.observe()
    found, busy = find(command, rollout, locks), {seen.name for seen in locks if seen.live}
    by_machine = {node.name: name for name, node in matches.items() if node and lock_name(node.name) not in busy}
    for node in nodes:
        if node.rollout == rollout and node.name in by_machine and by_machine[node.name] not in found:
            # Its Lease was deleted: what was done on it is not known.
            found[by_machine[node.name]] = dataclasses.replace(
                new_record(command, work, rollout, by_machine[node.name], node), applied=True
            )
    # A record on this controller alone, without a mark on the node: another one has ended the work and given it back.
    leased = {seen.name for seen in locks if seen.record}
    return {
        name: flow.resumed(dataclasses.replace(record, work=work.name, disrupts=work.disrupts, undoes=work.undoes))
        for name, record in found.items()
        if ((match := matches.get(name)) and match.rollout == rollout)
        or (record.applied and lock_name(record.node) in leased)
    }


def new_record(command: RolloutCommand, work: Work, rollout: str, machine: str, node: Node) -> RolloutRecord:
    """The record of a machine that is begun."""
    return RolloutRecord(
        id=rollout,
        work=work.name,
        machine=machine,
        cluster=command.fleet.cluster_name,
        node=node.name,
        disrupts=Disruption(work.disrupts),
        started=float(int(command.now())),
        undoes=work.undoes,
        capacity=node.expected,
    )
