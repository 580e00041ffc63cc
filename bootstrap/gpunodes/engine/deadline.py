"""A socket whose requests and responses end at a deadline: a limit for each piece lets a trickle take days."""

from __future__ import annotations

import http.client
import io
import time
from collections.abc import Callable
from typing import Any


class Channel:
    """A socket, for http.client. ``end`` returns the moment of the monotonic clock for all it does, None for no limit.

    After that moment it raises TimeoutError.
    """

    def __init__(self, channel: Any, end: Callable[[], float | None]) -> None:
        self._channel = channel
        self._end = end

    def makefile(self, mode: str, *_: Any) -> io.BufferedReader:
        """The file that http.client reads."""
        return io.BufferedReader(_Reader(self._channel.makefile(mode, buffering=0), self._limit))

    def sendall(self, data: Any) -> None:
        """As that of a socket."""
        self._limit()
        self._channel.sendall(data)

    def _limit(self) -> None:
        end = self._end()
        if end is not None:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("no complete response in time")
            self._channel.settimeout(left)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class LoopbackConnection(http.client.HTTPConnection):
    """An HTTP connection to a port of this computer that ends within ``limit_s`` seconds, with all its responses.

    Behind the port may be a pod of a user.
    """

    def __init__(self, port: int, limit_s: float) -> None:
        super().__init__("127.0.0.1", port, timeout=limit_s)
        self._end = time.monotonic() + limit_s

    def connect(self) -> None:
        super().connect()
        self.sock: Any = Channel(self.sock, lambda: self._end)


class _Reader(io.RawIOBase):
    """The file, with a limit for each read that ends with all others."""

    def __init__(self, raw: Any, limit: Callable[[], None]) -> None:
        self._raw = raw
        self._limit = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        self._limit()
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
