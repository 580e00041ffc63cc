"""A lock on a machine, over SSH: on GPU hosts, and on control planes whose API does not respond (engine/group_lock.py).

A small program on that machine (``module_utils/command_lock.py``) holds the lock as long as the SSH connection
is open and a heartbeat byte arrives every ten seconds. So the lock is released when the command ends, is killed, or its
controller loses power; nothing must expire or be cleaned up. The program echoes each byte: without echoes another
command may soon hold the lock.
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
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpunodes import shape
from gpunodes.ansible.module_utils import command_lock
from gpunodes.engine.events import ssh_reason
from gpunodes.engine.remote import answers, programs, shell
from gpunodes.engine.remote.reach import LostError
from gpunodes.errors import GpunodesError, sentence
from gpunodes.shape import Maybe, Named

BEAT = 10.0
"""Seconds between two heartbeats."""
PATIENCE = 60.0
"""Seconds without a heartbeat after which the program on the machine releases the lock."""
MARGIN = 15.0
"""Seconds by which the controller considers the lock lost earlier."""
ANSWER = 60.0
"""Time limit in seconds for the program's first line; an emulated machine under load needs ten."""
_AGAIN = 5.0
"""Seconds between two attempts to take the lock of a machine that starts."""
_END_S = 10.0
"""Seconds for the program that holds the lock to end."""
_MAX_CHARACTERS = 65536
"""Maximum length of the program's first line."""
_MAX_REASON = 4096
"""Maximum length of what is read of ssh's messages."""
_HOLDER_SHAPE = {"held_by": Maybe(Named(str, 20))}


class NoLock(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The lock cannot be taken: the machine does not respond as expected."""


class Taken(GpunodesError):  # noqa: N818 - as above
    """Another command holds the lock."""

    def __init__(self, holder: Mapping[str, Any], machine: str = "") -> None:
        super().__init__(
            f"another command works on {machine or 'this cluster'}: {holder.get('command', 'unknown')} of "
            f"{holder.get('who', 'an unknown user')}, since {holder.get('since', 'a moment ago')}",
            "one at a time",
            "wait for it to end, then run again",
        )


class Unresponsive(GpunodesError):  # noqa: N818 - as above
    """No heartbeat is echoed: the lock may be lost."""


class Lock:
    """A held lock. ``start`` opens a connection that holds it, or raises."""

    def __init__(
        self, start: Callable[[], subprocess.Popen[str]], address: str, *, restarts: bool, machine: str = ""
    ) -> None:
        self._start = start
        self._address = address
        self._what = _lock_of(machine)
        self._restarts = restarts
        self._process = start()
        self._last_echo = clock()
        """When the last echoed heartbeat was sent."""
        self._resumed = 0.0
        """When this process went on after it was suspended for longer than the lock lasts; 0 if it never was."""
        self._stop = threading.Event()
        self._lost: GpunodesError | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def lost(self) -> GpunodesError | None:
        """Why the lock is lost, ``Unresponsive`` when it may be lost; None while it is held."""
        age = clock() - self._last_echo
        if self._lost is None and age > PATIENCE - MARGIN:
            return self._error_lost(f"no response for {age:.0f} s", Unresponsive)
        return self._lost

    def close(self) -> None:
        """Release the lock."""
        self._stop.set()
        programs.end(self._process, _END_S)
        self._thread.join(timeout=5)

    def _error_lost(self, why: str, kind: type[GpunodesError] = GpunodesError) -> GpunodesError:
        return kind(
            f"the connection to {self._address} that holds {self._what} is lost: {why}",
            "a lock that is held to the end",
            "run the command again to continue",
        )

    def _keep(self) -> None:
        while True:
            self._beat(self._process)
            if self._stop.is_set():
                return
            if self._last_echo < self._resumed:
                # The machine did not restart: others had the time to begin, and to end.
                self._lost = self._error_lost("this command was suspended")
                return
            if not self._restarts:
                self._lost = self._error_lost("it was closed")
                return
            # The command itself may have restarted the machine.
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
                    self._lost = self._error_lost(sentence(problem))
                    return
            if self._stop.is_set():
                programs.end(self._process, _END_S)
                return

    def _beat(self, process: subprocess.Popen[str]) -> None:
        """Send heartbeats and read their echoes; returns when the connection has ended."""
        assert process.stdin and process.stdout  # noqa: S101, PT018 - for the type checker
        self._last_echo = clock()
        sent: deque[float] = deque()
        with contextlib.suppress(OSError, ValueError):
            while not self._stop.is_set():
                sent.append(clock())
                process.stdin.write(".")
                process.stdin.flush()
                due = sent[-1] + BEAT
                while (rest := due - clock()) > 0:
                    readable = select.select([process.stdout], [], [], rest)[0]
                    if clock() - due > PATIENCE - MARGIN:
                        self._resumed = clock()
                    if not readable:
                        break
                    echoes = os.read(process.stdout.fileno(), 4096)
                    if not echoes:
                        return
                    for _ in range(min(echoes.count(b"."), len(sent))):
                        self._last_echo = sent.popleft()


@contextlib.contextmanager
def hold(
    address: str,
    variables: Mapping[str, Any],
    command: str,
    holder: str = "",
    *,
    restarts: bool = False,
    machine: str = "",
) -> Iterator[Lock]:
    """Hold the cluster's lock while inside, or that of a ``machine`` without a cluster.

    ``address`` and ``variables`` are those of a control-plane machine, or of that machine. ``restarts``: the
    command may restart it, and then the lock is taken again. ``holder`` is the identity of this command in Leases.
    Raises Taken, with the holder and the time, when another command holds it, and NoLock when the machine does not
    respond.
    """
    who = {
        "who": f"{getpass.getuser()}@{socket.gethostname()}",
        "command": command,
        "since": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "holder": holder,
        # Distinguishes commands that the same user started in the same second.
        "id": secrets.token_hex(8),
    }
    lock = Lock(lambda: _connect(address, variables, who, machine), address, restarts=restarts, machine=machine)
    try:
        yield lock
    finally:
        lock.close()


def clock() -> float:
    """A clock that cannot be set and that runs while the controller is suspended.

    On Linux CLOCK_BOOTTIME (clock_gettime(2)); macOS's CLOCK_MONOTONIC runs in sleep (its clock_gettime(3)).
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC)


def _connect(address: str, variables: Mapping[str, Any], who: Mapping[str, str], machine: str) -> subprocess.Popen[str]:
    options = {"who": who, "patience_s": PATIENCE, "path": command_lock.PATH}
    command = programs.pack("command_lock", options).command(variables)
    process = subprocess.Popen(
        [*shell.command(address, variables), command.line],
        env=shell.environment(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        held_by = _read_holder(process, address, command.stdin, machine)
        if held_by == who:
            raise NoLock(f"{address} has not yet released the lock of the previous connection")
        if held_by is not None:
            raise Taken(held_by, machine)
    except BaseException:
        programs.end(process, _END_S)
        raise
    return process


def _read_holder(
    process: subprocess.Popen[str], address: str, start: bytes, machine: str = ""
) -> Mapping[str, str] | None:
    """The holder of the lock, as it wrote itself there; None when this process holds it."""
    timer = threading.Timer(ANSWER, process.kill)
    timer.start()
    try:
        # The empty line ends a sudo that refused the password; for the lock program it is a heartbeat.
        with contextlib.suppress(OSError):
            programs.send(process, start + b"\n")
        line, output = "", ""
        if process.stdout and process.stderr:
            answers.skip_banner(process.stdout)
            line = process.stdout.readline(_MAX_CHARACTERS)
            # Before the time limit ends: a machine can close its output and keep the connection open.
            output = "" if line else ssh_reason(process.stderr.read(_MAX_REASON))
    except LostError as error:
        output = error.message
    finally:
        timer.cancel()
    if not line:
        # It may print for ever: it is not waited for.
        process.kill()
        raise NoLock(
            f"cannot take {_lock_of(machine)} on the {'' if machine else 'control-plane '}machine {address}: "
            f"{output or f'no response in {ANSWER:.0f} s'}",
            "",
            "check that `ssh` to it works, and sudo there; ansible_password and ansible_become_password are used",
        )
    return _parse_holder(line, address, machine)


def _lock_of(machine: str) -> str:
    return f"the lock of {machine}" if machine else "the cluster's lock"


def _parse_holder(line: str, address: str, machine: str) -> Mapping[str, str] | None:
    """The holder of the lock in the program's first line; raises NoLock for an invalid line."""
    document: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(line)
    if violation := shape.wrong(document, _HOLDER_SHAPE):
        raise NoLock(
            f"the {'' if machine else 'control-plane '}machine {address} reports {line[:80]!r} as holder of "
            f"{_lock_of(machine)}: {violation}",
            "the name of the holder, or null",
            "check the output of its /usr/bin/python3 and of its login shell",
        )
    held_by: Mapping[str, str] | None = document["held_by"]
    return held_by
