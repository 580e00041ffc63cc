"""What is known of a machine's past."""

from __future__ import annotations

from collections.abc import Sequence

from gpunodes.engine import history
from gpunodes.engine.history import HistoryEntry


def entries(machine: str) -> Sequence[HistoryEntry]:
    """The entries of a machine, of all when none is named; the oldest first."""
    return history.read(machine)
