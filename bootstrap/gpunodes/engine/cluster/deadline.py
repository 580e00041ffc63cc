"""HTTPS connections of urllib3 whose reads end at a deadline: its own limits are for each piece that arrives.

A server, or something in between, that sends a byte now and then would hold a request for days.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Iterator
from typing import Any

from urllib3.connection import HTTPSConnection
from urllib3.connectionpool import HTTPSConnectionPool

_OF_THREAD = threading.local()


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """All that this thread reads inside ends within ``limit_s`` seconds; later reads raise TimeoutError."""
    _OF_THREAD.end = time.monotonic() + limit_s
    try:
        yield
    finally:
        _OF_THREAD.end = None


class Pool(HTTPSConnectionPool):
    """Connections that obey ``within``, which is used around each request and the read of its response."""


class _Connection(HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        self.sock: Any = _Channel(self.sock)


Pool.ConnectionCls = _Connection


class _Channel:
    """A socket whose file for responses has the deadline."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def makefile(self, mode: str, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._channel, self._channel.makefile(mode, buffering=0)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class _Reader(io.RawIOBase):
    def __init__(self, channel: Any, raw: Any) -> None:
        self._channel = channel
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        end = getattr(_OF_THREAD, "end", None)
        if end is not None:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._channel.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
