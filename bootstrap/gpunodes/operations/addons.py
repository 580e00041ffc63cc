"""The add-ons of a cluster: the network add-on and the device plugin, brought to the versions of this gpunodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from gpunodes.engine import control_planes, events, journal, runner
from gpunodes.engine.fleet import Fleet
from gpunodes.errors import GpunodesError, Interrupted
from gpunodes.inventory import Inventory
from gpunodes.model import Event, TaskEnded
from gpunodes.operations.rolling import commands, context
from gpunodes.operations.rolling.context import Report
from gpunodes.planner import reports
from gpunodes.planner.addons import PlannedAddon, planned

_PLAYBOOK = "addons.yml"


def plan(inventory: Inventory) -> list[PlannedAddon]:
    """The installed add-ons with what would change; raises GpunodesError if the cluster cannot be read."""
    found: list[PlannedAddon] = []
    for answer in _run(inventory, "pending", "the add-ons cannot be read"):
        if problem := reports.addons_problem(answer):
            raise GpunodesError(
                f"the control plane's report of the add-ons is invalid: {problem}",
                "a report of the module addon_pending",
                "check that the machine and its API server are yours",
            )
        found += map(planned, answer)
    return found


def upgrade(fleet: Fleet, inventory: Inventory, report: Report) -> None:
    """Bring the network add-on and the device plugin to the versions of this gpunodes, while no roll-out can begin.

    Raises WrongInput if a roll-out is unfinished, and GpunodesError with the nodes on which an add-on does not run:
    then it is as before. Raises Lost if another command may have begun a roll-out meanwhile.
    """
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(context.opened(fleet, "addons upgrade", report))
        commands.check_finished(stack.enter_context(commands.locked(opened)))
        report("", "updating the network add-on and the device plugin")
        _run(inventory, "addons", "the add-ons were not updated", opened.leases.lost)


def _run(
    inventory: Inventory, tag: str, failed: str, lost: Callable[[], GpunodesError | None] = lambda: None
) -> list[Any]:
    """Run the playbook with a tag; what it reports about add-ons. Raises GpunodesError if it fails.

    ``lost`` returns why the lock is lost, None while it is held: it is asked all the time.
    """
    control = control_planes.choose(inventory).machine
    answers: list[Any] = []
    failures: list[TaskEnded] = []

    def on_event(event: Event) -> None:
        if isinstance(event, TaskEnded):
            if event.outcome.is_failure:
                failures.append(event)
            elif event.machine == control.name and "addons" in event.result:
                answers.append(event.result["addons"])

    play = runner.Play(_PLAYBOOK, inventory, [control.name], tags=[tag], control=control.name)
    ended = runner.run(play, journal.open_run(f"addons {tag}"), on_event, lambda: lost() is not None)
    if ended.interrupted:
        raise lost() or Interrupted
    if not ended.ok:
        raise GpunodesError(
            f"{failed}: {events.cause(failures[0]) if failures else ended.error_text}",
            "add-ons of this gpunodes",
            f"run the same command again; the log is {ended.log}",
        )
    return answers
