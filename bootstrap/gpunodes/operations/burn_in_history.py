"""The results of burn-ins in the history of their machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes import shape
from gpunodes.engine import history
from gpunodes.engine.events import cause
from gpunodes.engine.history import EntryKind
from gpunodes.errors import GpunodesError
from gpunodes.model import PreflightFinding, Severity, TaskEnded, printable
from gpunodes.operations.tracker import NCCL_TASK

_REPORT = {"tool": str, "summary": str, "failed": str, "refused": str, "seconds": float}
_NCCL = {"summary": str, "failed": str}
_DETAIL = 1000


def note(
    cluster: str,
    machines: Sequence[str],
    answers: Mapping[str, Mapping[str, Any]],
    failures: Mapping[str, TaskEnded],
) -> list[PreflightFinding]:
    """Append what the machines reported of their burn-in; returns warnings of what could not be written.

    A report of another shape, and a refusal, is left out. ``answers`` and ``failures`` are the tracker's: the results
    by key, then by machine, and failures by machine.
    """
    # One task tests NCCL for all machines; Ansible reports its result for an arbitrary one.
    nccl = next((each for each in answers.get("nccl", {}).values() if not shape.wrong(each, _NCCL)), None)
    broken = next((cause(each) for each in failures.values() if each.task == NCCL_TASK), "")
    unnoted = []
    for name in machines:
        report = answers.get("burn_in", {}).get(name)
        if not report or shape.wrong(report, _REPORT) or report["refused"]:
            continue
        failed = report["failed"]
        what, summary = report["tool"], report["summary"]
        if not failed and broken:
            failed, what = broken, f"{what}, NCCL"
        elif nccl and not failed and nccl["summary"]:
            failed, what, summary = nccl["failed"], f"{what}, NCCL", f"{summary}; {nccl['summary']}"
        outcome = "failed" if failed else "passed"
        try:
            history.note(
                name,
                cluster,
                EntryKind.BURN_IN,
                printable(what)[:_DETAIL],
                outcome,
                printable(failed or summary)[:_DETAIL],
                seconds=max(0.0, min(report["seconds"], 1e6)),
            )
        except GpunodesError as error:
            unnoted.append(PreflightFinding(name, "history", error.problem, Severity.WARNING))
    return unnoted
