"""A client of WebSocket (RFC 6455) for the messages of a Jupyter kernel: text, over plain TCP to a loopback port."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Self

_ACCEPT = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10
_MOST = 8 << 20
"""Maximum size of a message."""
_MOST_HEAD = 64 << 10


class WebSocketError(OSError):
    """The server refused the connection, closed it, or broke the protocol."""


class WebSocket:
    """An open connection. Every read has the deadline of its caller."""

    def __init__(self, port: int, path: str, headers: Mapping[str, str], limit_s: float = 30.0) -> None:
        """Connect to 127.0.0.1; raises WebSocketError."""
        self._buffer = bytearray()
        self._socket = socket.create_connection(("127.0.0.1", port), limit_s)
        try:
            self._upgrade(port, path, headers, time.monotonic() + limit_s)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, text: str) -> None:
        """Send a text message."""
        self._send(_TEXT, text.encode())

    def receive(self, deadline: float) -> str:
        """The next text message before the monotonic ``deadline``; others are skipped. Raises WebSocketError."""
        message, kind = bytearray(), 0
        while True:
            final, code, data = self._frame(deadline)
            if code == _CLOSE:
                raise WebSocketError("the server closed the connection")
            if code == _PING:
                self._send(_PONG, data)
            if code >= _CLOSE:
                continue
            kind = code or kind
            message += data
            if len(message) > _MOST:
                raise WebSocketError("a message is too long")
            if final and kind == _TEXT:
                return message.decode("utf-8", "replace")
            if final:
                message, kind = bytearray(), 0

    def _upgrade(self, port: int, path: str, headers: Mapping[str, str], deadline: float) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        own = {"Host": f"127.0.0.1:{port}", "Upgrade": "websocket", "Connection": "Upgrade"}
        own |= {"Sec-WebSocket-Key": key, "Sec-WebSocket-Version": "13", **headers}
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in own.items()), "", ""]
        self._socket.sendall("\r\n".join(lines).encode("ascii"))
        while b"\r\n\r\n" not in self._buffer:
            if len(self._buffer) > _MOST_HEAD:
                raise WebSocketError("the server's response is too long")
            self._fill(deadline)
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer[:] = rest
        first, *others = head.decode("latin-1").split("\r\n")
        given = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in others)}
        wanted = base64.b64encode(hashlib.sha1(f"{key}{_ACCEPT}".encode(), usedforsecurity=False).digest()).decode()
        if first.split(" ")[1:2] != ["101"] or given.get("sec-websocket-accept") != wanted:
            raise WebSocketError(f"the server refuses a WebSocket: {first[:100]}")

    def _send(self, code: int, data: bytes) -> None:
        size = len(data)
        head = bytes([0x80 | code])
        if size < 126:  # noqa: PLR2004 - RFC 6455, 5.2: 126 and 127 announce longer lengths
            head += bytes([0x80 | size])
        elif size < 1 << 16:
            head += struct.pack("!BH", 0x80 | 126, size)
        else:
            head += struct.pack("!BQ", 0x80 | 127, size)
        mask = os.urandom(4)
        self._socket.sendall(head + mask + bytes(each ^ mask[number % 4] for number, each in enumerate(data)))

    def _frame(self, deadline: float) -> tuple[bool, int, bytes]:
        """Whether a frame is the last of its message, its code, and its data."""
        first, second = self._read(2, deadline)
        size = second & 0x7F
        if size >= 126:  # noqa: PLR2004 - as above
            size = int.from_bytes(self._read(2 if size == 126 else 8, deadline), "big")  # noqa: PLR2004 - as above
        if second & 0x80 or size > _MOST:
            raise WebSocketError("the server breaks the protocol of WebSocket")
        return bool(first & 0x80), first & 0x0F, self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        while len(self._buffer) < size:
            self._fill(deadline)
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _fill(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise WebSocketError("no message arrived in time")
        self._socket.settimeout(left)
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError as error:
            raise WebSocketError("no message arrived in time") from error
        if not data:
            raise WebSocketError("the server ended the connection")
        self._buffer += data
