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


class Cluster:
    """A cluster with these answers, and a tunnel that is always open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, address: Any = "10.96.0.9", status: Any = None) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.forwarded: list[tuple[str, int, int]] = []
        self._spec = {"clusterIP": address}
        self._status = {"token": TOKEN, "expirationTimestamp": END} if status is None else status
        monkeypatch.setattr(control_planes, "session", lambda *_: self)
        monkeypatch.setattr(forward, "opened", self.opened)
        monkeypatch.setattr(dashboard, "_check", lambda *_: None)
        self.machine, self.responded, self.failures = "cp-1", True, dict[str, str]()

    def request(self, method: str, path: str, body: Any = None, *_: Any) -> Response:
        self.requests.append((method, path, body))
        about: dict[str, Any] = {"metadata": {"name": "x", "uid": "u", "resourceVersion": "1"}}
        if method == "POST":
            return Response(200, about | {"status": self._status}, "", 0.0)
        return Response(200, {} if path == "/version" else about | {"spec": self._spec}, "", 0.0)

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def opened(self, machine: Any, _: Any, address: str, port: int, local: int) -> Iterator[Any]:
        forward._checked(address)
        self.forwarded.append((machine.name, port, local))
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
    assert cluster.forwarded == [("cp-1", 80, 4466)]
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
