"""`gpunodes status --watch`: it repeats, goes on while nothing responds, and ends with Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpunodes import cli
from gpunodes.errors import ExitCode, GpunodesError
from gpunodes.operations import status
from gpunodes.operations.status import ClusterStatus, NodeStatus

INVENTORY = "control_plane:\n  hosts:\n    c1: {ansible_host: 127.0.0.1}\n"


@pytest.fixture(autouse=True)
def _inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts.yml").write_text(INVENTORY)


def found(reason: str) -> ClusterStatus:
    return ClusterStatus(
        "10.0.0.1:6443", "v1.36.3", [NodeStatus("c1", "c1", "control_plane", not reason, reason, "v1.36.3", "a")], []
    )


def test_it_repeats_also_while_no_control_plane_responds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: Iterator[ClusterStatus | BaseException] = iter(
        [
            found(""),
            GpunodesError("c1 does not respond", "", "switch it on"),
            found("kubelet stopped"),
            KeyboardInterrupt(),
        ]
    )
    pauses: list[float] = []

    def run(*_: object) -> ClusterStatus:
        each = next(answers)
        if isinstance(each, BaseException):
            raise each
        return each

    monkeypatch.setattr(status, "run", run)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(sys, "argv", ["gpunodes", "status", "-i", "hosts.yml", "--watch", "7"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == ExitCode.INTERRUPTED, err
    assert "ready" in out
    assert "c1 does not respond" in err
    assert "kubelet stopped" in out
    assert len(pauses) == 3
    assert all(6 < each <= 7 for each in pauses)


def test_one_document_is_not_repeated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpunodes", "status", "-i", "hosts.yml", "--watch", "7", "-o", "json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.WRONG_INPUT
    assert "--watch repeats" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "inf", "0.5"])
def test_a_pause_is_a_number_within_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    """A pause that is no number is no pause, and an endless one was an error of gpunodes."""

    def run(*_: object) -> ClusterStatus:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpunodes", "status", "-i", "hosts.yml", "--watch", seconds])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.WRONG_INPUT
    assert "--watch" in capsys.readouterr().err
