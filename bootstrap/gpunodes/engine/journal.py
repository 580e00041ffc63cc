"""The private folder of a run: made 0700, said to the user, pruned when it is old."""

from __future__ import annotations

import datetime as dt
import os
import shutil
from pathlib import Path

from gpunodes.settings import state_home

KEEP = 30
"""How many runs are kept."""


def open_run(command: str) -> Path:
    """Make the folder of a new run of ``command`` and prune the oldest ones; returns its path (mode 0700)."""
    runs = state_home() / "runs"
    runs.mkdir(mode=0o700, exist_ok=True)
    _prune(runs)
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S.%f")
    folder = runs / f"{stamp}-{command}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    return folder


def _prune(runs: Path) -> None:
    """Keep the newest runs. A run that still goes on is among them: only KEEP newer ones could push it out."""
    discard_secrets()
    for old in sorted(runs.iterdir())[: -KEEP + 1]:
        shutil.rmtree(old, ignore_errors=True)


def discard_secrets() -> None:
    """Delete what commands that were killed have left and nobody needs: at the beginning of every run."""
    runs = state_home() / "runs"
    # Ansible's record of its environment; a kubeconfig, which older versions of gpunodes had there for a moment.
    for left in (*runs.glob("*/*/artifacts/*/command"), *runs.glob("*/admin.conf")):
        left.unlink(missing_ok=True)
