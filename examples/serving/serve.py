"""Serve the network of examples/training: POST /predict with the 784 bytes of an image returns its label.

A newer checkpoint is loaded when it appears. Needs NumPy and the standard library.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

PIXELS = 784
LOOK_S = 2.0


class Model:
    """The newest checkpoint; the one before it while a new one cannot be read.

    A thread of its own looks for it: while a storage server does not answer, that thread waits, and requests do not.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded: tuple[int, dict[str, Any]] | None = None
        self._problem = ""

    def current(self) -> dict[str, Any] | None:
        """The arrays of the checkpoint; None before the first one. The file is not touched."""
        loaded = self._loaded
        return loaded[1] if loaded else None

    def follow(self) -> None:
        """Load the checkpoint whenever it has changed, for ever."""
        while True:
            self.look()
            time.sleep(LOOK_S)

    def look(self) -> None:
        """Load the checkpoint if it has changed; one that cannot be read is reported once."""
        problem = ""
        try:
            written = self._path.stat().st_mtime_ns
            if self._loaded is None or self._loaded[0] != written:
                with np.load(self._path, allow_pickle=False) as file:
                    self._loaded = written, {name: file[name] for name in file.files}
        except Exception as error:  # a file of any content must not end the thread that looks for the next one
            problem = f"{type(error).__name__}: {error}"
        if problem and problem != self._problem:
            print(f"{self._path} cannot be loaded: {problem}", flush=True)
        self._problem = problem


def predict(model: dict[str, Any], image: bytes) -> dict[str, Any]:
    """The most probable label of an image."""
    pixels = np.frombuffer(image, np.uint8).astype(np.float32) / 255
    inner = np.maximum(model["hidden.weight"] @ pixels + model["hidden.bias"], 0)
    scores = model["output.weight"] @ inner + model["output.bias"]
    odds = np.exp(scores - scores.max())
    label = int(odds.argmax())
    return {"label": label, "probability": float(odds[label] / odds.sum()), "step": int(model["step"])}


class Handler(BaseHTTPRequestHandler):
    """GET /live, GET /ready, POST /predict."""

    protocol_version = "HTTP/1.1"
    timeout = 30
    model: ClassVar[Model]

    def do_GET(self) -> None:
        if self.path == "/live":
            self._answer(200, {})
        elif self.path == "/ready":
            self._answer(200 if self.model.current() else 503, {})
        else:
            self._answer(404, {"error": "POST an image to /predict"})

    def do_POST(self) -> None:
        # The connection ends after every answer to an image that was not read.
        if self.path != "/predict" or self.headers.get("Content-Length") != str(PIXELS):
            self.close_connection = True
            self._answer(400, {"error": f"found no image, wanted POST /predict with {PIXELS} bytes"})
        elif model := self.model.current():
            self._answer(200, predict(model, self.rfile.read(PIXELS)))
        else:
            self.close_connection = True
            self._answer(503, {"error": "there is no checkpoint yet; train first"})

    def _answer(self, code: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parameter of the base class
        """Probes come every few seconds: nothing is logged."""


class Server(ThreadingHTTPServer):
    """On all addresses, of both families where the system has IPv6."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    daemon_threads = False

    def server_bind(self) -> None:
        if self.address_family is socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    Handler.model = Model(options.checkpoint)
    threading.Thread(target=Handler.model.follow, daemon=True).start()
    server = Server(("", options.port), Handler)
    # Requests that are being answered are finished.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"serving {options.checkpoint} on port {server.server_port}", flush=True)
    server.serve_forever()
    server.server_close()


if __name__ == "__main__":
    main()
