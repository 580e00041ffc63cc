"""Shared storage that a worker serves, on machines: it goes with its empty folder, and a reset takes it away, too."""

from __future__ import annotations

from . import shares
from .conftest import BARE, Operator, lines
from .shares import FOLDER, MACHINES

LAB = shares.LAB


def test_a_worker_serves(operator: Operator) -> None:
    """A node that is server and client; its folder stays empty, and goes."""
    before = shares.packages(operator)
    shares.serve_from(operator, "worker-2")
    operator.gpunodes("storage", "up")
    assert operator.ssh("worker-2", f"stat -c '%U %a' {FOLDER}").strip() == "nobody 1777"
    operator.gpunodes("storage", "down", "--yes")
    assert operator.ssh("worker-2", f"ls -d {FOLDER} 2>/dev/null || echo gone").strip() == "gone"
    assert shares.packages(operator) == before


def test_a_reset_undoes_it_too(operator: Operator) -> None:
    operator.gpunodes("storage", "up")
    operator.gpunodes("reset", "worker-*", "control-1", "--yes")
    # It keeps the folder: another reset must not take data away.
    operator.ssh("worker-2", f"rmdir {FOLDER}")
    for machine in MACHINES:
        assert lines(operator.ssh(machine, BARE)) == operator.bare[machine]
