"""The lock of one machine of a roll-out, taken before its first stage."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from gpunodes.engine import group_lock, records
from gpunodes.errors import GpunodesError
from gpunodes.model import Machine, Role
from gpunodes.operations.machine_lock import MachineLock, needs_every_control_plane, take_ssh_lock
from gpunodes.operations.rolling.context import RolloutCommand
from gpunodes.repair import record as repair_record
from gpunodes.rollout import policy
from gpunodes.rollout import record as recording
from gpunodes.rollout.record import RolloutRecord


@contextlib.contextmanager
def claimed(
    command: RolloutCommand, machine: Machine, record: RolloutRecord, confirm: Callable[[], None]
) -> Iterator[tuple[RolloutRecord, MachineLock]]:
    """Lock a machine; yields the record to continue from, and the lock.

    Inside no other command of this user works on the machine. The Lease is released by the last stage. Raises
    GpunodesError if another command holds a lock, or the machine must not be worked on, and as ``confirm``, which is
    called when the Lease is taken.
    """
    leases = command.leases
    with contextlib.ExitStack() as held:
        held.enter_context(records.claimed(machine.name, record.cluster))
        control_plane = machine.role is Role.CONTROL_PLANE
        stops_api = control_plane and needs_every_control_plane(command.cluster)
        # The record in the Lease stays until the first stage is written: it may be that of an unfinished repair.
        stored = leases.take(record.node, None, alone=control_plane, stops_api=stops_api)
        ssh: group_lock.GroupLock | None = None
        try:
            # Another command that decides from now on sees the Lease; one before may have used the same budget.
            confirm()
            record = _continued(command, record, stored)
            if control_plane:
                ssh = take_ssh_lock(
                    command.fleet, leases, command.name, held, lambda text: command.report(machine.name, text)
                )
        except BaseException:
            leases.release_unused(record.node)
            raise
        yield (
            record,
            MachineLock(
                leases,
                ssh,
                stops_api=stops_api,
                report=lambda text: command.report(machine.name, text),
            ),
        )


def _continued(command: RolloutCommand, record: RolloutRecord, stored: str) -> RolloutRecord:
    """The record to continue from, after a check that the machine may be worked on now. Raises GpunodesError."""
    with contextlib.suppress(ValueError):
        repair = repair_record.parse(stored)
        raise GpunodesError(
            f"an unfinished repair ({repair.id}) holds it", "a machine without one", "run `gpunodes repair --resume`"
        )
    node, now = command.cluster.node(record.node), command.now()
    if why := policy.forbidden(node, record.id, now):
        if not record.applied or policy.in_maintenance(node, now):
            raise GpunodesError(why)
        command.report(record.machine, why)
    with contextlib.suppress(ValueError):
        before = recording.parse(stored)
        if before.id == record.id and before.node == record.node and before.applied:
            # Another command began the work here: the node is given back only after a verification.
            record = dataclasses.replace(record, applied=True)
    return record
