"""What a repair takes from a verdict's findings. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gpunodes.health.facts import functions
from gpunodes.health.model import Action, State, Verdict


def describe(verdict: Verdict) -> str:
    """A verdict's worst findings in one line."""
    parts = [
        " ".join(part for part in (finding.rule, str(finding.code or ""), finding.gpu) if part)
        for finding in verdict.findings[:3]
    ]
    return ", ".join(parts) or verdict.state.value


def resets(verdict: Verdict, facts: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The PCI addresses of the GPUs to reset, none for all GPUs.

    Single GPUs are named only if there is no other finding, since a reset clears the findings of all GPUs, and only
    without NVSwitches, whose GPUs are reset together (NVIDIA Fabric Manager user guide; nvidia-smi(1), --gpu-reset).
    """
    wrong = [finding for finding in verdict.findings if finding.state is not State.HEALTHY]
    present = functions(facts["pci"]) if facts else ()
    gpus = {function.address for function in present if function.is_gpu}
    if any(function.is_switch for function in present) or not all(
        finding.action is Action.RESET_GPU and finding.gpu in gpus for finding in wrong
    ):
        return ()
    return tuple(sorted({finding.gpu for finding in wrong}))


def first_lines(verdict: Verdict, most: int = 3) -> tuple[str, ...]:
    """The first log lines that a verdict is based on."""
    lines = [line for finding in verdict.findings for line in finding.evidence[:1]]
    return tuple(lines[:most])


def faults(verdict: Verdict, facts: Mapping[str, Any] | None) -> Collection[str]:
    """Known faults of a machine that its findings do not name, for the choice of the first step."""
    rules = {finding.rule for finding in verdict.findings}
    expected = facts["expected"] if facts else {}
    at_boot = expected.get("gpus") if expected.get("from") == "boot log" else None
    if "gpus-missing" in rules and isinstance(at_boot, int) and at_boot < (verdict.gpus_expected or 0):
        return {"missing-since-boot"}
    return ()
