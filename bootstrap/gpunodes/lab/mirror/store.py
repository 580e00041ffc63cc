"""A cache of folders, each of which is complete or does not exist."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def keep(target: Path, make: Callable[[Path], None]) -> Path:
    """Return ``target``; if it does not exist, ``make`` first fills a scratch folder that is then renamed to it."""
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
    """Lock ``cache`` for one build at a time; the lock is released when its process ends."""
    cache.mkdir(parents=True, exist_ok=True)
    handle = os.open(cache / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another command that fills the same cache")
            fcntl.flock(handle, fcntl.LOCK_EX)
        # Remains of a killed build: while the lock is held, no other build uses the cache.
        for folder in cache.glob(".*.????????"):
            shutil.rmtree(folder, ignore_errors=True)
        yield
    finally:
        os.close(handle)
