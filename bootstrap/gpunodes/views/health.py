"""Verdicts: as lines for people, and as the JSON document ``gpunodes.health/1``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes.health.model import NOT_RECOGNISED, Action, Finding, Meaning, RuleText, State, Verdict
from gpunodes.model import printable

SCHEMA = "gpunodes.health/1"


def document(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """``gpunodes.health/1``."""
    return {"schema": SCHEMA, "machines": [_machine(verdict) for verdict in verdicts]}


def _machine(verdict: Verdict) -> Mapping[str, Any]:
    files = [{"path": file.path, "kinds": list(file.kinds), "problem": file.problem or None} for file in verdict.files]
    return {
        "name": verdict.name,
        "source": verdict.source,
        "state": verdict.state.value,
        "action": verdict.action.value,
        "hung_in_driver": verdict.hung_in_driver,
        "xids": list(verdict.xids),
        "sxids": list(verdict.sxids),
        "boot_id": verdict.boot_id,
        "gpus": {"expected": verdict.gpus_expected, "seen": verdict.gpus_seen},
        "kernel_lines": verdict.kernel_lines,
        "wanted": verdict.wanted or None,
        "findings": [_finding(finding) for finding in verdict.findings],
        **({"files": files} if files else {}),
    }


def files(verdict: Verdict) -> list[str]:
    """A line for each saved file: what it was recognised as. Files that are not recognised are only counted if many."""
    lines = [
        f"{file.path}: {file.problem or ' and '.join(file.kinds) or 'not recognised'}"
        for file in verdict.files
        if file.kinds or file.problem not in {"", NOT_RECOGNISED} or len(verdict.files) <= _MANY_FILES
    ]
    if unnamed := len(verdict.files) - len(lines):
        lines.append(f"{unnamed} {'other ' if lines else ''}files: {'not recognised' if lines else NOT_RECOGNISED}")
    return lines


_MANY_FILES = 10


def _finding(finding: Finding) -> Mapping[str, Any]:
    return {
        "rule": finding.rule,
        "gpu": finding.gpu or None,
        "code": finding.code,
        "action": finding.action.value,
        "count": finding.count,
        "first": finding.first or None,
        "last": finding.last or None,
        "message": finding.message,
        "evidence": list(finding.evidence),
        "source": finding.source,
    }


def rules_document(rules: Sequence[RuleText]) -> dict[str, Any]:
    """``gpunodes.health-rules/1``."""
    return {"schema": "gpunodes.health-rules/1", "rules": [dataclasses.asdict(rule) for rule in rules]}


def rules(rules: Sequence[RuleText]) -> str:
    """Every rule, in a paragraph."""
    return "\n\n".join(
        f"{rule.name}: {rule.title}\n  evidence  {rule.evidence}\n  action    {rule.action}\n  source    {rule.source}"
        for rule in rules
    )


def meaning_document(meaning: Meaning) -> dict[str, Any]:
    """``gpunodes.health-code/1``."""
    return {"schema": "gpunodes.health-code/1", **dataclasses.asdict(meaning)}


def meaning(meaning: Meaning) -> str:
    """The meaning of a code, in a few lines."""
    return (
        f"{meaning.kind} {meaning.code}: {meaning.title}\n"
        f"  action  {meaning.action.value}\n  advice  {meaning.advice}\n  source  {meaning.source}"
    )


def dump(document: Mapping[str, Any]) -> str:
    """One document as indented JSON."""
    import json

    return json.dumps(document, indent=2)


def listing(verdicts: Sequence[Verdict]) -> str:
    """Every machine that is not healthy, the worst first, with its findings; then the number of healthy machines."""
    lines = []
    for verdict in sorted(verdicts, key=lambda one: (-one.state.rank, -one.action.rank, one.name)):
        if verdict.state is State.HEALTHY and len(verdicts) > 1:
            continue
        action = f", {verdict.action.value}" if verdict.action is not Action.NONE else ""
        lines.append(f"{verdict.name}: {verdict.state.value}{action}{_basis(verdict)}")
        for finding in verdict.findings:
            times = (
                f" ({finding.count} times, {finding.first or '?'} to {finding.last or '?'})"
                if finding.count > 1
                else ""
            )
            gpu = f"{finding.gpu}: " if finding.gpu else ""
            lines.append(f"  {finding.rule}: {gpu}{finding.message}{times}")
            # Of a hang, the second line is the frame that proves it.
            lines += [f"    | {line}" for line in finding.evidence[: 2 if finding.hung else 1]]
    healthy = sum(verdict.state is State.HEALTHY for verdict in verdicts)
    off = sum(verdict.state is State.OFF for verdict in verdicts)
    lines.append(f"{healthy} of {len(verdicts)} healthy{f', {off} off on purpose' if off else ''}.")
    return "\n".join(printable(line) for line in lines)


def _basis(verdict: Verdict) -> str:
    """What the state healthy is based on, what the state unknown lacks, why it is off; empty for other states."""
    if verdict.state is State.OFF:
        return f" on purpose: {verdict.wanted}"
    if verdict.state is State.UNKNOWN and verdict.wanted:
        return f": {verdict.wanted}"
    if verdict.state is not State.HEALTHY:
        return ""
    lines = verdict.kernel_lines
    parts = [f"{lines:,} kernel line{'s' * (lines > 1)}"] if lines else []
    if verdict.gpus_seen:
        parts.append(f"{verdict.gpus_seen} GPU{'s respond' if verdict.gpus_seen > 1 else ' responds'}")
    elif verdict.source == "live" and not verdict.gpus_expected:
        parts.append("no NVIDIA GPU")
    return f": {', '.join(parts)}" if parts else ""
