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
    # A command that is killed leaves Ansible's record of its environment; nobody needs it after the run.
    for record in runs.glob("*/*/artifacts/*/command"):
        record.unlink(missing_ok=True)
    for old in sorted(runs.iterdir())[: -KEEP + 1]:
        shutil.rmtree(old, ignore_errors=True)
