"""Running a program that talks to a BMC: its end and the size of what it prints are bounded."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MOST_BYTES = 2**16
_TICK_S = 0.2


class Failed(Exception):  # noqa: N818 - reads as the sentence it makes
    """The program did not come to an end of its own; the text goes on after its name."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended."""

    code: int
    out: str
    err: str


def run(words: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> ProgramResult:
    """Run a program to its end. Raises Failed, also where it cannot be started; FileNotFoundError where there is none.

    At the limit it is ended with all that it has started. What a program leaves behind when it ends by itself may go
    on: it is not waited for.
    """
    try:
        process = subprocess.Popen(
            list(words),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise Failed(f"cannot be started: {getattr(error, 'strerror', None) or error}") from error
    try:
        out, err = _heard(process, time.monotonic() + limit_s, limit_s)
        return ProgramResult(process.wait(), out, err)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, with all that it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()


def _heard(process: subprocess.Popen[bytes], deadline: float, limit_s: float) -> tuple[str, str]:
    """What it prints until it ends."""
    heard = {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as selector:
        for pipe in heard:
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
                part = os.read(key.fd, _MOST_BYTES)
                heard[key.fileobj] += part  # type: ignore[index]  # the pipes, as they were registered
                if not part:
                    selector.unregister(key.fileobj)
            if sum(map(len, heard.values())) > _MOST_BYTES:
                raise Failed(f"printed more than {_MOST_BYTES // 1024} KiB")
            if ended and not ready:
                break
            if not selector.get_map() and not ended:
                time.sleep(min(max(left, 0), _TICK_S))
    out, err = (heard[pipe].decode("utf-8", "replace") for pipe in (process.stdout, process.stderr))
    return out, err
