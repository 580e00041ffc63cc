"""The machine's lock: only one run changes a machine at a time.

When a command is killed, its module keeps running on the machine. The next run waits until that module has ended, and
the programs that it started: they inherit the lock's descriptor, so an orphaned apt-get still holds the lock, and so
does a program that survives its kill. kubeadm is the exception: it is killed when its command disconnects.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from . import process
from .problem import MachineProblem

PATH = "/run/gpunodes.lock"
WAIT_S = 900


@contextlib.contextmanager
def held(wait_s: float = WAIT_S, path: str = PATH) -> Iterator[None]:
    """Hold the lock; raises MachineProblem when another run holds it longer than ``wait_s``."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(descriptor, time.monotonic() + wait_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} since {time.strftime('%H:%M:%S')}".encode("ascii"), 0)
        process.INHERITED.append(descriptor)
        yield
    finally:
        with contextlib.suppress(ValueError):
            process.INHERITED.remove(descriptor)
            if process.LEFT_BEHIND:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, process.LEFT_BEHIND[-1].encode("ascii", "replace"), 0)
        os.close(descriptor)


def _take(descriptor: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if process.is_disconnected():
                raise MachineProblem("the command on the controller has ended") from error
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 200, 0).decode("ascii", "replace")
                raise MachineProblem(
                    f"another run of gpunodes is changing this machine ({holder})",
                    "one run at a time",
                    "wait until it ends; a program that hangs in the kernel may need a reboot",
                ) from error
            time.sleep(1)
