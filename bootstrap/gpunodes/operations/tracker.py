"""Follows a run: derives each machine's current phase and its result from the stream of events."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpunodes.engine.events import cause
from gpunodes.engine.runner import PlayResult
from gpunodes.errors import GpunodesError
from gpunodes.model import Event, Machine, MachineResult, Outcome, Phase, PreflightFinding, TaskEnded
from gpunodes.operations.phases import what_runs

_ANSWERS = {
    "settings": ("host_facts",),
    "cluster": ("cluster", "unresponsive", "kubelet_settings"),
    "status": ("cluster", "etcd", "has_virtual_address"),
    "control_plane": ("control_plane_drift",),
    "certificate_ends": ("certificates",),
    "gpu_machine": ("gpu_levels",),
    "gpu_node": ("gpu_nodes",),
    "burn_in": ("burn_in", "nccl"),
    "os_pending": ("os_pending",),
    "runtime_pending": ("runtime_pending",),
    "upgrade_facts": ("upgrade_facts",),
}
"""The keys of a role's result that the command line reads. A machine may add other keys to any result."""
NCCL_TASK = "Test NCCL between the nodes"
_TASKS = {"nccl": NCCL_TASK}
"""The task whose result a key is read from, where its value counts for other machines, too."""

_CONTROLLER = "controller"
"""The role whose tasks check the controller."""


class RunView(Protocol):
    """A view of a run in progress."""

    def begin(self, title: str, machines: Sequence[Machine]) -> None:
        """A run on ``machines`` begins."""

    def phase(self, machine: str, phase: Phase, number: int = 0, total: int = 0) -> None:
        """A machine enters a phase, the ``number``-th of the ``total`` that apply to it; 0 where they are unknown."""

    def task(self, machine: str, task: str) -> None:
        """A machine starts a task of its phase; "" when the task ends."""

    def findings(self, findings: Sequence[PreflightFinding]) -> None:
        """Preflight or the locks reported these findings."""

    def ended(self, result: MachineResult) -> None:
        """A machine failed, or the run ended for it."""


class Unseen:
    """A view that shows nothing: of a machine that is read inside of a command with lines of its own."""

    def begin(self, title: str, machines: Sequence[Machine]) -> None:
        """Nothing, as the others."""

    def phase(self, machine: str, phase: Phase, number: int = 0, total: int = 0) -> None:
        pass

    def task(self, machine: str, task: str) -> None:
        pass

    def findings(self, findings: Sequence[PreflightFinding]) -> None:
        pass

    def ended(self, result: MachineResult) -> None:
        pass


@dataclass(slots=True)
class _State:
    started: float
    phase: str = ""
    seen: set[str] = field(default_factory=set)
    busy: bool = False
    """A task runs on it."""
    failure: TaskEnded | None = None
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    last: float = 0.0


class Tracker:
    """The state of every machine of a run."""

    def __init__(
        self,
        machines: Sequence[Machine],
        phases: Sequence[Phase],
        view: RunView,
        not_applicable: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """``not_applicable``: the machines to which a phase does not apply, by its name."""
        now = time.monotonic()
        self._machines = {machine.name: _State(started=now) for machine in machines}
        self._phases = {phase.name: phase for phase in phases}
        self._view = view
        self._not_applicable = not_applicable or {}
        self.answers: dict[str, dict[str, Any]] = {}
        """The results of tasks under the keys that the command line reads, by key and machine."""
        self.answered_at: dict[str, float] = {}
        """The controller's time when a machine's facts arrived, in seconds since 1970."""
        self.asked_at: dict[str, float] = {}
        """The same when the task that reads them started on the machine."""
        self.failures: dict[str, TaskEnded] = {}
        """The first failure of every machine, including machines that were not selected."""

    def on_event(self, event: Event) -> None:
        """Process one event."""
        state = self._machines.get(event.machine)
        if isinstance(event, TaskEnded):
            self._keep(event)
            if event.outcome.is_failure:
                self.failures.setdefault(event.machine, event)
        if state is None:
            return
        state.last = time.monotonic()
        state.busy = not isinstance(event, TaskEnded)
        if event.phase in self._phases and self._applies(event):
            state.seen.add(event.phase)
            if event.phase != state.phase:
                state.phase = event.phase
                self._view.phase(event.machine, self._phases[event.phase], *self._position(event))
            self._view.task(event.machine, "" if isinstance(event, TaskEnded) else what_runs(event.task))
        if isinstance(event, TaskEnded):
            state.notes += event.notes
            if event.outcome is Outcome.CHANGED and event.task not in state.changes:
                state.changes.append(event.task)
            if event.outcome.is_failure and state.failure is None:
                state.failure = event

    def works_on(self, machine: str) -> bool:
        """Whether a task runs on a machine now."""
        return machine in self._machines and self._machines[machine].busy

    def _applies(self, event: Event) -> bool:
        """Whether the event's phase applies to its machine: Ansible also starts tasks that it then skips."""
        return event.machine not in self._not_applicable.get(event.phase, ())

    def _position(self, event: Event) -> tuple[int, int]:
        """The number of the event's phase among those that apply to its machine, and their total."""
        names = self._phases_of(event.machine)
        return names.index(event.phase) + 1, len(names)

    def _phases_of(self, machine: str) -> list[str]:
        """The names of the phases that apply to a machine, in order."""
        return [name for name in self._phases if machine not in self._not_applicable.get(name, ())]

    def check_controller(self, ended: PlayResult) -> None:
        """Raise GpunodesError for a run that failed on the controller: no machine is the cause, and none is reported.

        Either Ansible itself failed, or the role `controller`, whose tasks Ansible reports for every machine.
        """
        own = [failure for failure in self.failures.values() if failure.phase == _CONTROLLER]
        if ended.ok or ended.interrupted or (self.failures and not own):
            return
        raise GpunodesError(
            cause(own[0]) if own else ended.error_text,
            "an Ansible that runs on this controller",
            f"correct that on the controller, then run the same command again; the log is {ended.log}",
        )

    def results(self, *, ok: bool, interrupted: bool = False, error_text: str = "") -> list[MachineResult]:
        """The result of every machine.

        ``ok`` is Ansible's own result: if true, every failure was handled. ``error_text`` is Ansible's error for a run
        that failed without a failure on a machine.
        """
        first = next(iter(self.failures.values()), None)
        stopped = f"stopped because {first.machine} failed: {cause(first)}" if first else error_text
        results = []
        for name, state in self._machines.items():
            # Ansible may stop before a machine has finished, because of another machine's failure.
            finished = first is not None and state.seen.issuperset(self._phases_of(name)[-1:])
            if not ok and state.failure is not None:
                outcome, phase, why = state.failure.outcome, state.failure.phase or state.phase, cause(state.failure)
            elif interrupted:
                outcome, phase, why = Outcome.FAILED, state.phase, "interrupted; run the command again to continue"
            elif not ok and not finished:
                outcome, phase, why = Outcome.FAILED, state.phase, stopped
            elif not state.last:
                # The plugin of a dynamic inventory listed it before.
                why = "Ansible did not find it in the inventory again; run the command again"
                outcome, phase = Outcome.FAILED, ""
            else:
                outcome, phase, why = (Outcome.CHANGED if state.changes else Outcome.UNCHANGED), "", ""
            seconds = (state.last or time.monotonic()) - state.started
            results.append(MachineResult(name, outcome, seconds, phase, why, tuple(state.changes), tuple(state.notes)))
        for result in results:
            self._view.ended(result)
        return results

    def _keep(self, event: TaskEnded) -> None:
        for key in _ANSWERS.get(event.phase, ()):
            value = event.result.get(key)
            if value is not None and _TASKS.get(key, event.task) == event.task:
                self.answers.setdefault(key, {})[event.machine] = value
                self.answered_at[event.machine] = time.time()
                self.asked_at[event.machine] = time.time() - event.seconds
