"""The machines that a roll-out works on now, each in a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from gpunodes.errors import sentence
from gpunodes.model import Machine
from gpunodes.operations.rolling import stages
from gpunodes.operations.rolling.context import RolloutCommand
from gpunodes.operations.rolling.locking import claimed
from gpunodes.operations.rolling.stages import Tools
from gpunodes.operations.rolling.work import Target, Work
from gpunodes.repair.policy import Node
from gpunodes.rollout.record import RolloutOutcome, RolloutRecord, Stage
from gpunodes.rollout.result import MachineRollout

AT_ONCE = 32
"""Most machines that are worked on in parallel, whatever the budget: each may be a run of Ansible."""


class Running:
    """The machines that are worked on."""

    def __init__(self, command: RolloutCommand, work: Work, wait_for_jobs_s: float) -> None:
        self._command = command
        self._work = work
        self._wait_for_jobs_s = wait_for_jobs_s
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._running: dict[Future[RolloutRecord], RolloutRecord] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def full(self) -> bool:
        """Whether no further machine can be begun now."""
        return len(self._running) >= AT_ONCE

    def nodes(self) -> set[str]:
        """The nodes that are worked on."""
        return {record.node for record in self._running.values()}

    def machines(self) -> set[str]:
        """The machines that are worked on."""
        return {record.machine for record in self._running.values()}

    def start(
        self, machine: Machine, record: RolloutRecord, node: Node | None, confirm: Callable[[], None] = lambda: None
    ) -> None:
        """Lock a machine and work on it in a thread; raises GpunodesError if it may not be worked on now.

        ``confirm`` confirms the decision for it while the machine is locked, and raises Lost.
        """
        command = self._command
        with contextlib.ExitStack() as opened:
            record, lock = opened.enter_context(claimed(command, machine, record, confirm))
            claim = opened.pop_all()
        started = record

        def should_stop() -> bool:
            try:
                tools.check(started)
            except Exception:
                return True
            return False

        target = Target(machine, node, lambda text: command.report(machine.name, text), should_stop)
        tools = Tools(command, self._work, target, lock, self._wait_for_jobs_s)

        def work() -> RolloutRecord:
            with claim:
                return stages.run(tools, started)

        self._running[self._pool.submit(work)] = record

    def reap(self, timeout_s: float | None = None) -> list[MachineRollout]:
        """The results of machines that have ended; waits until one has, at most ``timeout_s``."""
        done, _ = wait(self._running, timeout_s, return_when=FIRST_COMPLETED)
        return [self._result(future) for future in done]

    def finish(self) -> list[MachineRollout]:
        """The results of all machines, when they have ended."""
        results: list[MachineRollout] = []
        while self._running:
            results += self.reap()
        self._pool.shutdown()
        return results

    def _result(self, future: Future[RolloutRecord]) -> MachineRollout:
        submitted = self._running.pop(future)
        seconds = self._command.now() - submitted.started
        try:
            record = future.result()
        except Exception as problem:
            why = f"{sentence(problem)}; `gpunodes rollout resume` continues"
            self._command.report(submitted.machine, why)
            self._command.leases.release_unfinished(submitted.node)
            return MachineRollout(submitted.machine, None, why, seconds)
        if record.stage is Stage.HOLD:
            self._command.leases.release_unfinished(record.node)
        return MachineRollout(record.machine, record.outcome or RolloutOutcome.SKIPPED, record.why, seconds)
