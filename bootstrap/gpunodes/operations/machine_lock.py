"""The lock on one machine while its node is worked on: taken before, and confirmed before each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from gpunodes.engine import locks
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

    The Lease of a control plane cannot be renewed while it boots: only work on it continues without.
    """

    def __init__(
        self,
        leases: Leases | None,
        ssh: locks.Lock | None = None,
        *,
        control_plane: bool = False,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._leases = leases
        self._ssh = ssh
        self._control_plane = control_plane
        self._report = report
        self._reported_unsure = False

    def check(self, record: NodeRecord) -> None:
        """Raise Lost or Unsure if the lock was lost, without a request: during a long stage."""
        if self._leases:
            with contextlib.suppress(*((Unsure,) if self._control_plane else ())):
                self._leases.check(record.node)

    def confirm(self, record: NodeRecord) -> None:
        """Renew the lock before an action, with the record in it; raises as ``check``."""
        if not self._leases:
            return
        lost = self._ssh.lost() if self._ssh else None
        if lost and not isinstance(lost, locks.Unresponsive):
            raise lost
        try:
            self._leases.write(record.node, record.text(), wait=not self._control_plane)
        except Unsure:
            if not self._control_plane:
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
) -> locks.Lock | None:
    """The SSH lock while a control plane is worked on; None if its sshd does not respond either."""
    try:
        return held.enter_context(fleet.lock(command, leases.holder))
    except locks.NoLock as error:
        report(f"no SSH lock: {error.problem.found}")
        return None
