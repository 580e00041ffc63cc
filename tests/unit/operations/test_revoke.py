"""What a run that did not end well leaves in the cluster is deleted over a control plane that responds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.engine import control_planes, runner
from gpunodes.engine.cluster.errors import OtherCluster
from gpunodes.operations import join, remove, revoke
from gpunodes.operations.run import Operation

CONTROLS = [SimpleNamespace(name="cp-1"), SimpleNamespace(name="cp-2")]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[runner.Play]:
    plays: list[runner.Play] = []
    monkeypatch.setattr(runner, "run", lambda play, *_: plays.append(play))
    monkeypatch.setattr(control_planes, "choose", lambda _: control_planes.Choice(CONTROLS[1]))  # type: ignore[arg-type]  # a name is enough
    return plays


Ending = Callable[..., None]


@pytest.fixture
def end(tmp_path: Path) -> Ending:
    """Ends a run of an operation."""

    def ended(operation: Operation, *, ok: bool = False, interrupted: bool = False, controls: int = 2) -> None:
        inventory: Any = SimpleNamespace(control_planes=lambda: CONTROLS[:controls])
        result = runner.PlayResult(ok, interrupted, tmp_path / "log")
        revoke.leftovers(operation.after_interruption, inventory, tmp_path, "me", result)

    return ended


def test_a_run_that_failed_deletes_over_another_control_plane(played: list[runner.Play], end: Ending) -> None:
    """The one that it used may have failed, and both deletions with it."""
    end(join.OPERATION)
    [play] = played
    assert (play.playbook, play.machines, play.control) == ("revoke.yml", ["cp-2"], "cp-2")
    assert play.variables == {"revoke_run": "me"}


def test_an_interrupted_run_deletes_over_its_only_control_plane(played: list[runner.Play], end: Ending) -> None:
    end(join.OPERATION, interrupted=True, controls=1)
    assert len(played) == 1


def test_nothing_is_left_to_delete(played: list[runner.Play], end: Ending) -> None:
    end(join.OPERATION, ok=True)
    end(join.OPERATION, controls=1)  # the run itself tried over this one
    end(remove.OPERATION, interrupted=True)
    assert played == []


def test_a_failure_is_reported_although_nothing_can_be_deleted(
    played: list[runner.Play], end: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(_: Any) -> None:
        raise OtherCluster("all belong to another cluster")

    monkeypatch.setattr(control_planes, "choose", choose)
    end(join.OPERATION)
    assert played == []
