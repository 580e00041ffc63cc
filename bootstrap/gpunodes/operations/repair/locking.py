"""The locks of the repair of one machine: taken before it starts, and confirmed before each of its steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from gpunodes.engine import group_lock, records
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.fleet import ControlsMachine
from gpunodes.engine.leases.held import Leases
from gpunodes.errors import GpunodesError
from gpunodes.model import Machine, Role
from gpunodes.operations.machine_lock import MachineLock, needs_every_control_plane, take_ssh_lock
from gpunodes.operations.repair import unfinished
from gpunodes.operations.repair.context import RepairCommand
from gpunodes.repair import resume
from gpunodes.repair.record import RepairRecord


@contextlib.contextmanager
def claimed(
    command: RepairCommand,
    machine: Machine,
    control: ControlsMachine,
    record: RepairRecord,
    confirm: Callable[[], None],
) -> Iterator[tuple[RepairRecord, MachineLock]]:
    """Lock a machine for its repair; yields the record to continue from, and the lock.

    Inside no other command of this user repairs the machine. The Lease is released by the repair's last stage. Raises
    GpunodesError if another command holds a lock, or the machine must not be repaired, and as ``confirm``, which is
    called when the Lease is taken.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(records.claimed(machine.name, record.cluster))
        if not command.leases or not command.cluster or not record.node:
            yield record, MachineLock(None)
            return
        control_plane = machine.role is Role.CONTROL_PLANE
        stops_api = control_plane and needs_every_control_plane(command.cluster)
        stored = command.leases.take(record.node, record.text(), alone=control_plane, stops_api=stops_api)
        record = _continued(command, command.leases, command.cluster, control, record, stored, confirm)
        ssh = _take_ssh_lock(command, command.leases, held, record) if control_plane else None
        yield (
            record,
            MachineLock(
                command.leases,
                ssh,
                stops_api=stops_api,
                report=lambda text: command.report(machine.name, text),
            ),
        )


def _continued(
    command: RepairCommand,
    leases: Leases,
    cluster: Cluster,
    control: ControlsMachine,
    record: RepairRecord,
    stored: str,
    confirm: Callable[[], None],
) -> RepairRecord:
    """The record to continue from; the Lease, in which ``stored`` was, is released if the machine may not be repaired.

    Raises GpunodesError, and as ``confirm``.
    """
    try:
        # Another command that decides from now on sees the Lease; one before may have used the same budget.
        confirm()
        node = cluster.node(record.node)
        with contextlib.suppress(ValueError):
            before = unfinished.parse(command, stored) if stored else record
            record = record if resume.outdated(before, node) else resume.newer(record, before)
        if node and resume.outdated(record, node):
            # The kubelet of a machine that has just booted may not have reported that boot yet.
            node = dataclasses.replace(node, boot_id=control.boot().boot_id or node.boot_id)
        if why := resume.outdated(record, node) or resume.forbidden(record, node, command.now()):
            raise GpunodesError(why)
    except BaseException:
        leases.release_unused(record.node)
        raise
    return record


def _take_ssh_lock(
    command: RepairCommand, leases: Leases, held: contextlib.ExitStack, record: RepairRecord
) -> group_lock.GroupLock | None:
    """As ``take_ssh_lock``; the Lease is released if another command holds the SSH lock."""
    try:
        return take_ssh_lock(
            command.fleet,
            leases,
            command.request.command,
            held,
            lambda text: command.report(record.machine, text),
        )
    except BaseException:
        leases.release_unused(record.node)
        raise
