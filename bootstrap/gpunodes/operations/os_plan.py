"""What upgrades of machines' operating systems would do. Nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunodes.engine import events, journal, runner
from gpunodes.inventory import Inventory
from gpunodes.model import Machine
from gpunodes.operations import phases, preflight, switched_off
from gpunodes.operations.tracker import RunView, Tracker, Unseen
from gpunodes.planner import os_upgrade

PHASES = (phases.OS_PENDING,)


def run(inventory: Inventory, machines: Sequence[Machine], view: RunView, *, security: bool) -> os_upgrade.OsPlans:
    """Read the facts and the pending upgrades of ``machines``; ``security``: only security updates count."""
    folder = journal.open_run("os plan")
    view.begin("os plan", machines)
    on, off = switched_off.split(inventory, machines, is_rolled_out=True)
    seen = preflight.inspect(inventory, on, folder, view, {}, sources=False)
    return _plans(inventory, machines, seen, off, folder, view, security=security)


def of_machine(inventory: Inventory, machine: Machine, folder: Path, *, security: bool) -> os_upgrade.PlannedOs:
    """The same for one machine, with its files in ``folder``."""
    view = Unseen()
    seen = preflight.inspect(inventory, [machine], folder, view, {}, sources=False, alone=True)
    return _plans(inventory, [machine], seen, {}, folder, view, security=security).machines[0]


def _plans(
    inventory: Inventory,
    machines: Sequence[Machine],
    seen: preflight.Inspection,
    off: Mapping[str, str],
    folder: Path,
    view: RunView,
    *,
    security: bool,
) -> os_upgrade.OsPlans:
    """Read the pending upgrades of machines whose facts were ``seen``; ``off`` says why others were not."""
    facts: dict[str, Mapping[str, Any] | None] = dict.fromkeys(off)
    facts |= {each.name: each.facts for each in seen.candidates}
    unreachable = {**off, **{each.name: each.unreachable for each in seen.candidates}}
    readable = [machine for machine in machines if facts[machine.name] is not None]
    tracker = Tracker(readable, PHASES, view)
    interrupted = seen.interrupted
    if readable and not interrupted:
        play = runner.Play("os_pending.yml", inventory, [machine.name for machine in readable])
        ended = runner.run(play, folder, tracker.on_event)
        tracker.check_controller(ended)
        interrupted = ended.interrupted
    pending = tracker.answers.get("os_pending", {})
    why = {name: events.cause(failure) for name, failure in tracker.failures.items()}
    found = [
        os_upgrade.planned(
            machine.name,
            facts[machine.name],
            pending.get(machine.name),
            security=security,
            why=unreachable[machine.name] or why.get(machine.name, ""),
        )
        for machine in machines
    ]
    return os_upgrade.OsPlans(security, found, interrupted=interrupted)
