"""Memory errors of GPUs: ECC counters, remapped rows, retired pages, pending repairs."""

from __future__ import annotations

from collections.abc import Iterator

from gpunodes.health.evidence import address
from gpunodes.health.model import Action, Finding
from gpunodes.health.rules.rule import Rule, RuleInput


def memory(rule: Rule, data: RuleInput) -> Iterator[Finding]:
    for shown in data.gpus:
        gpu = address(shown.address.encode())
        for name, action, message in _MEMORY:
            if shown.yes(name):
                yield rule.finding(action, message, gpu=gpu)
        if count := shown.number("ecc_volatile"):
            message = f"{count} uncorrectable memory errors since the driver was loaded."
            yield rule.finding(Action.RESET_GPU, message, gpu=gpu)
        elif count := shown.number("ecc_aggregate"):
            message = f"{count} uncorrectable memory errors in the GPU's lifetime, none since the driver was loaded."
            yield rule.finding(Action.NONE, message, gpu=gpu)


_MEMORY = (
    ("remap_failure", Action.REPAIR, "A memory row cannot be remapped: replace the board."),
    ("unrepairable_memory", Action.REPAIR, "The memory cannot be repaired: replace the board."),
    ("sram_threshold", Action.REPAIR, "More uncorrectable SRAM errors than NVIDIA allows: replace the board."),
    ("remap_pending", Action.RESET_GPU, "A memory row is pending remapping: reset the GPU."),
    ("pages_pending", Action.RESET_GPU, "A memory page is pending retirement: reset the GPU."),
    ("channel_repair", Action.RESET_GPU, "A memory channel repair is pending: reset the GPU."),
    ("tpc_repair", Action.RESET_GPU, "A TPC repair is pending: reset the GPU."),
)
