"""The client of a registry's API, with a server that sends attacks. A real registry is in tests/repair."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gpunodes.engine.registry import client as client_of_registry
from gpunodes.engine.registry.client import Client
from gpunodes.errors import GpunodesError
from gpunodes.operations.registry_server import material

from tests.hostile import ATTACKS, unprintable

HOST = "10.96.0.15"
DIGEST = "sha256:" + "a" * 64


class Hostile(BaseHTTPRequestHandler):
    """Answers with the status and the Location that the test wants, and keeps what was asked."""

    status = 202
    location = ""
    asked: list[tuple[str, str, str]] = []  # noqa: RUF012 - one server at a time

    def answer(self) -> None:
        self.asked.append((self.command, self.path, self.headers.get("Authorization", "")))
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(401 if not self.headers.get("Authorization") else type(self).status)
        self.send_header("Location", type(self).location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = answer  # noqa: N815 - the names that http.server calls

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def own() -> material.Material:
    return material.made(HOST)


@pytest.fixture
def client(own: material.Material, tmp_path: Path) -> Iterator[Client]:
    (tmp_path / "tls").write_text(own.certificate + own.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Hostile.status, Hostile.location, Hostile.asked = 202, "", []
    yield Client(f"{HOST}:5000", server.server_port, own.ca, own.user, own.password)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "location",
    [
        "",
        "https://evil.example/v2/x/blobs/uploads/1?_state=y",
        "/v2/x/blobs/uploads/1",
        f"https://{HOST}:5000/v2/x/blobs/uploads/1-2?_state=a%3D&x=1",
    ],
)
def test_an_upload_goes_to_the_same_server_or_nowhere(client: Client, location: str) -> None:
    """The login is sent to no other address, whatever the registry answers."""
    Hostile.location = location
    with pytest.raises(GpunodesError):
        client.push_blob("x", DIGEST, b"content")
    uploads = [path for method, path, _ in Hostile.asked if method == "PUT"]
    assert len(uploads) == bool(location)
    assert all(path.startswith("/v2/x/blobs/uploads/1") and f"digest={DIGEST}" in path for path in uploads)


@pytest.mark.parametrize(
    "attack", [*ATTACKS, "/v2/x/blobs/uploads/../../../etc", "/other", '/v2/x/blobs/uploads/1?a="b']
)
def test_an_address_of_an_upload_has_a_form(client: Client, attack: str) -> None:
    Hostile.location = "".join(each for each in attack if each.isprintable() and each.isascii())
    with pytest.raises(GpunodesError) as error:
        client.push_blob("x", DIGEST, b"content")
    assert unprintable(str(error.value)) == []
    assert not [path for method, path, _ in Hostile.asked if method == "PUT"]


def test_a_response_that_trickles_ends_at_the_limit(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: Hostile) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"a")
                time.sleep(0.1)

    monkeypatch.setattr(client_of_registry, "_CALL_S", 1.0)
    monkeypatch.setattr(Hostile, "do_GET", answer)
    began = time.monotonic()
    with pytest.raises(GpunodesError, match=r"GET /v2/: (no complete response|.*timed out)"):
        client.check()
    assert time.monotonic() - began < 5


def test_a_registry_without_a_login_is_refused(client: Client) -> None:
    Hostile.status = 200
    client.check()
    assert [bool(login) for _, _, login in Hostile.asked] == [False, True]


def test_another_certificate_is_refused_before_the_login_is_sent(client: Client, own: material.Material) -> None:
    other = Client(f"{HOST}:5000", client._port, material.made(HOST).ca, own.user, own.password)
    with pytest.raises(GpunodesError, match="certificate verify failed"):
        other.check()
    assert Hostile.asked == []


def test_what_is_gone_is_deleted(client: Client) -> None:
    Hostile.status = 404
    client.delete_manifest("x", DIGEST)
    assert client.digest_of("x", "1", "x") == ""
    Hostile.status = 500
    with pytest.raises(GpunodesError, match="500 Internal Server Error"):
        client.delete_manifest("x", DIGEST)


@pytest.mark.parametrize(
    "content", [b"", b"[", b"[]", b'{"tags": 5}', b'{"tags": {"a": 1}}', b'{"tags": [5, "../x", "a b"]}']
)
def test_a_list_of_tags_has_a_form(client: Client, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    def answer(self: Hostile) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Docker-Content-Digest", "../../_catalog")
        self.end_headers()
        self.wfile.write(content if self.command == "GET" else b"")

    monkeypatch.setattr(Hostile, "do_GET", answer)
    monkeypatch.setattr(Hostile, "do_HEAD", answer)
    assert client.tags("x") == []
    assert client.digest_of("x", "1", "x") == ""
