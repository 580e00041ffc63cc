"""The only exception of code that runs on a machine: found, wanted and remedy."""

from __future__ import annotations


class MachineProblem(Exception):  # noqa: N818 - the name is clear without a suffix
    """A problem on a machine that fails a task; its text is one sentence."""

    def __init__(self, found: str, wanted: str = "", remedy: str = "") -> None:
        self.found = found
        self.wanted = wanted
        self.remedy = remedy
        super().__init__("; ".join(text for text in (found, wanted and f"wanted: {wanted}", remedy) if text))
