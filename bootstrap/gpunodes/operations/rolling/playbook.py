"""A work that is an Ansible playbook, with the tags prepare, apply, verify and undo."""

from __future__ import annotations

import abc
import itertools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpunodes.engine import events, journal, runner
from gpunodes.engine.runner import Play, PlayResult
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Event, TaskEnded, TaskStarted
from gpunodes.operations.phases import LONG_TASKS
from gpunodes.operations.rolling.work import Stopped, Target
from gpunodes.rollout.record import Disruption


class PlaybookWork(abc.ABC):
    """A work that runs a playbook of gpunodes for one machine, once for each stage, with the tag of that stage.

    A class of it says what is ``needed``. ``variables`` enter the plays sealed, as all settings of a run do; they must
    hold no secrets. Tasks that each stage needs, such as the role settings, have the tag ``always``.
    """

    def __init__(
        self,
        inventory: Inventory,
        name: str,
        playbook: str,
        disrupts: Disruption,
        *,
        parameters: Mapping[str, str],
        variables: Mapping[str, Any],
        undoes: bool = False,
    ) -> None:
        self.name = name
        self.disrupts = disrupts
        self.parameters = parameters
        self.undoes = undoes
        self._inventory = inventory
        self._playbook = playbook
        self._variables = variables
        self._folder: Path | None = None
        self._mutex = threading.Lock()
        self._numbers = itertools.count(1)

    @abc.abstractmethod
    def needed(self, target: Target) -> str:
        """As ``Work.needed``."""

    def prepare(self, target: Target) -> None:
        """Run the tasks with the tag prepare."""
        self._require(target, "prepare")

    def apply(self, target: Target) -> None:
        """Run the tasks with the tag apply."""
        self._require(target, "apply")

    def verify(self, target: Target) -> str:
        """Run the tasks with the tag verify; the first cause of a failure."""
        return self._run(target, "verify")

    def undo(self, target: Target) -> None:
        """Run the tasks with the tag undo."""
        self._require(target, "undo")

    def _require(self, target: Target, stage: str) -> None:
        if why := self._run(target, stage):
            raise GpunodesError(why)

    def _run(self, target: Target, stage: str) -> str:
        """Run one stage; the first cause of its failure, "" for none. Raises Stopped."""
        failures: list[TaskEnded] = []

        def on_event(event: Event) -> None:
            if isinstance(event, TaskEnded) and event.outcome.is_failure:
                failures.append(event)
            elif isinstance(event, TaskEnded) and event.machine == target.name:
                # What it did otherwise than it was asked to, such as a kernel that it holds.
                for note in dict.fromkeys(event.notes):
                    target.report(note)
            elif isinstance(event, TaskStarted) and event.machine == target.name and event.task in LONG_TASKS:
                target.report(LONG_TASKS[event.task])

        play = Play(self._playbook, self._inventory, [target.name], variables=self._variables, tags=[stage])
        ended = runner.run(play, self._own_folder(target, stage), on_event, target.should_stop)
        if ended.interrupted:
            raise Stopped
        return "" if ended.ok else _why(ended, failures)

    def _own_folder(self, target: Target, stage: str) -> Path:
        with self._mutex:
            self._folder = self._folder or journal.open_run(f"rollout-{self.name}")
        # Several machines run at once, and a stage may run again.
        folder = self._folder / f"{next(self._numbers):05}-{target.name}-{stage}"
        folder.mkdir(mode=0o700)
        return folder


def _why(ended: PlayResult, failures: list[TaskEnded]) -> str:
    return f"{events.cause(failures[0]) if failures else ended.error_text}; the log is {ended.log}"
