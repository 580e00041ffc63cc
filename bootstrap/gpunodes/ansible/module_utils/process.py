"""Runs programs of the machine."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .problem import MachineProblem

INHERITED: list[int] = []
"""Descriptors that every program inherits: the machine's lock stays held until the last program has ended."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class CommandResult:
    """How a program ended."""

    argv: Sequence[str]
    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def text(self) -> str:
        """Its standard output and standard error."""
        return "\n".join(stream for stream in (self.out, self.err) if stream)


def is_disconnected() -> bool:
    """Whether the command on the controller, or the connection to it, has ended.

    sshd(8) then closes the reading end of standard output; it sends no signal because there is no terminal.
    """
    output = select.poll()
    output.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in output.poll(0))


def run_while_connected(
    argv: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> CommandResult:
    """Like ``run``, for a program that may be killed at any time: it is killed when the controller disconnects."""
    return _run(argv, timeout_s, "", environment or {}, while_heard=True)


def run_to_end(argv: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> CommandResult:
    """Like ``run_while_connected``, for a program that must not be stopped halfway: it outlives the connection."""
    return _run(argv, timeout_s, "", environment or {}, while_heard=False)


def run(
    argv: Sequence[str],
    timeout_s: float = 120,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run ``argv`` without a shell in the C locale; a missing or slow program is a result, not an exception."""
    return _run(argv, timeout_s, stdin, environment or {}, while_heard=False)


def _run(
    argv: Sequence[str], timeout_s: float, stdin: str, environment: Mapping[str, str], *, while_heard: bool
) -> CommandResult:
    variables = {**os.environ, "PATH": PATH, "LC_ALL": "C", "LANGUAGE": "C", **environment}
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=variables,
            pass_fds=INHERITED,
        )
    except FileNotFoundError:
        return CommandResult(argv, 127, "", f"{argv[0]} is not installed")
    with process:
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                out, err = process.communicate(stdin, max(0, min(left, _CHECK_S) if while_heard else left))
            except subprocess.TimeoutExpired as error:
                if time.monotonic() < deadline and not is_disconnected():
                    continue
                process.kill()
                output = "".join(
                    stream.decode(errors="replace") if isinstance(stream, bytes) else stream or ""
                    for stream in (error.stdout, error.stderr)
                )
                return CommandResult(argv, 124, output, f"{argv[0]} did not end within {timeout_s:.0f} s")
            except BaseException:
                process.kill()
                raise
            return CommandResult(argv, process.returncode, out, err)


_CHECK_S = 1.0
"""Seconds between two checks of the connection to the controller."""


def must(
    argv: Sequence[str],
    timeout_s: float = 120,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """The output of ``argv``; raises MachineProblem with its last line of output when it fails."""
    done = run(argv, timeout_s, stdin, environment)
    if not done.ok:
        raise MachineProblem(f"`{' '.join(argv[:3])}` failed: {last_line(done.err) or last_line(done.out)}")
    return done.out


def last_line(text: str) -> str:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
