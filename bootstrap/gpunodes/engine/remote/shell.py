"""One command on one machine over OpenSSH, with a hard deadline and limited output.

A machine that hangs or shuts down can keep an SSH session open for ever: the controller enforces the deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpunodes import settings
from gpunodes.engine.remote import openssh
from gpunodes.engine.remote.commands import RemoteCommand
from gpunodes.engine.remote.targets import PASSWORDS, first, ssh_argv


class Reached(StrEnum):
    """How far the command came."""

    ENDED = "ended"
    """The command ran and exited."""
    REFUSED = "refused"
    """The kernel responds, but no sshd accepts the connection, or sshd sends no SSH banner, or closes it."""
    NO_RESPONSE = "no_response"
    """No connection."""
    TIMEOUT = "timeout"
    """The command did not end before the deadline."""


@dataclass(frozen=True, slots=True)
class RemoteResult:
    """The result of a command."""

    reached: Reached
    code: int = 255
    out: bytes = b""
    err: str = ""

    @property
    def ok(self) -> bool:
        return self.reached is Reached.ENDED and self.code == 0


def command(address: str, variables: Mapping[str, Any], *more: str) -> list[str]:
    """The ssh command for a machine with these inventory variables, without the remote command, which goes at its end.

    ``more`` are further options, which override those for every connection: ssh uses the first value. It must be
    started with the ``environment`` for the same variables.
    """
    arguments = ssh_argv(variables)
    own = [*more, *openssh.options(address, arguments), "-o", "ControlMaster=no", "-o", "ControlPath=none"]
    ssh = ["ssh", "-T", "-o", "BatchMode=yes"]
    if first(variables, PASSWORDS):
        ssh = ["env", f"{_PROMPT}={_prompt(address, arguments)}", "ssh", "-T", "-o", "NumberOfPasswordPrompts=1"]
    return [*ssh, *own, *arguments, *openssh.NOTHING_FORWARDED, "--", address]


def _prompt(address: str, arguments: Sequence[str]) -> str:
    """The prompt of ssh for a machine's password (sshconnect2.c); the prompt for a jump host has another name in it."""
    try:
        options = openssh.resolved(address, arguments)
    except openssh.ResolveError:
        # ssh fails for the same reason, and reports it, before it prompts.
        return ""
    return f"{options['user']}@{options.get('hostkeyalias') or options['hostname']}'s password: "


def environment(variables: Mapping[str, Any]) -> dict[str, str] | None:
    """The environment for ``command``, with the login password where the inventory has one; None: inherit it."""
    password = first(variables, PASSWORDS)
    if not password:
        return None
    return {**os.environ, "SSH_ASKPASS": str(_askpass()), "SSH_ASKPASS_REQUIRE": "force", _LOGIN: password}


def _askpass() -> Path:
    """The program that prints the password; ssh reads it from a terminal or a program (ssh(1), SSH_ASKPASS)."""
    path = settings.state_home() / "askpass"
    if not path.exists() or path.read_text(encoding="utf-8") != _ASKPASS:
        # Replaced in one step: other threads and commands may be running it.
        partial = path.with_suffix(f".{threading.get_native_id()}")
        partial.write_text(_ASKPASS, encoding="utf-8")
        partial.chmod(0o700)
        partial.replace(path)
    return path


_LOGIN, _PROMPT = "GPUNODES_LOGIN_PASSWORD", "GPUNODES_LOGIN_PROMPT"
# The ssh of a jump host, and the prompt for a key's passphrase, run this too: they must not get the login password.
_ASKPASS = f"""#!/bin/sh
[ -n "$1" ] && [ "$1" = "${_PROMPT}" ] && printf '%s\\n' "${_LOGIN}"
"""


def run(
    address: str,
    variables: Mapping[str, Any],
    remote: RemoteCommand,
    *,
    deadline_s: float,
    max_bytes: int = 1 << 20,
    is_complete: Callable[[bytes | bytearray], bool] = lambda _: False,
) -> RemoteResult:
    """Run a command on a machine; never raises for an error on the machine.

    The connection is closed when standard output exceeds ``max_bytes``, or when ``is_complete`` returns True for the
    output so far: a machine that shuts down may leave a connection open.
    """
    return local(
        [*command(address, variables, *openssh.COMMAND_TIMEOUTS), remote.line],
        deadline_s=deadline_s,
        max_bytes=max_bytes,
        stdin=remote.stdin,
        env=environment(variables),
        is_complete=is_complete,
    )


def local(
    argv: Sequence[str],
    *,
    deadline_s: float,
    max_bytes: int = 1 << 20,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    is_complete: Callable[[bytes | bytearray], bool] = lambda _: False,
) -> RemoteResult:
    """Run a program on the controller with the same limits; at the end its process group is killed."""
    process = subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + deadline_s
    try:
        out, err, timed_out = _exchange(process, stdin, deadline, max_bytes, is_complete)
        if not timed_out and len(out) < max_bytes and not is_complete(out):
            # A process closes its output shortly before its exit status is available.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        # PermissionError: macOS, for a process that has ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    text = err.decode("utf-8", "replace").strip()
    if timed_out and len(out) < max_bytes:
        return RemoteResult(Reached.TIMEOUT, out=out, err=text)
    return RemoteResult(_reached(code, text), code, out, text)


# pam_nologin(8) closes the connections of users other than root while a machine shuts down or boots. A machine behind a
# jump host that does not respond is UNKNOWN.
_REFUSED = re.compile(r"Connection refused|banner exchange|Connection reset|Connection closed by (?!UNKNOWN )\S+ port")


def _reached(code: int, text: str) -> Reached:
    if code != 255:  # noqa: PLR2004 - ssh(1): 255 when it could not connect
        return Reached.ENDED
    return Reached.REFUSED if _REFUSED.search(text) else Reached.NO_RESPONSE


def _exchange(
    process: subprocess.Popen[bytes],
    stdin: bytes,
    deadline: float,
    max_bytes: int,
    is_complete: Callable[[bytes | bytearray], bool],
) -> tuple[bytes, bytes, bool]:
    """Write to and read from a process until its output ends, is complete or too long, or the deadline passes.

    Returns standard output, standard error, and whether the deadline passed.
    """
    assert process.stdin is not None  # noqa: S101 - for the type checker
    assert process.stdout is not None  # noqa: S101 - as above
    assert process.stderr is not None  # noqa: S101 - as above
    pipes: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    unsent = memoryview(stdin)
    timed_out = False
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        if unsent:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        while selector.get_map() and len(pipes[process.stdout]) < max_bytes and not is_complete(pipes[process.stdout]):
            left = deadline - time.monotonic()
            if left <= 0:
                timed_out = True
                break
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    try:
                        unsent = unsent[os.write(key.fd, unsent[:65536]) :]
                    except BrokenPipeError:
                        unsent = unsent[:0]
                    if not unsent:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                data = os.read(key.fd, 65536)
                received = pipes[key.fileobj]
                # Standard error is read by people: 64 KiB of it is enough.
                received += data if key.fileobj is process.stdout else data[: max(0, 65536 - len(received))]
                if not data:
                    selector.unregister(key.fileobj)
    for pipe in (process.stdin, *pipes):
        with contextlib.suppress(OSError):
            pipe.close()
    return bytes(pipes[process.stdout][:max_bytes]), bytes(pipes[process.stderr]), timed_out
