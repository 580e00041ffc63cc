"""What upgrades of machines' container runtimes would do. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpunodes.engine import events, journal, runner
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Machine, Phase, TaskEnded
from gpunodes.operations import phases, switched_off
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner import runtime_upgrade

PHASES: tuple[Phase, ...] = (phases.RUNTIME_PENDING,)
_PLAYBOOK = "runtime_pending.yml"


def run(inventory: Inventory, machines: Sequence[Machine], view: RunView) -> runtime_upgrade.RuntimePlans:
    """Read what is pending on ``machines``; raises GpunodesError if Ansible fails on the controller."""
    view.begin("runtime plan", machines)
    on, why = switched_off.split(inventory, machines, is_rolled_out=True)
    tracker = Tracker(on, PHASES, view)
    interrupted = False
    if on:
        play = runner.Play(_PLAYBOOK, inventory, [machine.name for machine in on])
        ended = runner.run(play, journal.open_run("runtime plan"), tracker.on_event)
        tracker.check_controller(ended)
        interrupted = ended.interrupted
    answers = tracker.answers.get(phases.RUNTIME_PENDING.name, {})
    why |= {name: events.cause(failure) for name, failure in tracker.failures.items()}
    found = [runtime_upgrade.planned(each.name, answers.get(each.name), why.get(each.name, "")) for each in machines]
    return runtime_upgrade.RuntimePlans(found, interrupted=interrupted)


def needed(inventory: Inventory, machine: Machine, folder: Path, should_stop: Callable[[], bool]) -> str | None:
    """What one machine needs, "" for nothing; None if ``should_stop`` became true. Its log is in ``folder``.

    Raises GpunodesError if the machine cannot be read.
    """
    answers: list[Any] = []
    failures: list[TaskEnded] = []

    def on_event(event: Event) -> None:
        if not isinstance(event, TaskEnded):
            return
        if event.outcome.is_failure:
            failures.append(event)
        elif event.machine == machine.name and event.phase == phases.RUNTIME_PENDING.name:
            answers.append(event.result.get(phases.RUNTIME_PENDING.name))

    ended = runner.run(runner.Play(_PLAYBOOK, inventory, [machine.name]), folder, on_event, should_stop)
    if ended.interrupted:
        return None
    why = events.cause(failures[0]) if failures else ended.error_text
    found = runtime_upgrade.planned(machine.name, answers[-1] if answers and not failures else None, why)
    if found.unreadable:
        raise GpunodesError(f"{found.unreadable}; the log is {ended.log}")
    return found.needed
