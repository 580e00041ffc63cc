"""The server of metrics: one path, GET only, and no client holds it for long."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator

import pytest
from gpunodes.engine import metrics_server
from gpunodes.errors import WrongInput


@contextlib.contextmanager
def served(text: str = "x 1\n", at: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    with metrics_server.serving((at, 0), "text/plain; version=0.0.4", lambda: text) as shown:
        host, _, port = shown.rpartition(":")
        yield host.strip("[]"), int(port)


def ask(at: tuple[str, int], method: str = "GET", path: str = "/metrics") -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(*at, timeout=5)
    connection.request(method, path)
    response = connection.getresponse()
    found = response.status, response.read().decode(), dict(response.getheaders())
    connection.close()
    return found


def test_get_metrics() -> None:
    with served() as at:
        status, text, headers = ask(at)
        assert (status, text) == (200, "x 1\n")
        assert headers["Content-Type"] == "text/plain; version=0.0.4"
        assert "Python" not in headers["Server"]
        assert ask(at, path="/metrics?name=x")[0] == 200


def test_the_address_is_free_afterwards() -> None:
    with served() as at:
        pass
    with pytest.raises(OSError, match="refused"):
        ask(at)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/metrics/../etc", 404), ("POST", "/metrics", 405), ("BREW", "/<b>", 405)],
)
def test_nothing_else(method: str, path: str, status: int) -> None:
    with served() as at:
        found, text, _ = ask(at, method, path)
        assert found == status
        assert "<" not in text
        assert ask(at, "HEAD")[:2] == (405, "")


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x00\xff", b"GET\r\n\r\n", b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_request(sent: bytes) -> None:
    with served() as at:
        with socket.create_connection(at, 5) as client, contextlib.suppress(OSError):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            client.recv(100)
        assert ask(at)[0] == 200


def test_slow_clients_lose_their_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_CONNECTION_S", 0.5)
    with served() as at, contextlib.ExitStack() as opened:
        clients = [opened.enter_context(socket.create_connection(at, 5)) for _ in range(40)]
        began = time.monotonic()
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(b"GET")
        # A byte now and then does not keep a connection.
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 30:
                clients[0].sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() < began + 20
        # The others lose theirs at about the same time; until then, one more is closed at once.
        while True:
            with contextlib.suppress(OSError):
                assert ask(at)[0] == 200
                break
            assert time.monotonic() < began + 20
            time.sleep(0.1)


def test_an_address_in_use() -> None:
    with (
        served() as at,
        pytest.raises(WrongInput, match=r"cannot listen on 127\.0\.0\.1"),
        metrics_server.serving(at, "", str),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:9836", ("127.0.0.1", 9836)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[::1]:9836", ("::1", 9836)),
        ("localhost:80", ("127.0.0.1", 80)),
    ],
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert metrics_server.address(text) == found


@pytest.mark.parametrize("text", ["", "9836", ":9836", "::1:9836", "127.0.0.1:65536", "127.0.0.1", "1.2.3:1", "host:1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(WrongInput, match="--listen"):
        metrics_server.address(text)
