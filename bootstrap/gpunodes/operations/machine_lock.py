"""The lock on one machine while its node is worked on: taken before, and confirmed before each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from gpunodes.engine import group_lock, locks
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.fleet import Fleet
from gpunodes.engine.leases.errors import Unsure
from gpunodes.engine.leases.held import Leases


class NodeRecord(Protocol):
    """The state of the work on one machine, which its lock carries."""

    @property
    def node(self) -> str: ...
    def text(self) -> str:
        """The record as one line of JSON."""


class MachineLock:
    """The Lease of a machine and, for a control plane, the SSH lock. Without ``leases`` nothing is held.

    ``stops_api``: the API does not respond while the machine boots, because too few other control planes are left. Then
    its Lease cannot be renewed, and only work on it continues without.
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
        self.stops_api = stops_api
        self._report = report
        self._reported_unsure = False

    def check(self, record: NodeRecord) -> None:
        """Raise Lost or Unsure if the lock was lost, without a request: during a long stage."""
        if self._leases:
            with contextlib.suppress(*((Unsure,) if self.stops_api else ())):
                self._leases.check(record.node)

    def confirm(self, record: NodeRecord) -> None:
        """Renew the lock before an action, with the record in it; raises as ``check``."""
        if not self._leases:
            return
        lost = self._ssh.lost() if self._ssh else None
        if lost and not isinstance(lost, locks.Unresponsive):
            raise lost
        try:
            self._leases.write(record.node, record.text(), wait=not self.stops_api)
        except Unsure:
            if not self.stops_api:
                raise
            if not self._reported_unsure:
                self._report("the control plane itself is worked on: continuing without its lock until it responds")
            self._reported_unsure = True

    def release(self, record: NodeRecord) -> None:
        """Release the Lease, and delete the record in it."""
        if self._leases:
            self._leases.release(record.node)


def take_ssh_lock(
    fleet: Fleet, leases: Leases, command: str, held: contextlib.ExitStack, report: Callable[[str], None]
) -> group_lock.GroupLock | None:
    """The SSH lock while a control plane is worked on; None if too few of them have an sshd that responds."""
    try:
        return held.enter_context(fleet.lock(command, leases.holder))
    except locks.NoLock as error:
        report(f"no SSH lock: {error.problem.found}")
        return None


def needs_every_control_plane(cluster: Cluster) -> bool:
    """Whether the API needs each of its control planes: a majority of them must be up for etcd."""
    total = sum(node.control_plane for node in cluster.nodes())
    return total - 1 <= total // 2
