"""One command at a time works on a cluster: a lock on its first control-plane machine.

The lock is held by a small program there, for as long as our SSH connection to it lives and a byte a quarter minute
comes through. So it ends by itself when the command ends, is killed, or its machine loses power; nothing has to expire
or be cleaned up.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import json
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from gpunodes.engine import shell
from gpunodes.engine.events import ssh_reason
from gpunodes.errors import GpunodesError

BEAT = 15.0
"""Seconds between two signs of life."""
PATIENCE = 60.0
"""Seconds without a sign of life after which the other side lets go."""
ANSWER = 60.0
"""Seconds to wait for the lock's answer; an emulated machine under load needs ten."""

# Runs on the control-plane machine; Python 3.9, standard library. Its first line of output is the verdict.
_HOLDER = """
import fcntl, json, os, select, sys
who, patience = sys.argv[1], float(sys.argv[2])
path = '/run/gpunodes-cluster.lock'
while True:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(json.dumps({'held_by': json.loads(os.read(fd, 4096) or b'{}')}), flush=True)
        sys.exit(0)
    # The holder before us may have removed the file between our two steps: then this is the lock of nothing.
    if os.path.exists(path) and os.fstat(fd).st_ino == os.stat(path).st_ino:
        break
    os.close(fd)
os.ftruncate(fd, 0)
os.write(fd, who.encode())
print(json.dumps({'held_by': None}), flush=True)
while select.select([0], [], [], patience)[0] and os.read(0, 64):
    pass
os.ftruncate(fd, 0)
os.unlink(path)
"""


class NoLock(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The machine does not give its lock, held or not."""


@contextlib.contextmanager
def hold(address: str, variables: Mapping[str, Any], command: str) -> Iterator[None]:
    """Hold the cluster's lock while inside.

    ``address`` and ``variables`` are those of the first control-plane machine. Raises GpunodesError when another
    command holds it, saying who and since when, and NoLock when the machine does not answer.
    """
    who = json.dumps(
        {
            "who": f"{getpass.getuser()}@{socket.gethostname()}",
            "command": command,
            "since": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        }
    )
    process = subprocess.Popen(
        [*shell.command(address, variables, "-o", "ConnectTimeout=30"), _remote(variables, who)],
        env=shell.environment(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stop = threading.Event()
    try:
        _take(process, address, shell.for_sudo(variables))
        beat = threading.Thread(target=_beat, args=(process, stop), daemon=True)
        beat.start()
        yield
    finally:
        stop.set()
        with contextlib.suppress(OSError):
            if process.stdin:
                process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _take(process: subprocess.Popen[str], address: str, first: str) -> None:
    timer = threading.Timer(ANSWER, process.kill)
    timer.start()
    try:
        if process.stdin:
            # An empty line ends a sudo that did not like the password; the holder takes it for a sign of life.
            with contextlib.suppress(OSError):
                process.stdin.write(f"{first}\n")
                process.stdin.flush()
        line = process.stdout.readline() if process.stdout else ""
    finally:
        timer.cancel()
    if not line:
        said = ssh_reason(process.stderr.read() if process.stderr else "")
        raise NoLock(
            f"the control-plane machine {address} does not give the cluster's lock: "
            f"{said or f'no answer in {ANSWER:.0f} s'}",
            "",
            "see that `ssh` to it and sudo there work; ansible_password and ansible_become_password are used",
        )
    held_by = json.loads(line)["held_by"]
    if held_by is not None:
        raise GpunodesError(
            f"another command works on this cluster: {held_by.get('command', 'unknown')} of "
            f"{held_by.get('who', 'somebody')}, since {held_by.get('since', 'a moment ago')}",
            "one at a time",
            "wait for it to end, then run again",
        )


def _beat(process: subprocess.Popen[str], stop: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):
        while not stop.wait(BEAT):
            if process.stdin:
                process.stdin.write(".")
                process.stdin.flush()


def _remote(variables: Mapping[str, Any], who: str) -> str:
    python = str(variables.get("ansible_python_interpreter", "/usr/bin/python3"))
    holder = f"{python} -c {shlex.quote(_HOLDER)} {shlex.quote(who)} {PATIENCE:.0f}"
    return shell.as_root(holder, variables)
