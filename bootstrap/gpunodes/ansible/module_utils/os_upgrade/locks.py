"""The locks of apt and dpkg: who holds them, and waiting for that. Another program's lock is never broken."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time

from .. import disk, tree
from ..problem import MachineProblem

PATHS = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
)
PROC = "/proc"
LIMIT_S = 900
_FLOCK = "hhqqi"
"""struct flock on 64-bit Linux: type, whence, start, length, process."""


def holder(path: str) -> int:
    """The process that holds a lock of apt or dpkg, 0 for none (fcntl(2), F_GETLK)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else int(pid)
    finally:
        os.close(descriptor)


def described(pid: int) -> str:
    """A process and its service, for a message; processes choose their names."""
    name = " ".join((disk.read(f"{PROC}/{pid}/comm") or "").split())
    service = re.search(r"/([A-Za-z0-9:_.@-]{1,100}\.service)", disk.read(f"{PROC}/{pid}/cgroup") or "")
    return f"{tree.shown(name)[:60] or 'a process'} (process {pid}{f' of {service[1]}' if service else ''})"


def wait(limit_s: float = LIMIT_S) -> None:
    """Wait until nobody holds a lock; raises MachineProblem with the holder after ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while holders := [pid for pid in map(holder, PATHS) if pid]:
        if time.monotonic() >= deadline:
            raise MachineProblem(
                f"{described(holders[0])} has held the package manager's lock for {limit_s:.0f} s",
                "a package manager that nobody else uses",
                "wait for it, or stop it (`systemctl stop unattended-upgrades packagekit`), and run the command again",
            )
        time.sleep(1)
