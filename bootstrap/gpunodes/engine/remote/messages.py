"""What a program that talks to a machine prints to standard error: its beginning is kept, for a reason to report."""

from __future__ import annotations

import contextlib
import threading
from typing import IO

_MOST = 4096
_REST_S = 1.0
"""Seconds for what the program printed a moment ago."""


class Messages:
    """Reads a pipe as long as it is open, in a thread.

    A pipe that is not read stops the program when it is full, and a machine can fill a disk by way of a file.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._kept = bytearray()
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> str:
        """The beginning of the messages. Waits for the end of the pipe, but not for long: the program may go on.

        ssh prints why it closed a connection before it closes it; this thread may see that first.
        """
        self._thread.join(_REST_S)
        return bytes(self._kept).decode("utf-8", "replace")

    def _read(self) -> None:
        with self._pipe, contextlib.suppress(OSError):
            while data := self._pipe.read1(1 << 16):  # type: ignore[attr-defined]  # the pipe of a process has it
                self._kept += data[: _MOST - len(self._kept)]
