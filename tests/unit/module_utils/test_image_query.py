"""Images are looked for in registries on loopback: present, absent, behind a token, unresponsive, hostile."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from gpunodes.ansible.module_utils import image_query, upgrade_facts
from gpunodes.ansible.module_utils.host import images
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.upgrade_facts import Sources

NOWHERE = "127.0.0.1:9"
"""A registry at which nothing listens."""
PROXY = f"{NOWHERE}/kube-proxy:v1.36.3"


class Registry(http.server.ThreadingHTTPServer):
    """A registry with one image; with ``token`` only for those who fetch it first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.token = ""
        self.realm = f"{self.url}/token"
        self.code = 0
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Registry

    def do_HEAD(self) -> None:
        self.server.requests.append(self.path)
        given = self.headers.get("Authorization")
        if self.server.code:
            self._send(self.server.code)
        elif self.server.token and given != f"Bearer {self.server.token}":
            self._send(401, challenge=f'Bearer realm="{self.server.realm}",service="r",scope="s:p"')
        else:
            self._send(200 if self.path == "/v2/kube-proxy/manifests/v1.36.3" else 404)

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        self._send(200, json.dumps({"token": self.server.token}).encode())

    def _send(self, code: int, body: bytes = b"", challenge: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        if challenge:
            self.send_header("WWW-Authenticate", challenge)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def missing(registry: Registry, *names: str) -> tuple[list[str], str]:
    return image_query.missing(names, {NOWHERE: registry.url}, None)


def test_what_the_mirror_has_and_lacks(registry: Registry) -> None:
    """A mirror's "no" counts although the registry behind it does not respond."""
    assert missing(registry, PROXY, PROXY) == ([], "")
    assert missing(registry, f"{NOWHERE}/etcd:3") == ([f"{NOWHERE}/etcd:3"], "")


def test_an_anonymous_token_is_fetched(registry: Registry) -> None:
    registry.token = "abc"
    assert missing(registry, PROXY) == ([], "")
    assert registry.requests[1] == "/token?service=r&scope=s%3Ap"


@pytest.mark.parametrize("realm", ["file:///etc/shadow", "ftp://127.0.0.1/x", ""])
def test_a_registry_that_wants_a_login_is_no_answer(registry: Registry, realm: str) -> None:
    registry.token, registry.realm = "abc", realm
    found, why = missing(registry, PROXY)
    assert found == []
    assert f"{registry.url}: it wants a login" in why


@pytest.mark.parametrize("token", ["a b", "a\r\nX: y", "", "x" * 20_000])
def test_a_token_is_one_word(registry: Registry, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.token = token or "other"
    monkeypatch.setattr(Handler, "do_GET", lambda self: self._send(200, json.dumps({"token": token}).encode()))
    assert "it wants a login" in missing(registry, PROXY)[1]


def test_a_registry_that_does_not_say_is_asked_once(registry: Registry) -> None:
    registry.code = 503
    found, why = missing(registry, PROXY, f"{NOWHERE}/etcd:3")
    assert (found, len(registry.requests)) == ([], 1)
    assert f"{registry.url}: it responds 503" in why


def test_what_is_no_http_is_no_answer(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "do_HEAD", lambda self: self.wfile.write(b"\x00" * 100 + b"\n"))
    found, why = missing(registry, PROXY)
    assert found == []
    assert registry.url in why


def test_the_version_is_the_newest_of_the_source_and_what_containerd_has_is_not_asked_for(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Sources(
        requested="1.36",
        images=[f"{NOWHERE}/kube-proxy:v{{version}}", f"{NOWHERE}/etcd:3", f"{NOWHERE}/pause:3"],
        mirrors={NOWHERE: registry.url},
    )
    monkeypatch.setattr(images, "lister", lambda: lambda name: name.endswith("pause:3"))
    offered = {"kubeadm": ["1.37.0", "1.36.3", "1.36.2"]}
    expected = {"version": "1.36.3", "missing": [f"{NOWHERE}/etcd:3"], "unasked": ""}
    assert upgrade_facts._fetched_images(sources, offered) == expected
    assert not any("pause" in each for each in registry.requests)
    nothing = {"version": "", "missing": [], "unasked": ""}
    assert upgrade_facts._fetched_images(sources, {}) == nothing

    def absent() -> Any:
        raise MachineProblem("there is no ctr")

    monkeypatch.setattr(images, "lister", absent)
    assert "there is no ctr" in upgrade_facts._fetched_images(sources, offered)["unasked"]
