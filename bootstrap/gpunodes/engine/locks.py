"""One command at a time where no cluster can be asked for its Leases: a lock on the first control-plane machine.

The lock is held by a small program there, for as long as our SSH connection to it lives and a byte every ten seconds
comes through. So it ends by itself when the command ends, is killed, or its machine loses power; nothing has to expire
or be cleaned up. Each byte comes back: where they do not, the lock may be somebody else's soon.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import json
import os
import secrets
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpunodes import shape
from gpunodes.ansible.module_utils.gpunodes.session import COMMAND_LOCK
from gpunodes.engine import shell
from gpunodes.engine.events import ssh_reason
from gpunodes.errors import GpunodesError, sentence
from gpunodes.shape import Maybe, Named

BEAT = 10.0
"""Seconds between two signs of life."""
PATIENCE = 60.0
"""Seconds without a sign of life after which the other side lets go."""
MARGIN = 15.0
"""How much earlier we take the lock for lost."""
ANSWER = 60.0
"""Seconds to wait for the lock's answer; an emulated machine under load needs ten."""
_AGAIN = 5.0
"""Seconds between two attempts to take the lock of a machine that starts."""
_LONGEST = 65536
"""Characters of an answer that are read."""
_ANSWER_SHAPE = {"held_by": Maybe(Named(str, 20))}

# Runs on the control-plane machine; Python 3.9, standard library. Its first line of output is the verdict.
_HOLDER = """
import fcntl, json, os, select, sys, time
who, patience, path = sys.argv[1], float(sys.argv[2]), sys.argv[3]
tries = 20
while True:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said, tries = os.read(fd, 4096), tries - 1
        # Whoever only looks whether it is held has it for a moment, and so has who did not write their name yet.
        if not said and tries:
            os.close(fd)
            time.sleep(0.1)
            continue
        print(json.dumps({'held_by': json.loads(said or b'{}')}), flush=True)
        sys.exit(0)
    # The holder before us may have removed the file between our two steps: then this is the lock of nothing.
    if os.path.exists(path) and os.fstat(fd).st_ino == os.stat(path).st_ino:
        break
    os.close(fd)
os.ftruncate(fd, 0)
os.write(fd, who.encode())
print(json.dumps({'held_by': None}), flush=True)
while select.select([0], [], [], patience)[0]:
    signs = os.read(0, 64)
    if not signs:
        break
    os.write(1, signs)
os.ftruncate(fd, 0)
os.unlink(path)
"""


class NoLock(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The machine does not give its lock, held or not."""


class Taken(GpunodesError):  # noqa: N818 - as above
    """Another command holds the lock."""

    def __init__(self, holder: Mapping[str, Any]) -> None:
        super().__init__(
            f"another command works on this cluster: {holder.get('command', 'unknown')} of "
            f"{holder.get('who', 'somebody')}, since {holder.get('since', 'a moment ago')}",
            "one at a time",
            "wait for it to end, then run again",
        )


class Unresponsive(GpunodesError):  # noqa: N818 - as above
    """Nobody can tell whether the lock is still held."""


class Lock:
    """A lock that is held. ``start`` makes a connection that holds it, or raises."""

    def __init__(self, start: Callable[[], subprocess.Popen[str]], address: str, *, restarts: bool) -> None:
        self._start = start
        self._address = address
        self._restarts = restarts
        self._process = start()
        self._heard = clock()
        """When the last sign of life that came back was sent."""
        self._stop = threading.Event()
        self._lost: GpunodesError | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def lost(self) -> GpunodesError | None:
        """Why the lock may be held no more, ``Silent`` while nobody can tell; None while it surely is."""
        silent = clock() - self._heard
        if self._lost is None and silent > PATIENCE - MARGIN:
            return self._gone(f"it has not answered for {silent:.0f} s", Unresponsive)
        return self._lost

    def close(self) -> None:
        """Let it go."""
        self._stop.set()
        _end(self._process)
        self._thread.join(timeout=5)

    def _gone(self, why: str, kind: type[GpunodesError] = GpunodesError) -> GpunodesError:
        return kind(
            f"the connection to {self._address} that holds the cluster's lock is lost: {why}",
            "a lock that is held to the end",
            "run the command again to go on",
        )

    def _keep(self) -> None:
        while True:
            self._beat(self._process)
            if self._stop.is_set():
                return
            if not self._restarts:
                self._lost = self._gone("it ended")
                return
            # What we do to the machine may have restarted it.
            while not self._stop.wait(_AGAIN):
                try:
                    self._process = self._start()
                    break
                except NoLock:
                    continue
                except Taken as taken:
                    self._lost = taken
                    return
                except Exception as problem:
                    self._lost = self._gone(sentence(problem))
                    return
            if self._stop.is_set():
                _end(self._process)
                return

    def _beat(self, process: subprocess.Popen[str]) -> None:
        """Give signs of life, and hear them come back; returns when the connection has ended."""
        assert process.stdin and process.stdout  # noqa: S101, PT018 - for the type checker
        self._heard = clock()
        sent: deque[float] = deque()
        with contextlib.suppress(OSError, ValueError):
            while not self._stop.is_set():
                sent.append(clock())
                process.stdin.write(".")
                process.stdin.flush()
                due = sent[-1] + BEAT
                while (rest := due - clock()) > 0:
                    if not select.select([process.stdout], [], [], rest)[0]:
                        break
                    signs = os.read(process.stdout.fileno(), 4096)
                    if not signs:
                        return
                    for _ in range(min(signs.count(b"."), len(sent))):
                        self._heard = sent.popleft()


@contextlib.contextmanager
def hold(
    address: str, variables: Mapping[str, Any], command: str, holder: str = "", *, restarts: bool = False
) -> Iterator[Lock]:
    """Hold the cluster's lock while inside.

    ``address`` and ``variables`` are those of the first control-plane machine, which the command itself may restart
    (``restarts``: then the lock is taken again). ``holder`` names us in Leases. Raises Taken when another command holds
    it, saying who and since when, and NoLock when the machine does not answer.
    """
    who = json.dumps(
        {
            "who": f"{getpass.getuser()}@{socket.gethostname()}",
            "command": command,
            "since": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "holder": holder,
            # Told apart from others of this user that began in the same second.
            "id": secrets.token_hex(8),
        }
    )
    lock = Lock(lambda: _started(address, variables, who), address, restarts=restarts)
    try:
        yield lock
    finally:
        lock.close()


def clock() -> float:
    """Seconds that nobody sets, and that go on while this machine sleeps (clock_gettime(2), CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _started(address: str, variables: Mapping[str, Any], who: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*shell.command(address, variables, "-o", "ConnectTimeout=30"), _remote(variables, who)],
        env=shell.environment(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        held_by = _asked(process, address, shell.for_sudo(variables))
        if held_by == json.loads(who):
            raise NoLock(f"{address} has not noticed yet that a connection of ours ended")
        if held_by is not None:
            raise Taken(held_by)
    except BaseException:
        _end(process)
        raise
    return process


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        if process.stdin:
            process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _asked(process: subprocess.Popen[str], address: str, first: str) -> Mapping[str, str] | None:
    """Who holds the lock: None when it is this process, or what its holder wrote there."""
    timer = threading.Timer(ANSWER, process.kill)
    timer.start()
    try:
        if process.stdin:
            # An empty line ends a sudo that did not like the password; the holder takes it for a sign of life.
            with contextlib.suppress(OSError):
                process.stdin.write(f"{first}\n")
                process.stdin.flush()
        line = ""
        if process.stdout:
            shell.skip_banner(process.stdout)
            line = process.stdout.readline(_LONGEST)
    finally:
        timer.cancel()
    if not line:
        output = ssh_reason(process.stderr.read() if process.stderr else "")
        raise NoLock(
            f"the control-plane machine {address} does not give the cluster's lock: "
            f"{output or f'no answer in {ANSWER:.0f} s'}",
            "",
            "see that `ssh` to it and sudo there work; ansible_password and ansible_become_password are used",
        )
    return _held_by(line, address)


def _held_by(line: str, address: str) -> Mapping[str, str] | None:
    """Who holds the lock, by what the machine answers; raises NoLock for what is no answer."""
    answer: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(line)
    if wrong := shape.wrong(answer, _ANSWER_SHAPE):
        raise NoLock(
            f"the control-plane machine {address} answers {line[:80]!r} for who holds the cluster's lock: {wrong}",
            "its holder, or nobody",
            "see what its /usr/bin/python3 and its login shell write",
        )
    held_by: Mapping[str, str] | None = answer["held_by"]
    return held_by


def _remote(variables: Mapping[str, Any], who: str) -> str:
    return shell.remote(shell.python(variables, _HOLDER, who, f"{PATIENCE:.0f}", COMMAND_LOCK), variables)
