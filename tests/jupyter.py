"""A Jupyter server: the real one where it is installed, else a stand-in with the part of its API that gpunodes uses.

The stand-in runs each cell with Python, as a kernel does, and answers by WebSocket. It is no proof that a real server
answers so: GPUNODES_JUPYTER, the path of a `jupyter-lab` such as that of a virtual environment with jupyterlab and
ipykernel, runs the tests with the real one. As a program, in an image of tests/machines, it is the command `jupyter`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REAL = os.environ.get("GPUNODES_JUPYTER") or shutil.which("jupyter-lab") or ""
Answer = Callable[[str, dict[str, Any]], list[Any]]
"""Takes the code of a cell and the header of its message; returns the messages, as JSON or as bytes of frames."""


def message(kind: str, parent: dict[str, Any], **content: Any) -> dict[str, Any]:
    return {"channel": "iopub", "header": {"msg_type": kind}, "parent_header": parent, "content": content}


def ran(code: str, header: dict[str, Any]) -> list[Any]:
    """The messages of a kernel that runs the code."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found = [message("status", {}, execution_state="starting"), message("status", header, execution_state="busy")]
    found.append(message("stream", header, name="stderr", text="not this"))
    found.append(message("stream", header, name="stdout", text=done.stdout))
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        found.append(message("error", header, ename=last.partition(":")[0], evalue=last.partition(": ")[2]))
    return [*found, message("status", header, execution_state="idle")]


def frame(data: bytes, first: int = 0x81) -> bytes:
    """A frame of a server."""
    size = len(data)
    if size < 126:
        head = bytes([first, size])
    else:
        head = struct.pack("!BBH", first, 126, size) if size < 1 << 16 else struct.pack("!BBQ", first, 127, size)
    return head + data


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    token = ""
    answer: Answer = staticmethod(ran)
    kernels: set[str]

    def do_GET(self) -> None:
        if self.path == "/api":
            self._send(200, {"version": "stand-in"})
        elif self._allowed():
            self._upgrade() if self.path.startswith("/api/kernels/") else self._send(200, sorted(self.kernels))

    def do_POST(self) -> None:
        if self._allowed():
            self.rfile.read(int(self.headers["Content-Length"]))
            name = str(uuid.uuid4())
            self.kernels.add(name)
            self._send(201, {"id": name})

    def do_DELETE(self) -> None:
        if self._allowed():
            self.kernels.discard(self.path.rpartition("/")[2])
            self.send_response(204)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _allowed(self) -> bool:
        if self.headers.get("Authorization") == f"token {self.token}":
            return True
        self._send(403, {"message": "Forbidden"})
        return False

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _upgrade(self) -> None:
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        accept = base64.b64encode(hashlib.sha1(key.encode(), usedforsecurity=False).digest()).decode()
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            while data := self._frame():
                found = json.loads(data)
                for each in type(self).answer(found["content"]["code"], found["header"]):
                    self.wfile.write(each if isinstance(each, bytes) else frame(json.dumps(each).encode()))

    def _frame(self) -> bytes:
        """The data of the next frame, which a client masks; pongs are left out."""
        while len(head := self.rfile.read(2)) == 2:
            size = head[1] & 0x7F
            assert head[1] & 0x80, "a client masks its frames"
            if size >= 126:
                size = int.from_bytes(self.rfile.read(2 if size == 126 else 8), "big")
            mask = self.rfile.read(4)
            data = bytes(each ^ mask[number % 4] for number, each in enumerate(self.rfile.read(size)))
            if head[0] & 0x0F == 1:
                return data
        return b""

    def log_message(self, *_: Any) -> None:
        pass


def _server(address: tuple[str, int], token: str, answer: Answer, kernels: set[str]) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"token": token, "answer": staticmethod(answer), "kernels": kernels})
    server = ThreadingHTTPServer(address, handler)
    server.daemon_threads = True
    return server


def main(argv: Sequence[str]) -> None:
    """Serve as `jupyter lab --ip=... --port=...` does, with the token of JUPYTER_TOKEN_FILE."""
    given = dict(each.lstrip("-").split("=", 1) for each in argv if each.startswith("--") and "=" in each)
    address = ("" if given["ip"] == "*" else given["ip"], int(given["port"]))
    _server(address, Path(os.environ["JUPYTER_TOKEN_FILE"]).read_text(), ran, set()).serve_forever()


@contextlib.contextmanager
def standing_in(token: str, answer: Answer = ran) -> Iterator[tuple[int, set[str]]]:
    """A stand-in; its port, and the kernels that run now."""
    kernels: set[str] = set()
    server = _server(("127.0.0.1", 0), token, answer, kernels)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server.server_port, kernels
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def real(folder: Path, args: Sequence[str], ready: Sequence[str], token: str) -> Iterator[int]:
    """The real server by the arguments of a notebook's container, and its readiness probe; its port."""
    # Not above: in an image this file is alone.
    from tests.programs import ending

    (folder / "token").write_text(token)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    own = [each.replace("8888", str(port)) for each in (*args[1:], "--allow-root")]
    path = f"{Path(REAL).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(folder), "JUPYTER_TOKEN_FILE": str(folder / "token")}
    with (folder / "jupyter.log").open("wb") as log:
        argv = [str(Path(REAL).with_name(args[0])), *own]
        process = subprocess.Popen(
            ending(argv), env=environment, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        probe = [each.replace("8888", str(port)) for each in ready]
        deadline = time.monotonic() + 120
        while subprocess.run(probe, capture_output=True, env=environment, check=False).returncode:
            assert process.poll() is None, (folder / "jupyter.log").read_text()
            assert time.monotonic() < deadline, (folder / "jupyter.log").read_text()
            time.sleep(1)
        assert token not in (folder / "jupyter.log").read_text()
        assert token not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert token not in Path(f"/proc/{process.pid}/environ").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main(sys.argv[1:])
