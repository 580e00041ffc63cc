"""Run a program that controls a BMC, with limits for its run time and the size of its output."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MAX_BYTES = 2**16
_TICK_S = 0.2


class Failed(Exception):  # noqa: N818 - reads as the sentence it makes
    """The program did not end by itself; the text follows the program's name in messages."""


class NotStarted(Failed):
    """The program cannot be started."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The exit status and the output of a program."""

    code: int
    out: str
    err: str


def run(argv: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> ProgramResult:
    """Run a program to its end. Raises Failed, NotStarted if it cannot be started, FileNotFoundError if it is missing.

    At the limit its process group is killed. Processes that a program leaves behind when it ends by itself are neither
    waited for nor killed.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise NotStarted(f"cannot be started: {getattr(error, 'strerror', None) or error}") from error
    try:
        out, err = _read(process, time.monotonic() + limit_s, limit_s)
        return ProgramResult(process.wait(), out, err)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):  # the process group ended meanwhile
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()


def _read(process: subprocess.Popen[bytes], deadline: float, limit_s: float) -> tuple[str, str]:
    """The output until the program ends."""
    received = {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as selector:
        for pipe in received:
            if pipe:
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() or process.poll() is None:
            ended = process.poll() is not None
            left = deadline - time.monotonic()
            if left <= 0:
                raise Failed(f"did not end in {limit_s:.0f} s")
            ready = selector.select(0 if ended else min(left, _TICK_S)) if selector.get_map() else []
            for key, _ in ready:
                part = os.read(key.fd, _MAX_BYTES)
                received[key.fileobj] += part  # type: ignore[index]  # the pipes, as they were registered
                if not part:
                    selector.unregister(key.fileobj)
            if sum(map(len, received.values())) > _MAX_BYTES:
                raise Failed(f"printed more than {_MAX_BYTES // 1024} KiB")
            if ended and not ready:
                break
            if not selector.get_map() and not ended:
                time.sleep(min(max(left, 0), _TICK_S))
    out, err = (received[pipe].decode("utf-8", "replace") for pipe in (process.stdout, process.stderr))
    return out, err
