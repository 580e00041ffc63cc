"""Clocks that the hardware reduces: power brake, heat."""

from __future__ import annotations

from collections.abc import Iterator

from gpunodes.health.evidence import address
from gpunodes.health.model import Action, Finding
from gpunodes.health.rules.rule import Rule, RuleInput


def slowed(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    braked = [shown for shown in data.gpus if shown.yes("power_brake")]
    if len(braked) > 1 and len(braked) == len(data.gpus):
        message = "The power brake is active on all GPUs: check the power supply of the machine and the site."
        yield rule.finding(Action.NONE, message, watch=True)
        return
    for shown in data.gpus:
        reasons = [text for name, text in _SLOWED.items() if shown.yes(name)]
        if reasons:
            message = f"The hardware slows the GPU down: {', '.join(reasons)}. A reboot does not help."
            yield rule.finding(Action.NONE, message, gpu=address(shown.address.encode()), watch=True)


_SLOWED = {"power_brake": "power brake", "hw_thermal": "too hot", "hw_slowdown": "hardware slowdown"}
