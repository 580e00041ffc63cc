"""The NVSwitch fabric: SXids, the error codes of NVSwitches, and Fabric Manager."""

from __future__ import annotations

from collections.abc import Iterator

from gpunodes.health import catalog
from gpunodes.health.lines import DATA
from gpunodes.health.model import Action, Finding, LineKind, LogRecord, State
from gpunodes.health.rules.rule import Rule, RuleInput

_PROCESS = "nv-fabricmanag"
"""How the name of fabric manager's process begins; the kernel keeps 15 characters of it."""


def sxid(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    groups: dict[tuple[str, int], list[LogRecord]] = {}
    for record in data.of_kinds(LineKind.SXID):
        groups.setdefault((record.gpu, record.code), []).append(record)
    for (gpu, code), lines in groups.items():
        records = [record for record in lines if record.detail != DATA] or lines
        advice = catalog.sxid(code)
        severities = {record.detail for record in records}
        action = advice.action if advice else Action.NONE
        if "fatal" in severities:
            action = max(action, Action.RESET_GPU, key=lambda each: each.rank)
        elif "non-fatal" in severities:
            action = Action.NONE
        message = f"SXid {code}" + (f", {advice.title}: {advice.advice}" if advice else " is not in NVIDIA's guide.")
        if code in data.site.sxids:
            action = data.site.sxids[code]
            message += f" This site's action for it: {action.value}."
        watch = advice is None or advice.watch
        yield rule.finding(action, message, *records, gpu=gpu, watch=watch, code=code)


def fabric_manager(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    facts = data.facts
    if facts is None or any(task.name.startswith(_PROCESS) for task in facts.tasks):
        return  # it may run in a container, without a unit
    if any(function.is_switch for function in facts.functions):
        state = facts.services.get("nvidia-fabricmanager", "")
        if state in {"failed", "inactive", "absent"}:
            message = f"The machine has NVSwitches, but its fabric manager is {state}: CUDA cannot start."
            yield rule.finding(Action.RESTART_APP, message, state=State.SICK)
