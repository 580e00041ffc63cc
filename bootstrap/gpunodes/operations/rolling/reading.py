"""What the machines of a roll-out report: before their turn what there is to do on them, and their health."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gpunodes.engine.scans import MachineScan
from gpunodes.errors import sentence
from gpunodes.health.model import State
from gpunodes.operations.cluster_state import ClusterState
from gpunodes.operations.rolling.context import RolloutCommand
from gpunodes.operations.rolling.work import Target, Work
from gpunodes.repair import findings

_READERS = 16
"""Machines whose state is read in parallel."""


def unhealthy(command: RolloutCommand, names: Collection[str], found: ClusterState, *, scan: bool) -> str:
    """What is wrong with the first of the machines that is not healthy, "" for nothing; ``scan``: they are scanned."""
    # One of a pool that scales is idle after its drain: that it was switched off says nothing of the work.
    names = [name for name in names if name not in found.off]
    machines = [command.machines[name] for name in names if name in command.machines]
    for machine in machines:
        node, why = found.machines[machine.name]
        if node is None or not node.ready or node.needs_repair:
            return f"{machine.name}: {why or (node and node.needs_repair) or 'its node is not ready'}"
    for name, seen in (command.fleet.scan(machines) if scan else {}).items():
        if seen.verdict.state.rank >= State.SICK.rank:
            return f"{name}: {findings.describe(seen.verdict)} ({seen.verdict.state.value})"
    return ""


class Reading:
    """The last scan of each machine, and whether its state could be read."""

    def __init__(self, command: RolloutCommand, work: Work) -> None:
        self._command = command
        self._work = work
        self.scans: dict[str, MachineScan] = {}
        self.forgotten: set[str] = set()
        """Machines whose last scan counts no longer."""
        self._unreadable: dict[str, str] = {}

    def scan(self, names: Collection[str]) -> None:
        """Scan machines."""
        if names:
            self.scans |= self._command.fleet.scan([self._command.machines[name] for name in names])
            self.forgotten.difference_update(names)

    def forget(self, names: Iterable[str]) -> None:
        """Forget the scans of machines: other commands work on them, and may reboot or repair them."""
        for name in names:
            self.scans.pop(name, None)
            self.forgotten.add(name)

    def needed(self, targets: Sequence[Target]) -> list[str | None]:
        """What each machine needs; None if that cannot be read."""
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(self._needed, targets))

    def trouble(self, name: str) -> str:
        """Why a machine must not be begun, "" if it may, or its scan was forgotten."""
        if name in self.forgotten:
            return ""
        verdict = self.scans[name].verdict if name in self.scans else None
        if verdict and verdict.state.rank >= State.SICK.rank:
            return f"it is not healthy: {findings.describe(verdict)} ({verdict.state.value})"
        return self._unreadable.get(name, "")

    def _needed(self, target: Target) -> str | None:
        self._unreadable.pop(target.name, None)
        try:
            return self._work.needed(target)
        except Exception as problem:
            self._unreadable[target.name] = f"its state cannot be read: {sentence(problem)}"
            return None
