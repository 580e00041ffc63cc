"""The proof of GPUs, as a table and as a document."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpunodes.model import GpuVerification, printable
from gpunodes.views import document, text

LEVELS = ("host", "container", "kubelet", "pod")


def table(proofs: Sequence[GpuVerification]) -> str:
    """A row for each machine, then what failed first on each, with its remedy."""
    rows: list[tuple[str, ...]] = [("machine", "GPUs", *LEVELS)]
    message = []
    for proof in proofs:
        states = {level.level: level.state for level in proof.levels}
        # Without any answer nothing is known of its GPUs.
        count = "-" if proof.cause and not proof.levels and not proof.gpus else str(proof.gpus)
        rows.append((proof.machine, count, *(states.get(level, "-") for level in LEVELS)))
        if failed := proof.failed:
            message.append(f"{proof.machine}: {failed.level}: {failed.fact}; wanted: {failed.wanted}. {failed.remedy}.")
        elif proof.cause:
            message.append(f"{proof.machine}: {proof.cause}")
    return "\n".join([text.table(rows), *map(printable, message)])


def verification_document(proofs: Sequence[GpuVerification], exit_code: int) -> str:
    """``gpunodes.gpu-verify/1``"""
    machines = [{**dataclasses.asdict(proof), "healthy": proof.healthy} for proof in proofs]
    return document.dump({"schema": "gpunodes.gpu-verify/1", "exit_code": exit_code, "machines": machines})
