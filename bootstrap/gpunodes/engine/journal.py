"""The private folder of a run (0700); old folders are removed."""

from __future__ import annotations

import datetime as dt
import os
import shutil
from pathlib import Path

from gpunodes.settings import state_home

KEEP = 30
"""Number of runs to keep."""


def open_run(command: str) -> Path:
    """Create the folder of a new run of ``command`` and remove the oldest ones; returns its path (mode 0700)."""
    runs = state_home() / "runs"
    runs.mkdir(mode=0o700, exist_ok=True)
    _prune(runs)
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S.%f")
    folder = runs / f"{stamp}-{command.replace(' ', '-')}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    return folder


def _prune(runs: Path) -> None:
    """Keep the newest runs. A running command is among them, unless KEEP newer runs have started since."""
    discard_secrets()
    for old in sorted(runs.iterdir())[: -KEEP + 1]:
        shutil.rmtree(old, ignore_errors=True)


def discard_secrets() -> None:
    """Delete files with secrets that killed commands have left; called at the start of every run."""
    runs = state_home() / "runs"
    # ansible-runner's record of the environment, also of plays with a folder inside of the run's, such as those of
    # roll-outs; the temporary kubeconfig of older versions of gpunodes.
    recorded = "artifacts/*/command"
    for path in (*runs.glob(f"*/*/{recorded}"), *runs.glob(f"*/*/*/{recorded}"), *runs.glob("*/admin.conf")):
        path.unlink(missing_ok=True)
