"""A webhook on the loopback interface that records what it receives."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def receiver(
    respond: Callable[[Any], None] = lambda handler: handler.send_response(200),
) -> Iterator[tuple[str, list[Any]]]:
    """A server that records its requests: its address, and the requests."""
    received: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, dict(self.headers), body))
            respond(self)
            self.end_headers()

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
