"""The lock of a command that finds no API: an SSH lock (engine/locks.py) on a majority of the control planes.

It is taken in the inventory's order on all control planes that respond. Two majorities share a machine, so only one
command has one. No command waits for another one: the first machine that another command has ends it, and it releases
all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.engine import locks
from gpunodes.engine.locks import Lock, NoLock, Unresponsive
from gpunodes.errors import GpunodesError


@dataclass(frozen=True, slots=True)
class Member:
    """A control plane, with its inventory variables."""

    name: str
    address: str
    variables: Mapping[str, Any]


class GroupLock:
    """A held lock on several machines."""

    def __init__(self, held: Mapping[str, Lock], total: int) -> None:
        self._held = held
        self._needed = total // 2 + 1

    def lost(self) -> GpunodesError | None:
        """Why the lock is lost, ``Unresponsive`` when it may be lost; None while a majority is held."""
        problems = [problem for lock in self._held.values() if (problem := lock.lost())]
        if len(self._held) - len(problems) >= self._needed:
            # Another command that takes one of them has no majority either.
            return None
        sure = [each for each in problems if not isinstance(each, Unresponsive)]
        maybe = len(self._held) - len(sure) >= self._needed
        return next((each for each in problems if isinstance(each, Unresponsive)), None) if maybe else sure[0]


@contextlib.contextmanager
def hold(members: Sequence[Member], command: str, holder: str = "", *, restarts: bool = False) -> Iterator[GroupLock]:
    """Hold the cluster's lock on its control planes ``members`` while inside; the other arguments as of ``locks.hold``.

    Raises Taken when another command holds it on one of them, and NoLock when no majority responds; then none is held.
    """
    with contextlib.ExitStack() as stack:
        held: dict[str, Lock] = {}
        failed: dict[str, NoLock] = {}
        for member in members:
            try:
                held[member.name] = stack.enter_context(
                    locks.hold(member.address, member.variables, command, holder, restarts=restarts)
                )
            except NoLock as error:
                failed[member.name] = error
        if len(held) <= len(members) // 2:
            raise _no_majority(failed, len(members))
        yield GroupLock(held, len(members))


def _no_majority(failed: Mapping[str, NoLock], total: int) -> NoLock:
    if total == 1:
        return next(iter(failed.values()))
    reasons = "; ".join(f"{name}: {error.problem.found}" for name, error in failed.items())
    return NoLock(
        f"{len(failed)} of {total} control planes do not respond, and another command may hold the cluster's lock "
        f"there: {reasons}",
        "a lock on a majority of them",
        "start them, or correct their SSH settings; remove a machine that is gone from the group control_plane",
    )
