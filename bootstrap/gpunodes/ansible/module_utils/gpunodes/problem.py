"""The one error of code that runs on a machine: what was found, what was wanted, what to do."""

from __future__ import annotations


class MachineProblem(Exception):  # noqa: N818 - reads as the sentence it makes
    """Something on a machine that stops a task, said in one sentence."""

    def __init__(self, found: str, wanted: str = "", remedy: str = "") -> None:
        self.found = found
        self.wanted = wanted
        self.remedy = remedy
        super().__init__("; ".join(part for part in (found, wanted and f"wanted: {wanted}", remedy) if part))
