"""GPUs on the PCI bus: present, responding, with all lanes and without PCIe errors."""

from __future__ import annotations

from collections.abc import Iterator

from gpunodes.health.model import Action, Finding, LineKind
from gpunodes.health.rules.rule import Rule, RuleInput

CORRECTED_MANY = 1000
"""Some corrected PCIe errors are normal for a link; this many are not."""


def no_answer(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for function in data.facts.functions if data.facts else ():
        if not function.responds:
            message = "The PCI function does not respond: its configuration space reads as all ones."
            yield rule.finding(Action.REBOOT, message, gpu=function.address)


def gpus_missing(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    # The list of a collector that did not end lacks GPUs.
    if data.facts is None or data.facts.expected is None or data.facts.lacks("pci"):
        return
    present = sum(function.is_gpu for function in data.facts.functions)
    if present < data.facts.expected:
        message = f"Only {present} of {data.facts.expected} GPUs are on the PCI bus."
        yield rule.finding(Action.REBOOT, message)


def pcie_error(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for record in data.of_kinds(LineKind.AER):
        if record.detail == "fatal":
            yield rule.finding(Action.REBOOT, "Fatal PCIe error: the GPU's link was reset.", record)
        else:
            watch = record.detail == "non-fatal" or record.count >= CORRECTED_MANY
            yield rule.finding(Action.NONE, f"PCIe errors: {record.detail}.", record, watch=watch)
    for function in data.facts.functions if data.facts else ():
        if function.aer_fatal or function.aer_nonfatal:
            message = f"PCIe errors since boot: {function.aer_fatal} fatal, {function.aer_nonfatal} non-fatal."
            yield rule.finding(Action.NONE, message, gpu=function.address, watch=True)


def link_width(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for function in data.facts.functions if data.facts else ():
        if function.is_gpu and function.width and function.max_width and function.width < function.max_width:
            message = f"The PCIe link uses only {function.width} of {function.max_width} lanes."
            yield rule.finding(Action.NONE, message, gpu=function.address, watch=True)
