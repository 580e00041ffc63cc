"""The API by a kubeconfig: what a hostile or broken server sends, and credentials that end."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.engine import control_planes
from gpunodes.engine.cluster import connection, direct, exec_plugin
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.direct import ByKubeconfig
from gpunodes.engine.cluster.errors import NoResponse, OtherCluster, Refused, TooLarge
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import WrongInput
from gpunodes.inventory import addressed
from gpunodes.model import Kubeconfig
from gpunodes.operations import claims, power

from tests import forward_proxy, tls_api
from tests.tls_api import DATE, SYSTEM, Server

kube_config = pytest.importorskip("kubernetes.config.kube_config", reason="needs the extra gpunodes[kubeconfig]")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tls_api.certificate(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def server(certificate: Path) -> Iterator[Server]:
    with tls_api.serving(certificate) as made:
        yield made


def cluster(path: Path, **more: Any) -> Cluster:
    return Cluster(Session(ByKubeconfig(path, **more)), patience_s=0.0)


def test_the_path_of_the_server_and_the_token_are_used(server: Server) -> None:
    server.answer = lambda _: (200, {}, b'{"items": []}')
    found = cluster(server.kubeconfig())
    assert found.nodes() == []
    assert server.asked == [
        ("/k8s/c-1/api/v1/namespaces/kube-system", "Bearer t0ken"),
        ("/k8s/c-1/api/v1/nodes?limit=500", "Bearer t0ken"),
    ]
    assert found.session.request("GET", "/version").time == 1795654800
    assert found.lock_holder() is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((302, {"Location": "http://169.254.169.254/latest/meta-data"}, b""), "it redirects to another address"),
        ((200, {"Date": ""}, b'{"items": []}'), "names no time"),
        ((200, {"Date": "soon"}, b'{"items": []}'), "names no time"),
        ((200, {"Date": DATE.replace("2026", "9999")}, b'{"items": []}'), "names no time"),
        ((200, {}, b"<html>"), "not valid"),
        ((200, {}, b"[" * 100_000), "not valid"),
        ((200, {}, b'{"items": [5]}'), "not valid"),
        ((200, {}, b'{"items": [{"metadata": {"name": 5}}]}'), "not valid"),
    ],
)
def test_a_hostile_server_is_an_error(server: Server, answer: Any, message: str) -> None:
    server.answer = lambda _: answer
    with pytest.raises(NoResponse, match=message):
        cluster(server.kubeconfig()).nodes()
    assert len(server.asked) == 2


def test_a_response_that_does_not_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_MAX_BYTES", 1000)
    server.answer = lambda _: (200, {}, b" " * 100_000)
    with pytest.raises(TooLarge, match="too large"):
        cluster(server.kubeconfig()).nodes()


def test_an_error_of_the_api_is_its_message(server: Server) -> None:
    body = json.dumps({"message": "nodes is forbidden"}).encode()
    server.answer = lambda _: (409, {}, body)
    with pytest.raises(Refused, match="the Kubernetes API reports: nodes is forbidden") as caught:
        cluster(server.kubeconfig()).nodes()
    assert caught.value.status == 409


def test_another_cluster_is_refused_before_anything_else_is_asked(server: Server) -> None:
    seen: list[str] = []

    def is_known(uid: str) -> bool:
        seen.append(uid)
        return False

    with pytest.raises(OtherCluster, match="that of another cluster"):
        cluster(server.kubeconfig(), is_known=is_known).nodes()
    assert seen == ["u-1"]
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("environment", "in_file", "through"),
    [
        ({}, False, False),
        ({"HTTPS_PROXY": "{}"}, False, True),
        ({"https_proxy": "{}", "no_proxy": "127.0.0.1"}, False, False),
        ({"HTTP_PROXY": "{}"}, False, False),
        ({}, True, True),
        ({"HTTPS_PROXY": "http://127.0.0.1:9"}, True, True),
    ],
    ids=str,
)
def test_the_proxy_of_the_environment_or_of_the_file_leads_to_the_api(
    server: Server, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], *, in_file: bool, through: bool
) -> None:
    """As kubectl has it: that of the file first. TLS is between the controller and the API."""
    server.answer = lambda _: (200, {}, b'{"items": []}')
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    path = server.kubeconfig()
    with forward_proxy.running() as proxy:
        for name, value in environment.items():
            monkeypatch.setenv(name, value.format(proxy.address))
        if in_file:
            content = yaml.safe_load(path.read_text())
            content["clusters"][0]["cluster"]["proxy-url"] = proxy.address
            path.write_text(yaml.safe_dump(content))
        assert cluster(path).nodes() == []
        assert bool(proxy.targets) is through
        assert {(each.method, each.target) for each in proxy.records} <= {("CONNECT", f"127.0.0.1:{server.port}")}


def test_a_name_leads_to_no_other_path(server: Server) -> None:
    by = ByKubeconfig(server.kubeconfig()).connect()
    for path in ("/api/v1/nodes/../secrets", "/api/v1/nodes/%2e%2e", "//evil.example/", "nodes"):
        found = by.request({"method": "GET", "path": path, "body": None, "type": "", "keep": []})
        assert found.status == 0
        assert "is not a path" in found.error
    assert server.asked == []


def test_a_plugin_gets_fresh_credentials(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_RELOAD_S", 0.0)
    counter = server.folder / "count"
    counter.write_text("")
    program = (
        "import json, sys; file = open(sys.argv[1], 'a'); file.write('x'); file.close();"
        "made = {'apiVersion': 'client.authentication.k8s.io/v1', 'kind': 'ExecCredential',"
        "'status': {'token': 'token-%d' % len(open(sys.argv[1]).read())}}; print(json.dumps(made))"
    )
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": sys.executable,
        "args": ["-c", program, str(counter)],
        "interactiveMode": "Never",
    }
    ended: set[str] = set()

    def answer(_: str) -> tuple[int, dict[str, str], bytes]:
        return (401, {}, b"{}") if server.asked[-1][1] in ended else (200, {}, b'{"items": []}')

    server.answer = answer
    found = cluster(server.kubeconfig(exec=plugin))
    found.nodes()
    ended.add("Bearer token-1")
    found.nodes()
    assert [token for _, token in server.asked] == ["Bearer token-1"] * 3 + ["Bearer token-2"] * 2
    assert counter.read_text() == "xx"


VERSION = "client.authentication.k8s.io/v1"


def printing(made: Any) -> dict[str, Any]:
    """An exec plugin that prints this."""
    return {"apiVersion": VERSION, "command": "/bin/echo", "args": [json.dumps(made)], "interactiveMode": "Never"}


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ({"command": "/bin/false"}, "its exec plugin ended with 1"),
        ({"command": "/bin/sh", "args": ["-c", "echo 'no \x1b[2Jlogin' >&2; exit 3"]}, "ended with 3: no .*login"),
        ({"command": "/nowhere"}, "cannot be started: No such file"),
        ({"command": "/bin/sleep", "args": ["60"]}, "did not end in 1 s"),
        ({"command": "/bin/cat", "args": ["/dev/zero"]}, "printed more than"),
        ({"command": "/bin/true", "interactiveMode": "Always"}, "needs a terminal"),
        ({"command": "/bin/true", "args": [5]}, "args of its exec plugin"),
        ({"command": "/bin/true", "env": {"A": "B"}}, "env of its exec plugin"),
        ({"command": "/bin/true"}, "printed no ExecCredential"),
        (printing({"apiVersion": "other", "status": {"token": "t0ken"}}), "another apiVersion"),
        (printing({"apiVersion": VERSION, "status": {"clientCertificateData": "x"}}), "neither a token nor"),
        (printing({"apiVersion": VERSION, "status": {"token": ["t0ken"]}}), "neither a token nor"),
    ],
)
def test_a_plugin_that_fails(
    server: Server, monkeypatch: pytest.MonkeyPatch, plugin: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(exec_plugin, "_LIMIT_S", 1.0)
    with pytest.raises(WrongInput, match=f"(?s)cannot be used: .*{message}.*kubectl") as caught:
        cluster(server.kubeconfig(exec={"apiVersion": VERSION, **plugin})).nodes()
    assert "\x1b" not in str(caught.value)
    assert "t0ken" not in str(caught.value)
    assert server.asked == []


def test_what_a_plugin_gets_and_gives_stays_in_memory(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also a second session works, whose plugin gives the same certificate: it may keep it until it ends."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    program = (
        "import json, os, sys; asked = json.loads(os.environ['KUBERNETES_EXEC_INFO']);"
        "assert asked['spec']['interactive'] is False and os.environ['WHO'] == 'me';"
        "assert asked['spec']['cluster']['certificate-authority-data'] and not sys.stdin.read();"
        "print(json.dumps({'apiVersion': asked['apiVersion'], 'kind': 'ExecCredential', 'status': {"
        "'clientCertificateData': open(sys.argv[1] + '.crt').read(),"
        "'clientKeyData': open(sys.argv[1] + '.key').read()}}))"
    )
    plugin = {
        "apiVersion": VERSION,
        "command": sys.executable,
        "args": ["-c", program, str(server.folder / "server")],
        "env": [{"name": "WHO", "value": "me"}],
        "provideClusterInfo": True,
    }
    server.answer = lambda _: (200, {}, b'{"items": []}')
    path = server.kubeconfig(exec=plugin)
    for text in (
        path.read_text(),
        re.sub("certificate-authority-data: .*", "certificate-authority: server.crt", path.read_text()),
    ):
        path.write_text(text)
        found = cluster(path)
        assert found.nodes() == []
        assert not list(folder.iterdir())
        found.session.close()


def test_credentials_that_ended_never_lead_to_another_cluster(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user selected another context of the file, or wrote another cluster into it, while a repair ran."""
    monkeypatch.setattr(direct, "_RELOAD_S", 0.0)
    ended = False

    def answer(_: str) -> tuple[int, dict[str, str], bytes]:
        return (401, {}, b"{}") if ended and server.asked[-1][1] == "Bearer t0ken" else (200, {}, b'{"items": []}')

    server.answer = answer
    path = server.kubeconfig()
    by = ByKubeconfig(path).connect()
    nodes: dict[str, Any] = {"method": "GET", "path": "/api/v1/nodes", "body": None, "type": "", "keep": []}
    assert by.request(nodes).status == 200

    document = yaml.safe_load(path.read_text())
    document["users"].append({"name": "v", "user": {"token": "other"}})
    document["contexts"].append({"name": "y", "context": {"cluster": "c", "user": "v"}})
    document["current-context"] = "y"
    path.write_text(yaml.safe_dump(document))
    ended = True
    assert by.request(nodes).status == 401, "the context stays that of the first request"
    assert "Bearer other" not in {token for _, token in server.asked}

    document["users"][0]["user"]["token"] = "other"
    path.write_text(yaml.safe_dump(document))
    monkeypatch.setitem(SYSTEM["metadata"], "uid", "u-2")
    before = len(server.asked)
    refused = by.request(nodes)
    assert refused.status == connection.OTHER_API
    asked = [path for path, token in server.asked[before:] if token == "Bearer other"]
    assert set(asked) == {"/k8s/c-1/api/v1/namespaces/kube-system"}


@pytest.mark.parametrize("status", [401, 403, 200, 0])
def test_no_power_is_switched_without_a_lock_while_the_cluster_works(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    """Its credentials have ended, or lack a right, or its certificate is for another name: another command may hold the
    lock. One that is down has none.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(control_planes, "_CONFIRMED", {})
    monkeypatch.setattr(claims, "PATIENCE_S", 0.0)
    server.answer = lambda _: (status, {}, b'{"message": "no"}')
    path = server.kubeconfig()
    if not status:
        path.write_text(path.read_text().replace(str(server.port), "1"))
    if status == 200:
        path.write_text(path.read_text().replace("127.0.0.1", "localhost"))
    fleet = InventoryFleet(addressed.inventory(["10.0.0.5"], {}, Kubeconfig(path)))
    machine, reported = fleet.all_machines()[0], list[str]()
    with contextlib.ExitStack() as inside:
        held = power.locked(fleet, machine, power.PowerAction.OFF, lambda _, text: reported.append(text))
        if status:
            with pytest.raises((Refused, OtherCluster), match=r"the Kubernetes API reports: no|certificate"):
                inside.enter_context(held)
        else:
            inside.enter_context(held)
    assert any("no lock" in each for each in reported) == (not status)


@pytest.mark.parametrize("has_memory_files", [True, False])
def test_keys_of_the_file_are_on_no_disk_when_a_request_is_sent(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory_files: bool
) -> None:
    """Also where the system has no files in memory, as macOS."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(kube_config, "_temp_files", {})
    if not has_memory_files:
        monkeypatch.delattr(os, "memfd_create")
    left: list[list[Path]] = []

    def answer(_: str) -> tuple[int, dict[str, str], bytes]:
        left.append(list(tmp_path.iterdir()))
        return 200, {}, b'{"items": []}'

    server.answer = answer
    pair = {"client-certificate": "server.crt", "client-key": "server.key"}
    user = {f"{key}-data": base64.b64encode((server.folder / name).read_bytes()).decode() for key, name in pair.items()}
    used = cluster(server.kubeconfig(**user))
    assert used.nodes() == []
    used.session.close()
    assert server.clients == ["server", "server"]
    assert left == [[], []]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["headers", "body", "chunks"])
def test_a_response_that_trickles_ends_at_the_limit(
    server: Server, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(direct, "_READ_S", 1.0)
    server.trickle = where
    began = time.monotonic()
    with pytest.raises(NoResponse, match="no complete response in 1 s"):
        cluster(server.kubeconfig()).nodes()
    assert time.monotonic() - began < 5


def test_another_certificate_is_that_of_another_cluster(server: Server) -> None:
    path = server.kubeconfig()
    other = path.read_text().replace("127.0.0.1", "localhost")
    path.write_text(other)
    with pytest.raises(OtherCluster, match="certificate"):
        cluster(path).nodes()


def test_without_the_library(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(WrongInput, match=r"pip install 'gpunodes\[kubeconfig\]'"):
        cluster(server.kubeconfig()).nodes()


def test_an_api_that_is_down(server: Server) -> None:
    path = server.kubeconfig()
    path.write_text(path.read_text().replace(str(server.port), "1"))
    found = ByKubeconfig(path).connect().request({"method": "GET", "path": "/version", "body": None, "type": ""})
    assert found.status == 0
    assert found.status > connection.NO_CLUSTER
    assert "refused" in found.error
