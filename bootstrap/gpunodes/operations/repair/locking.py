"""The locks of the repair of one machine: taken before it starts, and confirmed before each of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from gpunodes.engine import group_lock, locks, records
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.leases.errors import Unsure
from gpunodes.engine.leases.held import Leases
from gpunodes.errors import GpunodesError
from gpunodes.model import Machine, Role
from gpunodes.operations.repair import unfinished
from gpunodes.operations.repair.context import RepairCommand
from gpunodes.repair import resume
from gpunodes.repair.record import RepairRecord


class RepairLock:
    """The Lease of a machine under repair and, for a control plane, the SSH lock. Without ``leases`` nothing is held.

    ``stops_api``: the API does not respond while the machine boots, because too few other control planes are left. Then
    its Lease cannot be renewed, and its repair continues without.
    """

    def __init__(
        self,
        leases: Leases | None,
        ssh: group_lock.GroupLock | None = None,
        *,
        stops_api: bool = False,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._leases = leases
        self._ssh = ssh
        self._stops_api = stops_api
        self._report = report
        self._reported_unsure = False

    def check(self, record: RepairRecord) -> None:
        """Raise Lost or Unsure if the lock was lost, without a request: during a long stage."""
        if self._leases:
            with contextlib.suppress(*((Unsure,) if self._stops_api else ())):
                self._leases.check(record.node)

    def confirm(self, record: RepairRecord) -> None:
        """Renew the lock before an action, with the record in it; raises as ``check``."""
        if not self._leases:
            return
        lost = self._ssh.lost() if self._ssh else None
        if lost and not isinstance(lost, locks.Unresponsive):
            raise lost
        try:
            self._leases.write(record.node, record.text(), wait=not self._stops_api)
        except Unsure:
            if not self._stops_api:
                raise
            if not self._reported_unsure:
                self._report("the control plane itself is under repair: continuing without its lock until it responds")
            self._reported_unsure = True

    def release(self, record: RepairRecord) -> None:
        """Release the Lease, and delete the record in it."""
        if self._leases:
            self._leases.release(record.node)


@contextlib.contextmanager
def claimed(
    command: RepairCommand, machine: Machine, record: RepairRecord
) -> Iterator[tuple[RepairRecord, RepairLock]]:
    """Lock a machine for its repair; yields the record to continue from, and the lock.

    Inside no other command of this user repairs the machine. The Lease is released by the repair's last stage. Raises
    GpunodesError if another command holds a lock, or the machine must not be repaired.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(records.claimed(machine.name, record.cluster))
        if not command.leases or not command.cluster or not record.node:
            yield record, RepairLock(None)
            return
        control_plane = machine.role is Role.CONTROL_PLANE
        stops_api = control_plane and _stops_api(command.cluster)
        record = _take_lease(command, command.leases, command.cluster, record, alone=control_plane)
        ssh = _take_ssh_lock(command, command.leases, held, record) if control_plane else None
        yield (
            record,
            RepairLock(
                command.leases,
                ssh,
                stops_api=stops_api,
                report=lambda text: command.report(machine.name, text),
            ),
        )


def _stops_api(cluster: Cluster) -> bool:
    """Whether the API needs each of its control planes: a majority of them must be up for etcd."""
    total = sum(node.control_plane for node in cluster.nodes())
    return total - 1 <= total // 2


def _take_lease(
    command: RepairCommand, leases: Leases, cluster: Cluster, record: RepairRecord, *, alone: bool
) -> RepairRecord:
    """Lock a machine and check that it may still be repaired; the record to continue from. Raises GpunodesError."""
    stored = leases.take(record.node, record.text(), alone=alone)
    try:
        node = cluster.node(record.node)
        with contextlib.suppress(ValueError):
            before = unfinished.parse(command, stored) if stored else record
            record = record if resume.outdated(before, node) else resume.newer(record, before)
        if why := resume.forbidden(record, node, command.now()):
            raise GpunodesError(why)
    except BaseException:
        leases.release_unused(record.node)
        raise
    return record


def _take_ssh_lock(
    command: RepairCommand, leases: Leases, held: contextlib.ExitStack, record: RepairRecord
) -> group_lock.GroupLock | None:
    """The SSH lock while a control plane is repaired; None if too few of them have an sshd that responds."""
    try:
        return held.enter_context(command.fleet.lock(command.request.command, leases.holder))
    except locks.NoLock as error:
        command.report(record.machine, f"no SSH lock: {error.problem.found}")
        return None
    except BaseException:
        leases.release_unused(record.node)
        raise
