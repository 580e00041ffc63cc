"""A persistent session with the Kubernetes API, through a small program on the control-plane machine.

The program (``module_utils/session.py``) is sent over the SSH connection. It forwards requests to the API and
returns the responses; no credentials leave the control-plane machine.
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
from typing import Any

from gpunodes import shape
from gpunodes.engine.events import ssh_reason
from gpunodes.engine.remote import answers, openssh, programs, shell

ADMIN = "/etc/kubernetes/admin.conf"
NO_CLUSTER = -1
"""The status of a response when the control-plane machine runs no cluster."""
NO_SESSION = -2
"""The status when that machine is unreachable, or refuses the login."""
_INVALID = -3
_CALL_S = 45.0
"""Time limit in seconds for one response; the session's own limit is 30."""
_REASON_S = 5.0
"""Seconds in which a broken session must report why it ended."""

# The fields of a line of the session (module_utils/session.py).
_FRAME = {"id": int, "status": int, "body": object, "error": str, "time": float}


@dataclass(frozen=True, slots=True)
class Transport:
    """How the session's program is started: its argv, and the start of its standard input."""

    argv: Sequence[str]
    start: bytes = field(default=b"", repr=False)
    environment: Mapping[str, str] | None = field(default=None, repr=False)
    """None: inherit the environment of this process."""


def over_ssh(address: str, variables: Mapping[str, Any], kubeconfig: str = ADMIN) -> Transport:
    """A session on a control-plane machine, with a kubeconfig file there."""
    command = programs.pack("session", {"kubeconfig": kubeconfig}).command(variables)
    return Transport(
        [*shell.command(address, variables, *openssh.SESSION_TIMEOUTS), command.line],
        start=command.stdin,
        environment=shell.environment(variables),
    )


def here(python: str, kubeconfig: Path) -> Transport:
    """A session on the controller, with a kubeconfig file."""
    program = programs.pack("session", {"kubeconfig": str(kubeconfig)})
    return Transport(program.argv({"ansible_python_interpreter": python}), program.packed)


@dataclass(frozen=True, slots=True)
class Response:
    """A response of the API; ``time`` is the control plane's clock, in seconds since 1970."""

    status: int
    body: Any
    error: str
    time: float


class Session:
    """A persistent session, opened by the first request and reopened when the connection breaks. Thread-safe."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._process: subprocess.Popen[str] | None = None
        self._pending: dict[int, Future[Response]] = {}
        self._mutex = threading.Lock()
        self._next = 0
        self.calls = 0
        """The number of requests; tests measure it."""

    def request(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", keep: Sequence[str] = ()
    ) -> Response:
        """Send a request once; the status is 0 or less when there is no response."""
        fields = {"method": method, "path": path, "body": body, "type": kind, "keep": list(keep)}
        future: Future[Response] = Future()
        broken = ""
        with self._mutex:
            self._next += 1
            self.calls += 1
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
            return future.result(_REASON_S if broken else _CALL_S)
        except TimeoutError:
            with self._mutex:
                self._pending.pop(number, None)
                self._end()
            return Response(NO_SESSION, None, broken or f"no response in {_CALL_S:.0f} s", time.time())

    def close(self) -> None:
        """End the session."""
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
            answers.skip_banner(process.stdout)
            for line in process.stdout:
                try:
                    frame = json.loads(line)
                except (ValueError, RecursionError):
                    frame = None
                if violation := shape.wrong(frame, _FRAME):
                    # The request that this line belongs to is unknown: all of them fail.
                    self._fail_pending(process, _INVALID, violation)
                    continue
                with self._mutex:
                    future = self._pending.pop(frame["id"], None)
                if future is not None:
                    future.set_result(Response(frame["status"], frame["body"], frame["error"], frame["time"]))
        output = ""
        with contextlib.suppress(ValueError, OSError):
            output = ssh_reason(process.stderr.read(4096))
        self._fail_pending(process, NO_SESSION, output or "the session ended")

    def _fail_pending(self, process: subprocess.Popen[str], status: int, why: str) -> None:
        """Fail all requests that wait for a response of ``process``."""
        with self._mutex:
            if self._process is not None and self._process is not process:
                return  # a new process serves the session now
            failed, self._pending = self._pending, {}
        for future in failed.values():
            future.set_result(Response(status, None, why, time.time()))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            programs.end(process, 2)
