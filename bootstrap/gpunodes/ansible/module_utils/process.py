"""Runs programs of the machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from .problem import MachineProblem

INHERITED: list[int] = []
"""Descriptors that every program inherits: the machine's lock stays held until the last program has ended."""
LEFT_BEHIND: list[str] = []
"""The programs with these descriptors that this process gave up."""

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
    return _run(argv, _Limits(timeout_s, while_heard=True), environment=environment)


def run_to_end(argv: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> CommandResult:
    """Like ``run_while_connected``, for a program that must not be stopped halfway: it outlives the connection."""
    return _run(argv, _Limits(timeout_s), environment=environment)


def run_alone(argv: Sequence[str], timeout_s: float, ends_in_s: float = 0) -> CommandResult:
    """Like ``run``, for a program that may hang in a driver: it never keeps the machine's lock.

    It is killed with all programs that it started.

    ``ends_in_s``: a program that must end by itself gets SIGTERM and this time first. It is ended when the controller
    disconnects, too.
    """
    return _run(argv, _Limits(timeout_s, while_heard=bool(ends_in_s), ends_in_s=ends_in_s, alone=True))


def run(
    argv: Sequence[str],
    timeout_s: float = 120,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run ``argv`` without a shell in the C locale; a missing or slow program is a result, not an exception.

    A program that outlives its kill, because it waits in the kernel, is left behind: nothing here waits for ever.
    """
    return _run(argv, _Limits(timeout_s), stdin, environment)


@dataclass(frozen=True)
class _Limits:
    """How long a program may run, in seconds, and what ends with it."""

    timeout_s: float
    while_heard: bool = False
    """Whether it ends when the controller disconnects."""
    ends_in_s: float = 0
    """How long it may take to end after SIGTERM; 0: it is killed at once."""
    alone: bool = False
    """Whether it is killed with its process group, and does not inherit the machine's lock."""


def _run(
    argv: Sequence[str], limits: _Limits, stdin: str = "", environment: Mapping[str, str] | None = None
) -> CommandResult:
    variables = {**os.environ, "PATH": PATH, "LC_ALL": "C", "LANGUAGE": "C", **(environment or {})}
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=variables,
            pass_fds=() if limits.alone else INHERITED,
            start_new_session=limits.alone,
        )
    except FileNotFoundError:
        return CommandResult(argv, 127, "", f"{argv[0]} is not installed")
    # Not `with process`: it would wait without a limit.
    try:
        output = _wait(process, limits, stdin)
        if process.returncode is not None:
            return CommandResult(argv, process.returncode, *output)
        slow = f"{argv[0]} did not end within {limits.timeout_s:.0f} s"
        if limits.ends_in_s:
            process.terminate()
            output = _wait(process, _Limits(limits.ends_in_s))
        return CommandResult(argv, 124, "".join(output), slow + _kill(process, argv[0], alone=limits.alone))
    except BaseException:
        _kill(process, argv[0], alone=limits.alone)
        raise
    finally:
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(OSError):
                if stream:
                    stream.close()


def _wait(process: subprocess.Popen[str], limits: _Limits, stdin: str = "") -> tuple[str, str]:
    """What a program prints until it ends, or must be ended: then it has no return code.

    What it started in the background may keep its output open: that is not waited for.
    """
    deadline = time.monotonic() + limits.timeout_s
    while True:
        has_ended = process.poll() is not None
        left = deadline - time.monotonic()
        try:
            # A second call would not send the rest of the input.
            return process.communicate(stdin, max(0, left if stdin else min(left, _CHECK_S)))
        except subprocess.TimeoutExpired as error:
            is_late = time.monotonic() >= deadline or (limits.while_heard and is_disconnected())
            if has_ended or is_late:
                ended = process.poll() is not None
                return (
                    _text(error.stdout, process.stdout if ended else None),
                    _text(error.stderr, process.stderr if ended else None),
                )


def _text(output: str | bytes | None, stream: IO[str] | None) -> str:
    """What was read of an output, and what of ``stream`` is there to be read at once.

    Python does not read that after a time limit: where this process itself got no time, it is all of the output.
    """
    text = output.encode() if isinstance(output, str) else output or b""
    if stream and not stream.closed:
        os.set_blocking(stream.fileno(), False)
        with contextlib.suppress(OSError):
            text += os.read(stream.fileno(), _PIPE)
    return text.decode(errors="replace")


def _kill(process: subprocess.Popen[str], name: str, *, alone: bool) -> str:
    """Kill a program, with its process group if it is alone; the end of a message if it survives that, else ""."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            if alone:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DIES_S)
    if process.returncode is not None:
        return ""
    # With a return code set, Python does not wait for the process when it exits.
    process.returncode = -signal.SIGKILL
    if not alone:
        LEFT_BEHIND.append(f"process {process.pid}, {name}, was killed and did not end")
    return f"; killed, it did not end within {_DIES_S:.0f} s and is left behind (see /proc/{process.pid}/stack)"


_CHECK_S = 1.0
"""Seconds between two checks of the connection to the controller, and for the last output of a program."""
_PIPE = 1 << 20
"""The most bytes in a pipe (pipe(7), /proc/sys/fs/pipe-max-size)."""
_DIES_S = 2.0
"""Seconds in which a killed program ends, unless it waits in the kernel (uninterruptible sleep)."""


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
