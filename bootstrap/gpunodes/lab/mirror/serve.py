"""Serve the mirror's tree over HTTP: apt repositories and the pull side of the registry interface.

Standard library only, because the lab starts it as a separate process inside its network namespace.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

from gpunodes.lab.mirror.oci import MANIFEST_TYPE

_MANIFEST = re.compile(r"/v2/.+/manifests/[^/]+")
_PING = ("/v2", "/v2/")
"""Registry clients request this path to detect a registry."""


def locate(roots: Sequence[Path], target: str) -> Path | None:
    """The file of a request's target in the first of ``roots`` that has it; None for paths outside of them."""
    path = unquote(urlsplit(target).path)
    for root in roots:
        try:
            file = (root / path.lstrip("/")).resolve()
            if file.is_relative_to(root) and file.is_file():
                return file
        except (OSError, ValueError):  # the name is too long or contains a null byte
            return None
    return None


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    protocol_version = "HTTP/1.1"
    server_version = "gpunodes-mirror"
    timeout: ClassVar[int] = 120
    """Seconds after which an idle connection is closed."""

    def __init__(self, roots: Sequence[Path], *rest: object) -> None:
        self._roots = roots
        super().__init__(*rest)  # type: ignore[arg-type]  # the arguments of socketserver are passed on

    def do_GET(self) -> None:
        """Send a file."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Send a file's headers."""
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path in _PING:
            self._start(2, "application/json", None)
            if body:
                self.wfile.write(b"{}")
            return
        file = locate(self._roots, self.path)
        if file is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        manifest = _MANIFEST.fullmatch(path) is not None
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if manifest else None
        with file.open("rb") as stream:
            size = file.stat().st_size
            self._start(size, MANIFEST_TYPE if manifest else "application/octet-stream", digest)
            if body and size:
                self.wfile.flush()
                self.connection.sendfile(stream, count=size)

    def _start(self, size: int, media_type: str, digest: str | None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(size))
        if digest:
            self.send_header("Docker-Content-Digest", f"sha256:{digest}")
        self.end_headers()


class Server(ThreadingHTTPServer):
    """One thread for each connection."""

    request_queue_size = 128
    """All machines' container runtimes open a connection for each layer at the same time."""


def server(roots: Sequence[Path], address: str, port: int) -> Server:
    """A server of ``roots``, bound but not running yet."""
    return Server((address, port), partial(Handler, [root.resolve(strict=True) for root in roots]))


def main() -> None:
    """Serve until a signal ends the process; requests are logged to standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--root",
        type=Path,
        required=True,
        action="append",
        help="a tree to serve; for a file in several trees, the first one takes precedence",
    )
    parser.add_argument("--listen", required=True, metavar="ADDRESS:PORT")
    options = parser.parse_args()
    address, _, port = options.listen.rpartition(":")
    server(options.root, address, int(port)).serve_forever()


if __name__ == "__main__":
    main()
