"""A cache of folders that are either whole or not there."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def keep(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, filled by ``make`` in a folder beside it and renamed, unless it is there already."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        make(folder)
        folder.chmod(0o755)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return target


@contextmanager
def locked(cache: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Only one build at a time in ``cache``; the lock goes with its process, whatever ends it."""
    cache.mkdir(parents=True, exist_ok=True)
    handle = os.open(cache / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another build of the mirror")
            fcntl.flock(handle, fcntl.LOCK_EX)
        # What a killed build left; nobody else works here while we hold the lock.
        for left in cache.glob(".*.????????"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)
