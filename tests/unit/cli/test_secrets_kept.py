"""What is printed once is printed also if the command fails after it was made: no other command shows it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from gpunodes import cli
from gpunodes.errors import ExitCode, GpunodesError
from gpunodes.operations import notebooks
from gpunodes.operations.registry_server import commands
from gpunodes.planner.notebooks import Place, Request

INVENTORY = "control_plane:\n  hosts:\n    c1: {ansible_host: 127.0.0.1}\n"


@pytest.fixture(autouse=True)
def _inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts.yml").write_text(INVENTORY)
    monkeypatch.setattr("gpunodes.cli.terminal._final", [])


def late(*_: Any) -> NoReturn:
    raise GpunodesError("it is not ready after 1 s", "a node for it", "run the same command again")


def ended(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    """Run a command, which must fail."""
    monkeypatch.setattr(sys, "argv", ["gpunodes", *argv, "-i", "hosts.yml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.FAILED


def test_the_token_of_a_notebook(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @contextlib.contextmanager
    def connected(_: Any) -> Iterator[None]:
        yield

    made = notebooks.Started(Place("notebook", "default"), Request(image="x"), ["Secret"], "the-token")
    monkeypatch.setattr(notebooks, "connected", connected)
    monkeypatch.setattr(notebooks, "image", lambda _: "x")
    monkeypatch.setattr(notebooks, "up", lambda *_, **__: made)
    monkeypatch.setattr(notebooks, "wait", late)
    ended(monkeypatch, "jupyter", "up", "--json")
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["token"], found["ready"]) == ("the-token", False)
    assert "it is not ready after 1 s" in err
    ended(monkeypatch, "jupyter", "up")
    assert "the-token" in capsys.readouterr().out


def test_the_password_of_a_registry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = commands.Started("10.96.0.9:5000", "gpunodes", "images", "nas:/images", "x", 0.0, ["Secret"], "the-password")

    def up(_: Any, __: Any, ___: Any, ____: Any, shown: Callable[[commands.Started], None], **_____: Any) -> NoReturn:
        shown(made)
        late()

    monkeypatch.setattr(commands, "up", up)
    ended(monkeypatch, "registry", "up", "--json")
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["password"], found["run"]) == ("the-password", None)
    assert "it is not ready after 1 s" in err
    ended(monkeypatch, "registry", "up")
    assert "the-password" in capsys.readouterr().out
