"""Roll-outs for people and programs: the result of a command, and where a roll-out stands."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from gpunodes.model import printable
from gpunodes.rollout import state
from gpunodes.rollout.record import RolloutRecord
from gpunodes.rollout.result import MachineRollout, RolloutResult
from gpunodes.rollout.state import Rollout
from gpunodes.views import text
from gpunodes.views.screen import duration

_TITLES = {"kubernetes": "kubelets"}
"""Works whose names in records are no words for people."""


class RolloutStatus(Protocol):
    """Where a roll-out stands; operations/rolling/status.py has it."""

    @property
    def rollout(self) -> Rollout | None: ...
    @property
    def holder(self) -> str: ...
    @property
    def machines(self) -> Mapping[str, RolloutRecord]: ...
    @property
    def left(self) -> tuple[str, ...]: ...
    @property
    def problem(self) -> str: ...


def summary(result: RolloutResult) -> str:
    """The result of a command: machines that are not done, then their number by outcome."""
    lines = [printable(f"{each.machine}: {_outcome(each)}") for each in result.machines if not _good(each)]
    counted = Counter(_state(each) for each in result.machines)
    total = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counted.items()))
    lines.append(f"{result.work or 'roll-out'}: {total or 'nothing to do'}")
    if result.stopped:
        lines.append(printable(f"stopped: {result.stopped}"))
    if not result.finished:
        lines.append("unfinished: `gpunodes rollout resume` continues, `gpunodes rollout abandon` gives its nodes back")
    if result.then and result.interrupted:
        lines.append(f"unfinished: {_TITLES.get(result.then, result.then)} follow: `gpunodes rollout resume` continues")
    return "\n".join(lines)


def document(result: RolloutResult) -> dict[str, Any]:
    """``gpunodes.rollout/1``: the result of a command."""
    return {
        "schema": "gpunodes.rollout/1",
        "id": result.id,
        "work": result.work,
        "exit_code": int(result.exit_code),
        "finished": result.finished,
        "then": result.then,
        "stopped": result.stopped,
        "interrupted": result.interrupted,
        "machines": [
            {
                "name": each.machine,
                "outcome": each.outcome.value if each.outcome else None,
                "why": each.why,
                "seconds": round(each.seconds, 1),
            }
            for each in result.machines
        ],
    }


def status(found: RolloutStatus) -> str:
    """Where a roll-out stands: what, who, how far, and what comes next."""
    rollout = found.rollout
    if rollout is None:
        lines = [found.problem] if found.problem else ["no roll-out is unfinished"]
        if found.holder:
            lines.append(f"held by {found.holder}")
        if found.left:
            lines.append(f"nodes with marks of a roll-out: {state.names(found.left)}")
        if found.left or found.problem:
            lines.append("`gpunodes rollout abandon` gives these nodes back and removes the record")
        return "\n".join(map(printable, lines))
    parameters = ", ".join(f"{name} {value}" for name, value in rollout.parameters.items())
    lines = [
        f"{rollout.work}{f' ({parameters})' if parameters else ''}, begun {_stamp(rollout.started)} by {rollout.by}",
        f"id: {rollout.id}",
        f"held by: {found.holder or 'nobody; `gpunodes rollout resume` continues'}",
        f"done: {len(rollout.done)} of {len(rollout.machines)}; waiting: {len(rollout.waiting)}",
        f"next: {_next(rollout)}",
        *([f"then: {_then(rollout)}"] if rollout.then else []),
    ]
    lines = [printable(line) for line in lines]
    rows = [("MACHINE", "STATE", "STAGE", "")]
    rows += [(name, state_, stage, why) for name, state_, stage, why in _rows(found)]
    return "\n".join(lines) + ("\n" + text.table(rows) if len(rows) > 1 else "")


def status_document(found: RolloutStatus) -> dict[str, Any]:
    """``gpunodes.rollout-status/1``."""
    rollout = found.rollout
    made: dict[str, Any] = {
        "schema": "gpunodes.rollout-status/1",
        "holder": found.holder,
        "problem": found.problem,
        "marked_nodes": list(found.left),
        "rollout": None,
    }
    if rollout:
        made["rollout"] = {
            "id": rollout.id,
            "work": rollout.work,
            "parameters": dict(rollout.parameters),
            "options": rollout.options.document(),
            "started": dt.datetime.fromtimestamp(rollout.started, dt.UTC).isoformat(),
            "by": rollout.by,
            "stopped": rollout.stopped,
            "next": _next(rollout),
            "then": [
                {"work": each.work, "parameters": dict(each.parameters), "machines": list(each.machines)}
                for each in rollout.then
            ],
            "done": list(rollout.done),
            "waiting": list(rollout.waiting),
            "machines": [
                {"name": name, "state": state_, "stage": stage, "why": why} for name, state_, stage, why in _rows(found)
            ],
        }
    return made


def _rows(found: RolloutStatus) -> list[tuple[str, str, str, str]]:
    """The machines that are neither done nor waiting: name, state, stage and reason."""
    if found.rollout is None:
        return []
    rows = []
    for name in found.rollout.running:
        record = found.machines.get(name)
        rows.append((name, "running" if found.holder else "unfinished", record.stage.value if record else "", ""))
    for name, each in found.rollout.ended.items():
        record = found.machines.get(name)
        rows.append((name, each.outcome.value, record.stage.value if record else "", each.why))
    return rows


def _next(rollout: Rollout) -> str:
    if rollout.stopped:
        return f"nothing: it stopped: {rollout.stopped}"
    options = rollout.options
    if rollout.work == state.ADDONS:
        return "the network add-on and the device plugin"
    if rollout.soak_since and not rollout.soaked:
        return f"the canaries {state.names(rollout.canaries)} are watched for {duration(options.soak_s)}"
    if not rollout.waiting:
        return "the end of the machines that are worked on"
    windows = f", from {', '.join(map(str, options.windows))}" if options.windows else ""
    return f"{state.names(rollout.waiting, 3)}{windows}"


def _then(rollout: Rollout) -> str:
    """What follows: ``kubelets of 12 machines, add-ons``."""
    parts = []
    for each in rollout.then:
        count = len(each.machines)
        of = f" of {count} machine{'s' if count > 1 else ''}" if count else ""
        parts.append(f"{_TITLES.get(each.work, each.work)}{of}")
    return ", ".join(parts)


def _good(each: MachineRollout) -> bool:
    return each.outcome is not None and each.outcome.good


def _state(each: MachineRollout) -> str:
    return each.outcome.value if each.outcome else "not ended"


def _outcome(each: MachineRollout) -> str:
    return _state(each) + (f": {each.why}" if each.why else "")


def _stamp(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
