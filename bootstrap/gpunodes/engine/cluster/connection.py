"""A persistent connection to one control-plane machine: a small program there forwards requests to the API.

The program (``module_utils/session.py``) is sent over the SSH connection. No credentials leave the machine.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpunodes import shape
from gpunodes.engine.events import ssh_reason
from gpunodes.engine.remote import answers, openssh, programs, shell
from gpunodes.engine.remote.reach import LostError

ADMIN = "/etc/kubernetes/admin.conf"
NO_CLUSTER = -1
"""The status of a response when the control-plane machine runs no cluster."""
NO_SESSION = -2
"""The status when that machine is unreachable, or refuses the login."""
INVALID = -3
"""The status when it does not respond as the program does."""
OTHER_CLUSTER = -4
"""The status when its cluster has another CA than the request names."""
OTHER_API = -5
"""The status when the API of a kubeconfig is that of another cluster than this inventory had before."""
TOO_LARGE = -6
"""The status when there is a response that is too large: the control plane responds."""
CALL_S = 45.0
"""Time limit in seconds for one response; the program's own limit is 30."""
_REASON_S = 5.0
"""Seconds in which a broken connection must report why it ended."""
_MAX_CHARACTERS = 64 << 20
"""Maximum length of a line of the program; its responses have at most half of that."""

# The fields of a line of the program (module_utils/session.py).
_FRAME = {"id": int, "status": int, "body": object, "error": str, "time": float, "ca": shape.Optional(str)}


@dataclass(frozen=True, slots=True)
class Transport:
    """How the program is started: its argv, and the start of its standard input. ``machine`` is for messages."""

    argv: Sequence[str]
    start: bytes = field(default=b"", repr=False)
    environment: Mapping[str, str] | None = field(default=None, repr=False)
    """None: inherit the environment of this process."""
    machine: str = ""

    def connect(self) -> Connection:
        """The connection; it opens at its first request."""
        return Connection(self)


class Connects(Protocol):
    """How a session reaches an API: over a control-plane machine, or with a kubeconfig (``direct``)."""

    def connect(self) -> Connected:
        """The connection; it opens at its first request."""


class Connected(Protocol):
    """A connection to an API."""

    @property
    def machine(self) -> str:
        """For messages."""

    def request(self, fields: Mapping[str, Any], limit_s: float = CALL_S) -> Response:
        """Send a request once; the status is 0 or less when there is no response within ``limit_s``."""

    def close(self) -> None:
        """End the connection."""


def over_ssh(address: str, variables: Mapping[str, Any], kubeconfig: str = ADMIN, machine: str = "") -> Transport:
    """A connection to a control-plane machine, with a kubeconfig file there."""
    command = programs.pack("session", {"kubeconfig": kubeconfig}).command(variables)
    return Transport(
        [*shell.command(address, variables, *openssh.SESSION_TIMEOUTS), command.line],
        start=command.stdin,
        environment=shell.environment(variables),
        machine=machine or address,
    )


def here(python: str, kubeconfig: Path, machine: str = "here") -> Transport:
    """The same on the controller, with a kubeconfig file."""
    program = programs.pack("session", {"kubeconfig": str(kubeconfig)})
    return Transport(program.argv({"ansible_python_interpreter": python}), program.packed, machine=machine)


@dataclass(frozen=True, slots=True)
class Response:
    """A response of the API; ``time`` is the control plane's clock, in seconds since 1970."""

    status: int
    body: Any
    error: str
    time: float
    ca: str = ""
    """The hash of the CA of the machine's cluster, "" without one."""


class Connection:
    """A persistent connection, opened by the first request and reopened when it breaks. Thread-safe."""

    def __init__(self, transport: Transport) -> None:
        self.machine = transport.machine
        self._transport = transport
        self._process: subprocess.Popen[str] | None = None
        self._pending: dict[int, Future[Response]] = {}
        self._mutex = threading.Lock()
        self._next = 0

    def request(self, fields: Mapping[str, Any], limit_s: float = CALL_S) -> Response:
        """Send a request once; the status is 0 or less when there is no response within ``limit_s``.

        A connection without a response in time is closed: then no request on it has a response.
        """
        future: Future[Response] = Future()
        broken = ""
        with self._mutex:
            self._next += 1
            number = self._next
            self._pending[number] = future
            try:
                process = self._open()
                assert process.stdin  # noqa: S101 - for the type checker
                process.stdin.write(json.dumps({"id": number, **fields}) + "\n")
                process.stdin.flush()
            except BrokenPipeError as error:
                # ssh ended: the reader of its output gets the reason, and fails this request with it.
                broken = str(error)
            except OSError as error:
                self._pending.pop(number, None)
                return Response(NO_SESSION, None, str(error), time.time())
        try:
            return future.result(_REASON_S if broken else limit_s)
        except TimeoutError:
            with self._mutex:
                self._pending.pop(number, None)
                self._end()
            return Response(NO_SESSION, None, broken or f"no response in {limit_s:.0f} s", time.time())

    def close(self) -> None:
        """End the connection."""
        with self._mutex:
            self._end()

    def _open(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._process = subprocess.Popen(
            self._transport.argv,
            env=self._transport.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdin  # noqa: S101 - for the type checker
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        programs.send(self._process, self._transport.start)
        return self._process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout  # noqa: S101 - for the type checker
        assert process.stderr  # noqa: S101 - for the type checker
        with contextlib.suppress(ValueError, OSError):
            try:
                answers.skip_banner(process.stdout)
            except LostError as error:
                process.kill()
                process.wait()
                self._fail_pending(process, NO_SESSION, error.message)
                return
            while line := process.stdout.readline(_MAX_CHARACTERS):
                try:
                    frame = json.loads(line)
                except (ValueError, RecursionError):
                    frame = None
                if violation := shape.wrong(frame, _FRAME):
                    # The request that this line belongs to is unknown: all of them fail.
                    self._fail_pending(process, INVALID, violation)
                    continue
                with self._mutex:
                    future = self._pending.pop(frame["id"], None)
                if future is not None:
                    future.set_result(
                        Response(frame["status"], frame["body"], frame["error"], frame["time"], frame.get("ca", ""))
                    )
        output = ""
        with contextlib.suppress(ValueError, OSError):
            output = ssh_reason(process.stderr.read(4096))
        self._fail_pending(process, NO_SESSION, output or "the session ended")

    def _fail_pending(self, process: subprocess.Popen[str], status: int, why: str) -> None:
        """Fail all requests that wait for a response of ``process``."""
        with self._mutex:
            if self._process is not None and self._process is not process:
                return  # a new process serves the connection now
            failed, self._pending = self._pending, {}
        for future in failed.values():
            future.set_result(Response(status, None, why, time.time()))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            programs.end(process, 2)
