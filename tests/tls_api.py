"""A stand-in for an API server: HTTPS on loopback, with the responses that a test gives it."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DATE = "Thu, 26 Nov 2026 01:00:00 GMT"
SYSTEM: dict[str, Any] = {"metadata": {"name": "kube-system", "uid": "u-1", "resourceVersion": "1"}}


@dataclass
class Server:
    """An HTTPS server in the place of an API server; ``answer`` makes status, headers and body of a request."""

    folder: Path
    port: int = 0
    answer: Callable[[str], tuple[int, dict[str, str], bytes]] = lambda _: (200, {}, b"{}")
    asked: list[tuple[str, str]] = field(default_factory=list)
    """The path and the Authorization header of each request."""
    clients: list[str] = field(default_factory=list)
    """The names in the clients' certificates, "" without one."""
    trickle: str = ""
    """Where in a response it sends a byte now and then, without end: in the headers, the body, or chunks of it."""

    def kubeconfig(self, **user: Any) -> Path:
        ca = base64.b64encode((self.folder / "server.crt").read_bytes()).decode()
        path = self.folder / "config"
        cluster = {"server": f"https://127.0.0.1:{self.port}/k8s/c-1/", "certificate-authority-data": ca}
        content = {
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": user or {"token": "t0ken"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(content))
        path.chmod(0o600)
        return path


def certificate(folder: Path) -> Path:
    """The folder, with a server's certificate, which is its own CA, and its key."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "server.key"), "-out", str(folder / "server.crt")]
    subprocess.run([*make, *names, *files, "-days", "2"], check=True, capture_output=True)
    return folder


@contextlib.contextmanager
def serving(certificate: Path) -> Iterator[Server]:
    """A server with that certificate while inside."""
    made = Server(certificate)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            made.asked.append((self.path, self.headers.get("Authorization", "")))
            found = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
            made.clients.append(str(found["subject"][0][0][1]) if found else "")
            system = json.dumps(SYSTEM).encode()
            answered = made.answer(self.path)
            if self.path.endswith("/namespaces/kube-system") and answered[0] != 401:
                answered = (200, {}, system)
            status, headers, body = answered
            if made.trickle:
                self.trickle()
                return
            self.send_response_only(status)
            for name, value in {"Date": DATE, "Content-Length": str(len(body)), **headers}.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def trickle(self) -> None:
            begun = {
                "headers": "X-More: ",
                "body": f"Date: {DATE}\r\nContent-Length: 9000\r\n\r\n",
                "chunks": f"Date: {DATE}\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n",
            }[made.trickle]
            self.wfile.write(f"HTTP/1.1 200 OK\r\n{begun}".encode())
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.1)

        def log_message(self, *_: Any) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "server.crt", certificate / "server.key")
    # Its own certificate is a client's, too.
    context.load_verify_locations(certificate / "server.crt")
    context.verify_mode = ssl.CERT_OPTIONAL
    listening.socket = context.wrap_socket(listening.socket, server_side=True)
    made.port = listening.server_port
    threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    listening.shutdown()
    listening.server_close()
