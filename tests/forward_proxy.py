"""A small forward proxy for tests: CONNECT, and GET with an absolute address; it records what it is asked for.

Tests use the class; on another machine it is a program (``python3 forward_proxy.py --help``) of the standard library.
Connections that are idle end. It is no proxy for real use: it does not check where it connects to.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import select
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

_IDLE_S = 60.0
"""Seconds without data after which a connection ends."""
_CONNECT_S = 10.0
_CHUNK = 1 << 16
_MOST_RECORDS = 10_000
"""Later requests are served, and not recorded."""
_UNFORWARDED = frozenset({"connection", "keep-alive", "proxy-authorization", "proxy-connection", "te", "upgrade"})


@dataclass(frozen=True)
class Record:
    """One request: its method, its target as it was sent, and the status of the response; never its credentials."""

    method: str
    target: str
    status: int


@dataclass
class ForwardProxy:
    """The proxy, which runs inside ``with``. ``credentials`` are USER:PASSWORD that every request must carry."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port, which is stored here when the proxy runs."""
    credentials: str = ""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Addresses of names that no DNS has; other names are resolved as usual."""
    log: IO[str] | None = None
    """Gets each record as one line of JSON."""
    records: list[Record] = field(default_factory=list)
    _server: ThreadingHTTPServer | None = None
    _writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def address(self) -> str:
        """The proxy's URL, without credentials."""
        return f"http://{self.host}:{self.port}"

    @property
    def targets(self) -> list[str]:
        """The targets of all requests so far."""
        return [record.target for record in self.records]

    def __enter__(self) -> ForwardProxy:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer((self.host, self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server
        self._server.shutdown()
        self._server.server_close()

    def record(self, method: str, target: str, status: int) -> None:
        """Record one request."""
        record = Record(method, target, status)
        with self._writing:
            if len(self.records) < _MOST_RECORDS:
                self.records.append(record)
                if self.log:
                    self.log.write(json.dumps(asdict(record)) + "\n")
                    self.log.flush()


class _Handler(BaseHTTPRequestHandler):
    owner: ForwardProxy
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_CONNECT(self) -> None:
        """Tunnel to HOST:PORT."""
        self.close_connection = True
        if not self._is_allowed():
            return
        host, _, port = self.path.rpartition(":")
        try:
            upstream = socket.create_connection((self._resolved(host.strip("[]")), int(port)), _CONNECT_S)
        except (OSError, ValueError, OverflowError) as error:
            self._refuse(502, str(error))
            return
        with upstream:
            self.owner.record("CONNECT", self.path, 200)
            self.send_response_only(200, "Connection established")
            self.end_headers()
            _copy(self.connection, upstream)

    def do_GET(self) -> None:
        """Forward a request for an absolute address."""
        self.close_connection = True
        if not self._is_allowed():
            return
        url = urlsplit(self.path)
        if url.scheme != "http" or not url.hostname:
            self._refuse(400, "wanted: CONNECT, or an absolute http address")
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _UNFORWARDED}
        upstream = http.client.HTTPConnection(self._resolved(url.hostname), url.port or 80, timeout=_CONNECT_S)
        with contextlib.closing(upstream):
            try:
                target = (url.path or "/") + (f"?{url.query}" if url.query else "")
                upstream.request(self.command, target, headers={**headers, "Connection": "close"})
                response = upstream.getresponse()
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._refuse(502, str(error))
                return
            self.owner.record(self.command, self.path, response.status)
            self.send_response_only(response.status, response.reason)
            for name, value in response.getheaders():
                if name.lower() not in {*_UNFORWARDED, "transfer-encoding"}:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            with contextlib.suppress(OSError, http.client.HTTPException):
                while self.command != "HEAD" and (data := response.read(_CHUNK)):
                    self.wfile.write(data)

    def do_HEAD(self) -> None:
        """The same without a body."""
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Records are enough."""

    def _is_allowed(self) -> bool:
        expected = self.owner.credentials
        given = self.headers.get("Proxy-Authorization", "")
        if not expected or given == "Basic " + base64.b64encode(expected.encode()).decode():
            return True
        self._refuse(407, "credentials required", ("Proxy-Authenticate", 'Basic realm="tests"'))
        return False

    def _resolved(self, host: str) -> str:
        return self.owner.hosts.get(host.lower(), host)

    def _refuse(self, status: int, reason: str, *headers: tuple[str, str]) -> None:
        self.owner.record(self.command, self.path, status)
        body = (reason + "\n").encode(errors="replace")
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body))), ("Connection", "close")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _copy(one: socket.socket, other: socket.socket) -> None:
    """Copy bytes in both directions until one side ends or nothing moves for a while."""
    peers = {one: other, other: one}
    with contextlib.suppress(OSError):
        while True:
            readable, _, _ = select.select([one, other], [], [], _IDLE_S)
            if not readable:
                return
            for end in readable:
                data = end.recv(_CHUNK)
                if not data:
                    return
                peers[end].sendall(data)


@contextlib.contextmanager
def running(credentials: str = "", **hosts: str) -> Iterator[ForwardProxy]:
    """A proxy on loopback; ``hosts`` are addresses by the first part of names below ``.test``."""
    with ForwardProxy(credentials=credentials, hosts={f"{name}.test": to for name, to in hosts.items()}) as proxy:
        yield proxy


def main(argv: Sequence[str] | None = None) -> None:
    """Run until standard input ends; records go to standard output, one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=3128, help="port, 0 for any free one (default: 3128)")
    parser.add_argument("--credentials-file", default="", help="file with USER:PASSWORD that every request must carry")
    parser.add_argument("--host", action="append", default=[], metavar="NAME=ADDRESS", help="a name that no DNS has")
    options = parser.parse_args(argv)
    hosts = dict(entry.split("=", 1) for entry in options.host)
    credentials = ""
    if options.credentials_file:
        credentials = Path(options.credentials_file).read_text(encoding="utf-8").strip()
    with ForwardProxy(options.listen, options.port, credentials, hosts, sys.stdout) as proxy:
        print(json.dumps({"listening": proxy.address}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
