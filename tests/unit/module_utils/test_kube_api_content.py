"""Responses of the API that a node makes: a pod's log."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

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


LOG = "/api/v1/namespaces/a/pods/b/log"


def client(connection: http.client.HTTPConnection, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> kube_api.Client:
    """A patient client with this connection, and with these limits for logs."""
    found = kube_api.Client.__new__(kube_api.Client)
    found._limits, found._patience_s, found._token_file, found._where = kube_api.Limits(), 60, "", "server"
    found._connection = connection  # type: ignore[assignment]  # without TLS
    monkeypatch.setattr(kube_api, "_OF_LOG", dataclasses.replace(kube_api._OF_LOG, **limits))
    return found


@pytest.mark.parametrize("pause_s", [0.05, 9.0])
def test_a_log_of_a_kubelet_that_drips_is_cut(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    pieces = [b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 200]
    started = time.monotonic()
    with answered(HEAD + pieces[0] + pieces[1], *pieces[2:], pause_s=pause_s) as connection:
        text = client(connection, monkeypatch, whole_s=1).get(LOG, tailLines="1")["message"]
    assert time.monotonic() - started < 3
    assert 0 < len(text) < 100


def test_a_log_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with answered(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[piece] * 64) as connection:
        made = client(connection, monkeypatch)
        assert made.get(LOG) == {"message": "x" * (1 << 20)}
        assert made._connection is None


def test_a_kubelet_that_sends_no_log_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    with answered(b"") as connection, pytest.raises(kube_api.ApiError, match="timed out"):
        client(connection, monkeypatch, call_s=0.3).get(LOG)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("log", ["[1]", "5", "null", '{"message": 5}', ""])
def test_a_log_that_looks_like_json_is_a_text(monkeypatch: pytest.MonkeyPatch, log: str) -> None:
    with answered(HEAD + f"Content-Length: {len(log)}\r\n\r\n{log}".encode()) as connection:
        assert client(connection, monkeypatch).get(LOG) == {"message": log}


def test_an_error_instead_of_a_log_is_that_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"message": "no such container"}'
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)
    with answered(head + body) as connection, pytest.raises(kube_api.ApiError, match="no such container"):
        client(connection, monkeypatch).get(LOG)


@pytest.mark.parametrize("path", ["/api/v1/nodes/log", "/api/v1/namespaces/log", "/api/v1/namespaces/a/configmaps/log"])
def test_an_object_with_the_name_log_is_no_log(path: str) -> None:
    assert not kube_api.is_log(path)
    assert kube_api.is_log("/api/v1/namespaces/a/pods/log/log?tailLines=1")


class Pages(kube_api.Client):
    """A list of four objects, of which two are the most that fit; the API server forgets its moment ``gone`` times."""

    def __init__(self, gone: int) -> None:
        self.gone = gone
        self.asked: list[str] = []

    def call(self, method: str, path: str, body: Any = None, query: Any = None, *rest: Any, **named: Any) -> Any:
        assert (method, path, body, rest, named) == ("GET", "/api/v1/pods", None, (), {})
        first, size = int(query.get("continue", 0)), int(query.get("limit", 4))
        self.asked.append(f"{first}+{size}")
        if size > 2:
            raise kube_api.ApiError(0, "too large") from kube_api.TooLarge()
        if first and self.gone:
            self.gone -= 1
            raise kube_api.ApiError(410, "the provided continue parameter is too old")
        more = {"continue": str(first + size)} if first + size < 4 else {}
        return {"metadata": more, "items": [*range(first, min(4, first + size))]}


def test_a_list_in_pages_is_read_again_when_its_moment_is_forgotten() -> None:
    pages = Pages(gone=1)
    assert pages.get("/api/v1/pods")["items"] == [0, 1, 2, 3]
    with pytest.raises(kube_api.ApiError, match="too old"):
        Pages(gone=3).get("/api/v1/pods")
