"""Running a program of the machine."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .problem import MachineProblem

INHERITED: list[int] = []
"""Descriptors that every program gets: the machine's lock, so that it outlives us while they run."""

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
        """All that it said."""
        return "\n".join(part for part in (self.out, self.err) if part)


def unheard() -> bool:
    """Whether nobody reads what we will say: the command that wants it was ended, or its connection.

    sshd(8) closes its end of our output with the client's channel; it sends no signal where there is no terminal.
    """
    output = select.poll()
    output.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in output.poll(0))


def run_while_heard(argv: Sequence[str], timeout_s: float) -> CommandResult:
    """Like ``run``, for a program that may be killed at any moment: it ends when nobody waits for us any more."""
    return _run(argv, timeout_s, "", {}, while_heard=True)


def run(
    argv: Sequence[str],
    timeout_s: float = 120,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run ``argv``, no shell, in the C locale; a program that is missing or too slow is a result, not an exception."""
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
                out, err = process.communicate(stdin, max(0, min(left, _LISTEN_S) if while_heard else left))
            except subprocess.TimeoutExpired as error:
                if time.monotonic() < deadline and not unheard():
                    continue
                process.kill()
                message = "".join(
                    part.decode(errors="replace") if isinstance(part, bytes) else part or ""
                    for part in (error.stdout, error.stderr)
                )
                return CommandResult(argv, 124, message, f"{argv[0]} did not end within {timeout_s:.0f} s")
            except BaseException:
                process.kill()
                raise
            return CommandResult(argv, process.returncode, out, err)


_LISTEN_S = 1.0
"""Seconds between two looks whether anybody still waits."""


def must(
    argv: Sequence[str],
    timeout_s: float = 120,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """The output of ``argv``; raises MachineProblem with the last line it said when it fails."""
    done = run(argv, timeout_s, stdin, environment)
    if not done.ok:
        raise MachineProblem(f"`{' '.join(argv[:3])}` failed: {last_line(done.err) or last_line(done.out)}")
    return done.out


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
