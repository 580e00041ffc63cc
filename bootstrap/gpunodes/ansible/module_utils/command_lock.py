"""The lock of commands that cannot use Leases because no API exists yet: a file on the control-plane machine.

The process that holds it is a program that the controller sends (engine/locks.py). It ends when its standard input
ends, or when no heartbeat arrives: nothing must expire or be cleaned up.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
import time
from collections.abc import Mapping
from typing import Any

PATH = "/run/gpunodes-cluster.lock"
_TRIES, _PAUSE_S = 20, 0.1
_MAX_BYTES = 4096


def main(options: Mapping[str, Any]) -> None:
    """Hold the lock at ``path`` as ``who`` until no heartbeat arrives for ``patience_s`` seconds.

    It prints ``{"held_by": null}``, or what another holder has written into the file and ends. Then it echoes each
    heartbeat, a byte of standard input.
    """
    path = str(options["path"])
    descriptor = _take(path)
    if descriptor is None:
        return
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(options["who"]).encode())
    _print_holder(None)
    while select.select([0], [], [], options["patience_s"])[0]:
        heartbeats = os.read(0, 64)
        if not heartbeats:
            break
        os.write(1, heartbeats)
    os.ftruncate(descriptor, 0)
    os.unlink(path)


def _take(path: str) -> int | None:
    """The descriptor of the locked file; None, after the holder is printed, where another process has locked it."""
    tries = _TRIES
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, _MAX_BYTES)
            os.close(descriptor)
            tries -= 1
            # Empty for a moment: a process only tests the lock, or has not written its name yet.
            if not holder and tries:
                time.sleep(_PAUSE_S)
                continue
            _print_holder(json.loads(holder or b"{}"))
            return None
        # The previous holder may have removed the file between open and flock: then this lock is on a deleted file.
        if os.path.exists(path) and os.fstat(descriptor).st_ino == os.stat(path).st_ino:
            return descriptor
        os.close(descriptor)


def _print_holder(holder: Any) -> None:
    sys.stdout.write(json.dumps({"held_by": holder}) + "\n")
    sys.stdout.flush()


def holder(path: str = PATH) -> Any:
    """What the holder has written into the lock file; None where the lock is free, {} if that is unknown."""
    try:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return json.loads(file.read(_MAX_BYTES) or b"{}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return None
