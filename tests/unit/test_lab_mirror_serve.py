"""The mirror's server: which files it serves, and which requests it refuses."""

from __future__ import annotations

import hashlib
import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpunodes.lab.mirror import serve
from gpunodes.lab.mirror.oci import MANIFEST_TYPE

MANIFEST = b'{"schemaVersion":2}'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    for path, data in {
        "kubernetes/core:/stable:/v1.36/deb/Packages": b"Package: a\n",
        "v2/some/image/manifests/v1": MANIFEST,
        "v2/some/image/blobs/sha256:ab": b"layer",
        "empty": b"",
    }.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    (tmp_path / "secret").write_text("outside")
    (folder / "out").symlink_to(tmp_path / "secret")
    return folder


@pytest.fixture
def connection(root: Path) -> Iterator[http.client.HTTPConnection]:
    with serve.server([root], "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        client = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        yield client
        client.close()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "target",
    [
        "/../secret",
        "/%2e%2e/secret",
        "/v2/../../secret",
        "/out",
        "//etc/passwd",
        "/kubernetes",
        "/",
        "/none",
        "/a%00b",
        "/" + "x" * 300,
    ],
)
def test_folders_and_paths_outside_are_not_served(root: Path, target: str) -> None:
    assert serve.locate([root], target) is None


@pytest.mark.parametrize("colon", [":", "%3a"])
def test_colons_may_be_escaped(root: Path, colon: str) -> None:
    assert serve.locate([root], f"/kubernetes/core{colon}/stable{colon}/v1.36/deb/Packages") is not None


def test_clients_detect_a_registry(connection: http.client.HTTPConnection) -> None:
    connection.request("GET", "/v2/")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"{}")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_manifest_has_type_and_digest(connection: http.client.HTTPConnection, method: str) -> None:
    connection.request(method, "/v2/some/image/manifests/v1?ns=registry.k8s.io")
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.getheader("Content-Type") == MANIFEST_TYPE
    assert answer.getheader("Docker-Content-Digest") == f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
    assert answer.getheader("Content-Length") == str(len(MANIFEST))
    assert answer.read() == (MANIFEST if method == "GET" else b"")


def test_one_connection_serves_many_requests(connection: http.client.HTTPConnection) -> None:
    for path, status, body in (
        ("/empty", 200, b""),
        ("/v2/some/image/blobs/sha256:ab", 200, b"layer"),
        ("/v2/some/image/blobs/sha256:cd", 404, None),
        ("/kubernetes/core:/stable:/v1.36/deb/Packages", 200, b"Package: a\n"),
    ):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == status
        data = answer.read()
        assert body is None or data == body


def test_writing_is_refused(connection: http.client.HTTPConnection) -> None:
    connection.request("POST", "/v2/some/image/blobs/uploads/", body=b"x")
    assert connection.getresponse().status == 501
