"""`gpunodes dashboard` with a cluster that reports anything; tests/repair has a real API server and a real sshd."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpunodes.cli import main, terminal
from gpunodes.engine import control_planes
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.remote import forward
from gpunodes.errors import ExitCode
from gpunodes.operations import dashboard

TOKEN = "eyJh.eyJi.c2ln"
END = "2026-11-26T01:30:00Z"
ESCAPE = "\x1b]0;x\x07"
ADDRESS = "10.244.0.9"


def about(uid: str = "u", owner: tuple[str, str, str] | None = None) -> dict[str, Any]:
    """The metadata of an object, which belongs to that kind, name and uid."""
    found: dict[str, Any] = {"name": "headlamp", "uid": uid, "resourceVersion": "1"}
    if owner:
        found["ownerReferences"] = [
            {**dict(zip(("kind", "name", "uid"), owner, strict=True)), "apiVersion": "x", "controller": True}
        ]
    return {"metadata": found}


def pod(address: Any = ADDRESS, owner: tuple[str, str, str] = ("ReplicaSet", "headlamp", "replicas")) -> dict[str, Any]:
    """A pod that is ready."""
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "podIP": address}
    return {**about(owner=owner), "spec": {"nodeName": "cp-1"}, "status": status}


class Cluster:
    """A cluster with these answers, and a tunnel that is always open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: Any = None, **given: Any) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.forwarded: list[tuple[str, str, int, int]] = []
        self.pods = given["pods"] if "pods" in given else [pod(**given)]
        self.has_deployment = True
        self._status = {"token": TOKEN, "expirationTimestamp": END} if status is None else status
        monkeypatch.setattr(control_planes, "session", lambda *_: self)
        monkeypatch.setattr(forward, "opened", self.opened)
        monkeypatch.setattr(dashboard, "_check", lambda *_: None)
        self.machine, self.responded, self.failures = "cp-1", True, dict[str, str]()

    def request(self, method: str, path: str, body: Any = None, *_: Any) -> Response:
        self.requests.append((method, path, body))
        if method == "POST":
            return Response(200, about() | {"status": self._status}, "", 0.0)
        if "/pods?" in path:
            return Response(200, {"items": self.pods}, "", 0.0)
        found = {
            "/version": {},
            "/apis/apps/v1/namespaces/gpunodes-headlamp/replicasets/headlamp": about(
                "replicas", ("Deployment", "headlamp", "own")
            ),
        }
        if self.has_deployment:
            found["/apis/apps/v1/namespaces/gpunodes-headlamp/deployments/headlamp"] = about("own")
        return Response(200, found[path], "", 0.0) if path in found else Response(404, None, "not found", 0.0)

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def opened(self, machine: Any, _: Any, address: str, port: int, local: int) -> Iterator[Any]:
        self.forwarded.append((machine.name, forward._checked(address), port, local))
        yield self

    def follow(self) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {cp-1: }}\n")
    return path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a browser was told to open."""
    urls: list[str] = []
    monkeypatch.setattr("webbrowser.open", urls.append)
    monkeypatch.setenv("DISPLAY", ":0")
    return urls


def call(monkeypatch: pytest.MonkeyPatch, inventory: Path, *argv: str, is_terminal: bool = True) -> int:
    monkeypatch.setattr("sys.argv", ["gpunodes", "dashboard", *argv, "-i", str(inventory)])
    monkeypatch.setattr(terminal, "columns", lambda: 80 if is_terminal else None)
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_it_shows_the_address_and_the_token_once(
    inventory: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch)
    assert call(monkeypatch, inventory) == ExitCode.DONE
    shown = capsys.readouterr()
    assert shown.out == f"http://127.0.0.1:4466\n{TOKEN}\n"
    assert TOKEN not in shown.err
    assert opened == ["http://127.0.0.1:4466"]
    assert cluster.forwarded == [("cp-1", ADDRESS, 4466, 4466)]
    assert cluster.requests[-1] == (
        "POST",
        "/api/v1/namespaces/gpunodes-headlamp/serviceaccounts/viewer/token",
        {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        },
    )


@pytest.mark.parametrize(("argv", "display"), [(("--no-browser",), ":0"), ((), "")])
def test_without_a_screen_it_opens_no_browser(
    inventory: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], display: str
) -> None:
    Cluster(monkeypatch)
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert call(monkeypatch, inventory, "--port", "8080", *argv) == ExitCode.DONE
    assert opened == []


def test_the_token_goes_to_a_terminal_only(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch)
    assert call(monkeypatch, inventory, is_terminal=False) == ExitCode.WRONG_INPUT
    assert "the output is not a terminal" in capsys.readouterr().err
    assert cluster.requests == []


def test_a_program_reads_one_line(
    inventory: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Cluster(monkeypatch)
    assert call(monkeypatch, inventory, "--json", "--no-browser", is_terminal=False) == ExitCode.DONE
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    assert json.loads(shown.out) == {
        "schema": "gpunodes.tunnel/1",
        "url": "http://127.0.0.1:4466",
        "port": 4466,
        "token": TOKEN,
        "token_end": 1795656600.0,
    }
    assert TOKEN not in shown.err
    assert opened == []


def test_the_token_goes_to_the_pod_of_the_deployment_only(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node may create pods with any labels, and report them as ready at any address; their owner is the node."""
    mirror = pod("10.244.7.7", ("Node", "w1", "w1"))
    cluster = Cluster(monkeypatch, pods=[mirror, pod()])
    assert call(monkeypatch, inventory, "--no-browser") == ExitCode.DONE
    assert [each[1] for each in cluster.forwarded] == [ADDRESS]
    for pods in ([mirror], [pod(owner=("ReplicaSet", "headlamp", "another"))], []):
        cluster = Cluster(monkeypatch, pods=pods)
        capsys.readouterr()
        assert call(monkeypatch, inventory) == ExitCode.FAILED
        shown = capsys.readouterr()
        assert "Headlamp has no pod that is ready" in shown.err
        assert (shown.out, cluster.forwarded) == ("", [])


def test_without_the_add_on_it_says_how_to_install_it(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.has_deployment = False
    assert call(monkeypatch, inventory) == ExitCode.WRONG_INPUT
    assert "run `gpunodes addon up headlamp`" in capsys.readouterr().err


GOOD = {"token": TOKEN, "expirationTimestamp": END}


@pytest.mark.parametrize(
    "hostile",
    [
        {"address": "None"},
        {"address": f"10.0.0.1{ESCAPE}"},
        {"address": "-oProxyCommand=touch x"},
        {"address": ["10.0.0.1"]},
        {"status": GOOD | {"token": f"a.b.c{ESCAPE}"}},
        {"status": GOOD | {"token": "a.b.c\nrm -rf /"}},
        {"status": GOOD | {"token": f"a.b.{'c' * 20_000}"}},
        {"status": GOOD | {"token": 1}},
        {"status": GOOD | {"expirationTimestamp": ESCAPE}},
        {"status": {}},
        {"status": []},
    ],
    ids=ascii,
)
def test_a_hostile_cluster_gets_no_further(
    inventory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hostile: Mapping[str, Any],
    opened: list[str],
) -> None:
    Cluster(monkeypatch, **hostile)
    assert call(monkeypatch, inventory) == ExitCode.FAILED
    shown = capsys.readouterr()
    assert (shown.out, opened) == ("", [])
    assert "a bug in gpunodes" not in shown.err
    assert "\x1b" not in shown.err
