"""The result of a benchmark: rows of a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    measurement: str
    result: str
    goal: str
    details: str

    def __str__(self) -> str:
        return f"| {self.measurement} | {self.result} | {self.goal} | {self.details} |"


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print("| measurement | result | goal | details |\n|---|---|---|---|")
    for row in rows:
        print(row)
