"""Repairs for people and programs: progress lines, a summary, plans, history."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from gpunodes.health.model import Verdict
from gpunodes.model import printable
from gpunodes.repair.result import MachineRepair, RepairResult
from gpunodes.views.screen import duration, put_line
from gpunodes.views.text import table


class RepairLines:
    """A line for each event; thread-safe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()
        self._mutex = threading.Lock()

    def report(self, machine: str, text: str) -> None:
        """A message about a machine, or, without a name, about the command."""
        elapsed = time.monotonic() - self._started
        line = f"[{elapsed:5.0f} s] {machine + ': ' if machine else ''}{text}"
        with self._mutex:
            put_line(self._stream, line)


def summary(result: RepairResult) -> str:
    """The result of a repair, or its plan: what was done, or would be done, and why."""
    acted = [each for each in result.machines if each.decision != "nothing"]
    unaffected = [each for each in result.machines if each.decision == "nothing"]
    lines = []
    for each in acted:
        lines.append(printable(f"{each.machine}: {_message(each, dry_run=result.dry_run)}"))
        if each.evidence:
            lines.append(f"    evidence: {each.evidence}")
        if result.dry_run:
            lines += [f"    {printable(line)}" for line in _plan(each)]
    if unaffected:
        kind = ("other " if acted else "") + ("machines" if len(unaffected) > 1 else "machine")
        lines.append(f"{len(unaffected)} {kind}: nothing to repair")
    if not result.machines:
        lines.append("nothing to repair")
    return "\n".join(lines)


def _message(each: MachineRepair, *, dry_run: bool) -> str:
    if each.outcome is not None:
        elapsed = f" in {duration(each.seconds)}" if each.seconds else ""
        by = f" by {each.step}" if each.step and each.outcome == "repaired" else ""
        return f"{str(each.outcome).upper() if each.outcome != 'repaired' else 'repaired'}{by}{elapsed}: {each.why}"
    if each.decision == "repair":
        return f"{'would be repaired' if dry_run else 'to be repaired'}: {each.why}"
    return f"{each.decision}: {each.why}"


def _plan(each: MachineRepair) -> list[str]:
    if not each.step:
        return _evidence(each.verdict)
    return [
        f"first step: {each.step}",
        *(f"skipped: {text}" for text in each.skipped),
        *_evidence(each.verdict),
    ]


def _evidence(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return []
    return [
        f"{finding.rule} {finding.gpu}: {line}".replace(" :", ":")
        for finding in verdict.findings[:3]
        for line in (finding.evidence[:1] or (finding.message,))
    ]


def document(result: RepairResult) -> dict[str, Any]:
    """``gpunodes.repair/1``"""
    return {
        "schema": "gpunodes.repair/1",
        "command": result.command,
        "exit_code": int(result.exit_code),
        "dry_run": result.dry_run,
        "interrupted": result.interrupted,
        "machines": [_machine(each) for each in result.machines],
    }


def _machine(each: MachineRepair) -> dict[str, Any]:
    verdict = each.verdict
    return {
        "name": each.machine,
        "decision": str(each.decision),
        "outcome": str(each.outcome) if each.outcome is not None else None,
        "why": each.why,
        "step": each.step,
        "skipped": list(each.skipped),
        "repair": each.repair,
        "seconds": round(each.seconds, 1),
        "evidence": each.evidence,
        "verdict": None
        if verdict is None
        else {
            "state": verdict.state.value,
            "action": verdict.action.value,
            "hung_in_driver": verdict.hung_in_driver,
            "xids": list(verdict.xids),
            "boot_id": verdict.boot_id,
            "evidence": _evidence(verdict),
        },
    }


def history(entries: Sequence[Mapping[str, Any]], columns: int | None = None, machine: str = "") -> str:
    """The history of ``machine``, or of all, the oldest first, for a screen of ``columns``, if any."""
    if not entries:
        return f"no history of {machine}; `gpunodes history` has that of all machines" if machine else "no history yet"
    rows = [("TIME", "MACHINE", "WHAT", "OUTCOME", "SECONDS", "")]
    rows += [
        (
            dt.datetime.fromtimestamp(entry["time"], dt.UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
            entry["machine"],
            f"{entry['kind']} {entry['what']}",
            entry["outcome"] or "-",
            f"{entry['seconds']:.0f}" if entry["seconds"] else "-",
            entry["detail"],
        )
        for entry in entries
    ]
    return table(rows, columns)


_SERVICE = """[Unit]
Description=Repair GPU machines that hang
Wants=network-online.target
After=network-online.target

[Service]
Type=oneshot
User={user}
WorkingDirectory={folder}
ExecStart={program} health --reboot-hung --yes --inventory {inventory}
# Repairs take as long as machines take to boot; the next run resumes an interrupted repair.
TimeoutStartSec=infinity
KillSignal=SIGINT
"""
_TIMER = """[Unit]
Description=Scan for GPU machines that hang

[Timer]
OnBootSec=5min
OnUnitInactiveSec={every}
RandomizedDelaySec=30

[Install]
WantedBy=timers.target
"""


def units(program: str, user: str, folder: Path, inventory: Path, every: str) -> dict[str, str]:
    """The systemd units for automatic repairs, by file name (systemd.service(5), systemd.timer(5))."""
    values = {"program": program, "user": user, "folder": folder, "inventory": inventory, "every": every}
    escaped = {name: str(value).replace("%", "%%") for name, value in values.items()}
    for name in ("program", "inventory"):
        escaped[name] = f'"{escaped[name]}"' if " " in escaped[name] else escaped[name]
    return {
        "gpunodes-health.service": _SERVICE.format(**escaped),
        "gpunodes-health.timer": _TIMER.format(**escaped),
    }
