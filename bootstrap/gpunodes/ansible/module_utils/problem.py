"""What is wrong: found, wanted and remedy. Findings, conflicts and errors of machines and controller carry it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """The fact, the limit that it breaks, and what the user can do; its text is one sentence."""

    found: str
    wanted: str = ""
    remedy: str = ""

    @property
    def fact(self) -> str:
        """The sentence without its remedy."""
        return _joined(self.found, self.wanted and f"wanted: {self.wanted}")

    def __str__(self) -> str:
        return _joined(self.fact, self.remedy)


class MachineProblem(Exception):  # noqa: N818 - the name is clear without a suffix
    """A problem on a machine that fails a task: the only exception of code that runs there."""

    def __init__(self, found: str, wanted: str = "", remedy: str = "", output: str = "") -> None:
        self.problem = Problem(found, wanted, remedy)
        self.output = output
        """The complete output of a program that failed, for the run's log."""
        super().__init__(str(self.problem))


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
