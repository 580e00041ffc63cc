"""A program on a machine that exchanges large data with the controller: nothing is held in memory.

Every read has a deadline of its own, so that a connection that stalls ends the exchange, however long it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from gpunodes.ansible.module_utils.sent import MARK
from gpunodes.engine.events import ssh_reason
from gpunodes.engine.remote import answers, openssh, programs, shell
from gpunodes.engine.remote.messages import Messages
from gpunodes.errors import GpunodesError

IDLE_S = 120.0
"""Seconds without any data after which a connection counts as broken."""
_LINE = 1 << 20
"""Maximum length of a line of JSON."""
_CHUNK = 1 << 18


class StreamLost(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The connection ended, stalled, or carried something else than the program's output."""


class Stream:
    """A running program. A context manager: at its end the connection is closed and the program ends."""

    def __init__(
        self, machine: str, argv: list[str], start: bytes, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start ``argv`` and send ``start``, the program itself; ``machine`` is its name in messages."""
        self._machine = machine
        self._buffer = bytearray()
        self._process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stderr  # noqa: S101 - for the type checker
        self._messages = Messages(self._process.stderr)
        self._start = start

    def __enter__(self) -> Stream:
        try:
            self.write(self._start)
            self._skip_banner()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the program."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()
        # PermissionError: macOS, for a process that has ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def write(self, data: bytes) -> None:
        """Send data; raises StreamLost."""
        assert self._process.stdin  # noqa: S101 - for the type checker
        descriptor = self._process.stdin.fileno()
        os.set_blocking(descriptor, False)
        rest = memoryview(data)
        while rest:
            if not select.select([], [descriptor], [], IDLE_S)[1]:
                raise self.lost(f"it took no data for {IDLE_S:.0f} s")
            try:
                rest = rest[os.write(descriptor, rest[:_CHUNK]) :]
            except OSError as error:
                raise self.lost("it closed the connection") from error

    def line(self, patience_s: float = IDLE_S) -> dict[str, Any]:
        """The next line, a JSON object; raises StreamLost for anything else."""
        deadline = time.monotonic() + patience_s
        while b"\n" not in self._buffer:
            if len(self._buffer) > _LINE:
                raise self.lost("it sent a line that is too long")
            self._fill(deadline - time.monotonic())
        text, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise self.lost("it sent something else than the program's output")
        return document

    def read(self, most: int) -> bytes:
        """At least one and at most ``most`` bytes; raises StreamLost at the end of the output."""
        if not self._buffer:
            self._fill(IDLE_S)
        data = bytes(self._buffer[:most])
        del self._buffer[:most]
        return data

    def lost(self, why: str) -> StreamLost:
        """The error for a broken exchange, with what ssh reports about it."""
        reason = ssh_reason(self._messages.text())
        return StreamLost(
            f"{self._machine}: {reason or why}",
            "a machine that is reachable by SSH, with sudo",
            "check that `ssh` to it works, and sudo there, then run the command again",
        )

    def _fill(self, patience_s: float) -> None:
        assert self._process.stdout  # noqa: S101 - for the type checker
        if patience_s <= 0 or not select.select([self._process.stdout], [], [], patience_s)[0]:
            raise self.lost("no data arrived in time")
        data = os.read(self._process.stdout.fileno(), _CHUNK)
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise self.lost("the connection ended early")
        self._buffer += data

    def _skip_banner(self) -> None:
        mark = f"\n{MARK}\n".encode()
        deadline = time.monotonic() + IDLE_S
        while mark not in self._buffer:
            if len(self._buffer) > answers.MAX_BANNER_BYTES:
                raise self.lost("its login shell prints too much")
            self._fill(deadline - time.monotonic())
        self._buffer[:] = bytes(self._buffer).partition(mark)[2]


def over_ssh(
    machine: str, address: str, variables: Mapping[str, Any], program: str, options: Mapping[str, Any]
) -> Stream:
    """A program of module_utils on a machine, as root."""
    command = programs.pack(program, options).command(variables)
    argv = [*shell.command(address, variables, *openssh.SESSION_TIMEOUTS), command.line]
    return Stream(machine, argv, command.stdin, shell.environment(variables))
