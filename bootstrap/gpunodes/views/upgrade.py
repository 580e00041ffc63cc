"""The plan of an upgrade of Kubernetes, for people and as a JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gpunodes.model import Severity, printable
from gpunodes.planner.upgrade_model import Part, UpgradePlan
from gpunodes.views import document
from gpunodes.views.text import table, wrapped

_PARTS = {Part.CONTROL_PLANE: "control plane", Part.NODE: "kubelet"}


def table_of(plan: UpgradePlan, columns: int | None = None) -> str:
    """The order, what changes with it, what is in the way, and what cannot be rolled back."""
    return "\n\n".join(_sections(plan, columns))


def _sections(plan: UpgradePlan, columns: int | None) -> Iterator[str]:
    yield f"Kubernetes {plan.version} -> {plan.target or plan.requested}"
    if plan.steps:
        rows = [("", "MACHINE", "PART", "FROM", "TO", "")]
        rows += [
            (
                str(number),
                step.machine,
                _PARTS[step.part],
                step.present or "-",
                step.target,
                "drained" if step.drained else "",
            )
            for number, step in enumerate(plan.steps, 1)
        ]
        yield table(rows, columns)
    elif plan.possible:
        yield f"All {'other ' if plan.passed_over else ''}machines have this version."
    if plan.passed_over:
        lines = [
            printable(f"  {each.machine} ({each.present or 'of an unknown version'}): {each.why}")
            for each in plan.passed_over
        ]
        title = "Passed over (their nodes count as unavailable: --max-unavailable):"
        yield "\n".join([title, *(part for line in lines for part in wrapped(line, columns, 4))])
    if plan.components:
        names = [("COMPONENT", "FROM", "TO")]
        names += [(each.name, each.present, each.target or "by its role") for each in plan.components]
        yield table(names, columns)
    if down := plan.holds_addons:
        what = f"{', '.join(down)} {'is' if len(down) == 1 else 'are'} not ready"
        line = f"The add-ons stay as they are, since {what}: `gpunodes addon upgrade` updates them afterwards."
        yield "\n".join(wrapped(line, columns, 2))
    for severity, title in ((Severity.ERROR, "In the way:"), (Severity.WARNING, "Warnings:")):
        lines = [f"  {each.machine}: {each.problem}" for each in plan.findings if each.severity is severity]
        if lines:
            yield "\n".join([title, *(part for line in lines for part in wrapped(line, columns, 4))])
    if plan.irreversible and plan.steps:
        lines = [part for each in plan.irreversible for part in wrapped(f"  {each}", columns, 2)]
        yield "\n".join(["What cannot be rolled back:", *lines])


def document_of(plan: UpgradePlan) -> str:
    """``gpunodes.upgrade-plan/1``"""
    return document.dump(
        {
            "schema": "gpunodes.upgrade-plan/1",
            "requested": plan.requested,
            "target": plan.target,
            "version": plan.version,
            "possible": plan.possible,
            "steps": [dataclasses.asdict(step) for step in plan.steps],
            "components": [dataclasses.asdict(each) for each in plan.components],
            "findings": [
                {
                    "machine": each.machine,
                    "check": each.check,
                    **document.conflict(each.problem),
                    "severity": each.severity,
                }
                for each in plan.findings
            ],
            "irreversible": list(plan.irreversible),
            "passed_over": [dataclasses.asdict(each) for each in plan.passed_over],
        }
    )
