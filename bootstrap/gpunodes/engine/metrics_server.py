"""A small HTTP server for one text: GET /metrics, a few connections at a time, each with a deadline."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from gpunodes.errors import WrongInput

PATH = "/metrics"
_CONNECTIONS = 16
_CONNECTION_S = 10.0
_LAST_PORT = 65535


def address(text: str) -> tuple[str, int]:
    """The address and port in ``ADDRESS:PORT`` (IPv6 in brackets, port 0 for any free one); raises WrongInput."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)|localhost):(\d{1,5})", text)
    with contextlib.suppress(ValueError):
        if found and int(found[3]) <= _LAST_PORT:
            return str(ipaddress.ip_address(found[1] or found[2] or "127.0.0.1")), int(found[3])
    raise WrongInput(
        f"{text!r} is not an address and a port", "such as 127.0.0.1:9836 or [::1]:9836", "correct --listen"
    )


@contextlib.contextmanager
def serving(at: tuple[str, int], content_type: str, text: Callable[[], str]) -> Iterator[str]:
    """Serve ``text()`` while inside, on the address that is returned; raises WrongInput if it is in use."""
    try:
        server = _Server(at, content_type, text)
    except OSError as error:
        raise WrongInput(
            f"cannot listen on {_shown(at)}: {error.strerror}",
            "a free port at an address of this machine",
            "choose another one with --listen",
        ) from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield _shown(server.server_address)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _shown(at: Any) -> str:
    host, port = at[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = _CONNECTIONS

    def __init__(self, at: tuple[str, int], content_type: str, text: Callable[[], str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in at[0] else socket.AF_INET
        self.content_type = content_type
        self.text = text
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__(at, _Handler)

    def server_bind(self) -> None:
        """Without HTTPServer's lookup of the host's name, which may take long."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Close connections above the limit at once."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle one connection. A client that sends its request byte by byte loses it at the deadline."""
        timer = threading.Timer(_CONNECTION_S, _close, [request])
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: the client went away."""


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "gpunodes", ""
    timeout = _CONNECTION_S

    def do_GET(self) -> None:
        """The metrics, at their path only."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self._respond(HTTPStatus.OK, self.server.content_type, self.server.text())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - http.server's signature
        """A short text in place of http.server's page, which repeats the request."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._respond(status, "text/plain; charset=utf-8", f"{status.phrase}; the metrics are at {PATH}\n")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's signature
        """Nothing: each scrape would be a line."""

    def _respond(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
