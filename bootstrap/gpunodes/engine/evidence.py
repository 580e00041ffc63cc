"""Evidence collected before repairs: one folder for each repair, with limits for its age and the total size."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from gpunodes.errors import GpunodesError
from gpunodes.settings import state_home

_DAY_S = 24 * 3600.0
# A record may come from a Lease in the cluster: its id must not be a path.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def folder(repair: str) -> Path:
    """The path of the evidence folder of a repair, existing or not; raises GpunodesError for an invalid id."""
    if not _ID.fullmatch(repair):
        raise GpunodesError(f"{repair!r} is not a repair id", "letters, digits, dots, dashes and underscores")
    return _root() / repair


def open_folder(repair: str) -> Path:
    """Create the folder of a repair (0700)."""
    path = folder(repair)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def close_folder(repair: str) -> None:
    """Remove the folder of a repair if it is empty."""
    path = folder(repair)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def prune(days: float, mib: float, keep: Collection[str] = ()) -> None:
    """Remove folders older than ``days``, and the oldest folders until the rest fits into ``mib`` MiB.

    ``keep`` are the ids of running repairs: their folders stay.
    """
    found = sorted(
        (path for path in _root().iterdir() if path.is_dir() and path.name not in keep), key=_written, reverse=True
    )
    size, oldest = 0, time.time() - days * _DAY_S
    for path in found:
        size += sum(file.lstat().st_size for file in path.iterdir())
        if size > mib * 2**20 or _written(path) < oldest:
            shutil.rmtree(path, ignore_errors=True)


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _root() -> Path:
    root = state_home() / "evidence"
    root.mkdir(mode=0o700, exist_ok=True)
    return root
