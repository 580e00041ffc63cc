"""HTTPS connections of urllib3 whose reads end at a deadline; its own limits are for each piece that arrives."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from urllib3 import connection, connectionpool

from gpunodes.engine.deadline import Channel

_OF_THREAD = threading.local()


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """All that this thread reads inside ends within ``limit_s`` seconds; later reads raise TimeoutError."""
    _OF_THREAD.end = time.monotonic() + limit_s
    try:
        yield
    finally:
        _OF_THREAD.end = None


class Pool(connectionpool.HTTPSConnectionPool):
    """Connections that obey ``within``, which is used around each request and the read of its response."""


class HTTPSConnection(connection.HTTPSConnection):
    """Its name is in messages of urllib3."""

    def connect(self) -> None:
        super().connect()
        self.sock: Any = Channel(self.sock, lambda: getattr(_OF_THREAD, "end", None))


Pool.ConnectionCls = HTTPSConnection
