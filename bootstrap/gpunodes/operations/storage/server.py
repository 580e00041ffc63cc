"""The machine of the group storage: it may be a node of the cluster, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from gpunodes.engine import control_planes, events, journal, runner
from gpunodes.errors import GpunodesError, Interrupted
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Machine, MachineResult, Outcome, Role, TaskEnded
from gpunodes.operations import claims
from gpunodes.planner import reports

_PLAYBOOK = "storage_server.yml"


def run(
    inventory: Inventory, machine: Machine, command: str, *, state: str, dry_run: bool
) -> tuple[Mapping[str, Any], MachineResult]:
    """Let the machine serve the shares, or undo that; returns its facts, {} for invalid ones, and its result.

    Raises GpunodesError with the first cause, or if another command works on it.
    """
    control = control_planes.choose(inventory).machine
    failures: list[TaskEnded] = []
    changed: list[str] = []
    notes: list[str] = []
    facts: dict[str, Any] = {}

    def on_event(event: Event) -> None:
        if not isinstance(event, TaskEnded):
            return
        if event.outcome.is_failure:
            failures.append(event)
        elif event.machine == machine.name and event.outcome is Outcome.CHANGED:
            changed.append(event.task)
        if event.machine == machine.name:
            notes.extend(event.notes)
        found = event.result.get("host_facts")
        if event.machine == machine.name and isinstance(found, Mapping) and not reports.machine_problem(found):
            facts.update(found)

    names = list(dict.fromkeys([control.name, machine.name]))
    play = runner.Play(
        _PLAYBOOK, inventory, names, variables={"nfs_server_state": state}, control=control.name, check=dry_run
    )
    with _claimed(inventory, machine, command, dry_run=dry_run) as claim:
        folder = journal.open_run(f"{command} server")
        ended = runner.run(play, folder, on_event, lambda: bool(claim and claim.lost(at_work=True)))
        if ended.interrupted:
            raise (claim.lost(at_work=True) if claim else None) or Interrupted
    if not ended.ok:
        cause = f"{failures[0].machine}: {events.cause(failures[0])}" if failures else ended.error_text
        wanted = "a machine that serves the shares" if state == "present" else "a machine that no longer serves them"
        raise GpunodesError(cause, wanted, f"run the same command again; the log is {ended.log}")
    outcome = Outcome.CHANGED if changed else Outcome.UNCHANGED
    return facts, MachineResult(machine.name, outcome, changes=changed, notes=notes)


def _claimed(
    inventory: Inventory, machine: Machine, command: str, *, dry_run: bool
) -> contextlib.AbstractContextManager[claims.Claim | claims.HostClaim | None]:
    """The locks of the machine: its Lease if it belongs to the cluster, else a lock on the machine itself."""
    if dry_run:
        return contextlib.nullcontext()
    if machine.role is Role.STORAGE:
        return claims.claimed_hosts(inventory, [machine], command)
    return claims.claimed(inventory, [machine], command)
