"""The history of machines."""

from __future__ import annotations

from collections.abc import Sequence

from gpunodes.engine import history
from gpunodes.engine.history import HistoryEntry


def entries(machine: str) -> Sequence[HistoryEntry]:
    """The entries of a machine, or of all machines for ""; the oldest first."""
    return history.read(machine)
