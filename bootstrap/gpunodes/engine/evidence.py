"""What was collected of machines before their repair: a folder for each repair, kept for days and within a size."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from gpunodes.errors import GpunodesError
from gpunodes.settings import state_home

_DAY_S = 24 * 3600.0
# A record may come from a lock in the cluster: its id is no path.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def folder(repair: str) -> Path:
    """Where the evidence of a repair lies, or would lie; raises GpunodesError for an id that is none of ours."""
    if not _ID.fullmatch(repair):
        raise GpunodesError(f"{repair!r} is no id of a repair", "letters, digits, dots, dashes and underscores")
    return _root() / repair


def open_folder(repair: str) -> Path:
    """Make the folder of a repair (0700)."""
    made = folder(repair)
    made.mkdir(mode=0o700, exist_ok=True)
    return made


def close_folder(repair: str) -> None:
    """Remove the folder of a repair again where nothing was kept in it."""
    made = folder(repair)
    if made.is_dir() and not any(made.iterdir()):
        made.rmdir()


def prune(days: float, mib: float, keep: Collection[str] = ()) -> None:
    """Remove what is older than ``days``, and the oldest until the rest fits into ``mib`` MiB.

    ``keep`` are the repairs that go on: theirs stays.
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
