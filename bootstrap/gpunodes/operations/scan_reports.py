"""What follows a scan: its summary for the metrics, and a notice of changed states."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpunodes.engine import history, metrics_file, webhook
from gpunodes.engine.history import EntryKind
from gpunodes.engine.webhook import Webhook
from gpunodes.health import changes
from gpunodes.health.changes import StateChange
from gpunodes.health.model import ScanSummary, State, Verdict
from gpunodes.model import Machine
from gpunodes.repair.result import RepairResult

if TYPE_CHECKING:  # it loads Ansible, and `gpunodes health --from` must stay quick
    from gpunodes.engine.fleet import Fleet


def summary(verdicts: Sequence[Verdict], began: float, cluster: str | None) -> ScanSummary:
    """The summary of a scan of a cluster's machines (None: of saved logs) that began at ``began`` (monotonic).

    Raises GpunodesError for a history that cannot be read.
    """
    ended, seconds = time.time(), time.monotonic() - began
    if cluster is None:
        return ScanSummary(verdicts, ended, seconds)
    given_up = {name for name, each in history.summaries(cluster).items() if each.needs_repair}
    return ScanSummary(verdicts, ended, seconds, given_up, history.repairs(cluster))


def write(path: Path, metrics: str) -> None:
    """Write the file with metrics in one step; raises GpunodesError."""
    metrics_file.write(path, metrics)


def after_repair(fleet: Fleet, machines: Sequence[Machine], result: RepairResult) -> list[Verdict]:
    """The verdicts on machines after a repair command: those that it worked on are scanned again."""
    known = {each.machine: each.verdict for each in result.machines if each.outcome is None and each.verdict}
    again = [machine for machine in machines if machine.name not in known]
    scans = fleet.scan(again) if again else {}
    return [known.get(machine.name) or scans[machine.name].verdict for machine in machines]


def notify(
    to: Webhook, cluster: str, verdicts: Sequence[Verdict], body: Callable[[Sequence[StateChange]], bytes]
) -> None:
    """Send one notice of the states that changed since the last one, if any, and record it in the history.

    Raises GpunodesError if it could not be sent, or recorded: then the next scan sends it again.
    """
    known = {state.value: state for state in State}
    before = {name: known[state] for name, state in history.reported_states(cluster).items() if state in known}
    found = changes.changes(verdicts, before)
    if not found:
        return
    webhook.post(to, body(found))
    for change in found:
        state = change.verdict.state.value
        history.note(change.verdict.name, cluster, EntryKind.STATE, state, "reported", f"before: {change.before.value}")
