"""The result of a benchmark: rows of a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    what: str
    figure: str
    goal: str
    how: str

    def __str__(self) -> str:
        return f"| {self.what} | {self.figure} | {self.goal} | {self.how} |"


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print("| what | figure | goal | how |\n|---|---|---|---|")
    for row in rows:
        print(row)
