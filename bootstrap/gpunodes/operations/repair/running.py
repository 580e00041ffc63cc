"""The repairs of one command, each in a thread, and the results for its machines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType

from gpunodes.engine import evidence
from gpunodes.engine.scans import MachineScan
from gpunodes.errors import GpunodesError, sentence
from gpunodes.health.model import Verdict
from gpunodes.model import Machine
from gpunodes.operations.repair import stages, tools
from gpunodes.operations.repair.context import RepairCommand
from gpunodes.operations.repair.locking import claimed
from gpunodes.operations.repair.tools import Tools
from gpunodes.repair.policy import Decision
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage
from gpunodes.repair.result import MachineRepair

AT_ONCE = 64
"""Most machines that one command repairs in parallel; budgets are mostly smaller."""


class Repairs:
    """The repairs that run, and the results. Used as a context manager: an exception stops the repairs that run.

    KeyboardInterrupt ends the context without an error; stopped repairs can be resumed.
    """

    def __init__(self, command: RepairCommand, scans: Mapping[str, MachineScan]) -> None:
        self._command = command
        self._scans = scans
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._stop = threading.Event()
        self._running: dict[Future[RepairRecord], RepairRecord] = {}
        self.results: dict[str, MachineRepair] = {}

    def __enter__(self) -> Repairs:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: object, trace: TracebackType | None) -> bool:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        try:
            if interrupted:
                self._command.report("", "stopping; unfinished repairs can be resumed")
            if kind is not None:
                self.interrupt()
        finally:
            self._pool.shutdown()
        return interrupted

    @property
    def interrupted(self) -> bool:
        """Whether the repairs were told to stop."""
        return self._stop.is_set()

    def busy(self) -> set[str]:
        """The machines under repair."""
        return {record.machine for record in self._running.values()}

    def nodes(self) -> set[str]:
        """The nodes under repair; with --without-cluster the machines, in lower case."""
        return {record.node or record.machine.lower() for record in self._running.values()}

    def control_plane_busy(self, name: str) -> bool:
        """Whether a machine must wait: the control plane is never repaired at the same time as other machines."""
        busy = self.busy()
        return bool(busy) and any(map(self._command.is_control_plane, (name, *busy)))

    def recovered(self, name: str) -> bool:
        """Whether this command has repaired a machine."""
        return name in self.results and self.results[name].outcome is RepairOutcome.REPAIRED

    def add(self, result: MachineRepair) -> None:
        """Add the result of a machine."""
        self.results[result.machine] = result

    def refuse(self, name: str, problem: Exception, repair: str = "") -> None:
        """Report an error that prevents the repair of a machine; it is the machine's result."""
        why = sentence(problem)
        self._command.report(name, why)
        self.add(MachineRepair(name, Decision.REFUSE, why, verdict=self._verdict(name), repair=repair))

    def start(self, machine: Machine, record: RepairRecord, confirm: Callable[[], None] = lambda: None) -> None:
        """Lock a machine and repair it in a thread; raises GpunodesError if another command holds the lock.

        ``confirm`` confirms the decision for it while the machine is locked, and raises Lost.
        """
        command = self._command

        def report(text: str) -> None:
            command.report(machine.name, text)

        control = command.fleet.machine_control(machine, named=record.named, report=report)
        with contextlib.ExitStack() as opened:
            record, lock = opened.enter_context(claimed(command, machine, control, record, confirm))
            claim = opened.pop_all()
        if record.stage is Stage.LOCK:
            record = record.to(Stage.COLLECT)
        used = Tools(
            machine=machine.name,
            control=control,
            lock=lock,
            scan=lambda: command.fleet.scan([machine], full=False)[machine.name],
            report=report,
            limits=tools.time_limits(command.settings),
            now=command.now,
            cluster=command.cluster if record.node else None,
            facts=self._scans[machine.name].facts if machine.name in self._scans else None,
            stop=self._stop,
        )

        def work() -> RepairRecord:
            with claim:
                return stages.run(used, record)

        self._running[self._pool.submit(work)] = record

    def reap(self) -> None:
        """Wait until a repair ends, and add its result."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            self._take(future)

    def finish(self) -> None:
        """Wait until all repairs end, and add their results."""
        while self._running:
            self.reap()

    def interrupt(self) -> None:
        """Stop the repairs before their next stage, and add their results."""
        self._stop.set()
        self.finish()

    def _take(self, future: Future[RepairRecord]) -> None:
        submitted = self._running.pop(future)
        verdict, folder = self._verdict(submitted.machine), _evidence(submitted.id)
        try:
            record = future.result()
        except Exception as problem:
            why = f"{sentence(problem)}; run the command again, or `gpunodes repair --resume`, to continue"
            self._command.report(submitted.machine, why)
            if self._command.leases and submitted.node:
                self._command.leases.release_unfinished(submitted.node)
            outcome = RepairOutcome.NOT_REPAIRED
            self.add(
                MachineRepair(
                    submitted.machine, Decision.REPAIR, why, outcome, verdict, repair=submitted.id, evidence=folder
                )
            )
            return
        self.add(
            MachineRepair(
                machine=record.machine,
                decision=Decision.NEEDS_REPAIR if submitted.stage is Stage.GIVE_UP else Decision.REPAIR,
                why=record.why or record.reason,
                outcome=record.outcome,
                verdict=verdict,
                step=record.step,
                repair=record.id,
                seconds=self._command.now() - record.started,
                evidence=folder,
            )
        )

    def _verdict(self, name: str) -> Verdict | None:
        return self._scans[name].verdict if name in self._scans else None


def _evidence(repair: str) -> str:
    """The folder with a repair's evidence, "" for none."""
    with contextlib.suppress(GpunodesError, OSError):
        found = evidence.folder(repair)
        return str(found) if found.is_dir() else ""
    return ""
