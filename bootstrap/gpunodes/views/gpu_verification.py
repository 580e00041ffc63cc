"""The verification of GPUs, as a table and as a JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpunodes.model import GpuVerification, printable
from gpunodes.views import document, text

LEVELS = ("host", "container", "kubelet", "pod")


def table(verifications: Sequence[GpuVerification]) -> str:
    """A row for each machine, then the first failure of each machine, with its remedy."""
    rows: list[tuple[str, ...]] = [("machine", "GPUs", *LEVELS)]
    messages = []
    for each in verifications:
        states = {level.level: level.state for level in each.levels}
        # Without a report the number of GPUs is unknown.
        count = "-" if each.cause and not each.levels and not each.gpus else str(each.gpus)
        rows.append((each.machine, count, *(states.get(level, "-") for level in LEVELS)))
        if failed := each.failed:
            messages.append(f"{each.machine}: {failed}")
        elif each.cause:
            messages.append(f"{each.machine}: {each.cause}")
    if verifications and not messages and not any(each.gpus for each in verifications):
        messages.append("no NVIDIA GPU is on the PCI bus of these machines: there was nothing to verify")
    return "\n".join([text.table(rows), *map(printable, messages)])


def verification_document(verifications: Sequence[GpuVerification], exit_code: int) -> str:
    """``gpunodes.gpu-verify/1``"""
    machines = [{**dataclasses.asdict(each), "healthy": each.healthy} for each in verifications]
    return document.dump({"schema": "gpunodes.gpu-verify/1", "exit_code": exit_code, "machines": machines})
