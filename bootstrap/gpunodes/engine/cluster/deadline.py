"""HTTPS connections of urllib3 whose reads end at a deadline; its own limits are for each piece that arrives."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from urllib3.connection import HTTPSConnection
from urllib3.connectionpool import HTTPSConnectionPool

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


class Pool(HTTPSConnectionPool):
    """Connections that obey ``within``, which is used around each request and the read of its response."""


class _Connection(HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        self.sock: Any = Channel(self.sock, lambda: getattr(_OF_THREAD, "end", None))


Pool.ConnectionCls = _Connection
