"""Responses of the API that a node makes: a pod's log."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from gpunodes.ansible.module_utils import kube_api

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def answered(*pieces: bytes, pause_s: float = 0.0) -> Iterator[http.client.HTTPConnection]:
    """A connection to a server that sends these pieces for each request."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)

        def serve() -> None:
            with contextlib.suppress(OSError):
                channel, _ = listening.accept()
                while channel.recv(4096):
                    for piece in pieces:
                        channel.sendall(piece)
                        time.sleep(pause_s)

        threading.Thread(target=serve, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", listening.getsockname()[1], timeout=5)
        yield connection
        connection.close()


def read(connection: http.client.HTTPConnection, limits: kube_api.Limits | None = None) -> bytes:
    connection.request("GET", "/")
    return kube_api._content(connection.getresponse(), limits or kube_api.Limits())


@pytest.mark.parametrize(
    "body", [b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"]
)
def test_a_connection_takes_the_next_request(body: bytes) -> None:
    with answered(HEAD + body) as connection:
        assert [read(connection), read(connection)] == [b"{}", b"{}"]


def test_a_log_that_drips_ends_at_the_limit() -> None:
    with (
        answered(HEAD + b"Content-Length: 99\r\n\r\n", *[b"x"] * 99, pause_s=0.1) as connection,
        pytest.raises(TimeoutError, match="does not end"),
    ):
        read(connection, kube_api.Limits(whole_s=0.2))


def test_a_log_without_an_end_fills_no_memory() -> None:
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with (
        answered(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[piece] * 64) as connection,
        pytest.raises(TimeoutError, match="does not end"),
    ):
        read(connection, kube_api.Limits(most=1 << 20))


def test_a_response_that_ends_early_is_none() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        connection = http.client.HTTPConnection("127.0.0.1", listening.getsockname()[1], timeout=5)
        connection.request("GET", "/")
        channel, _ = listening.accept()
        channel.sendall(HEAD + b"Content-Length: 9\r\n\r\nabc")
        channel.close()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            kube_api._content(connection.getresponse(), kube_api.Limits())
