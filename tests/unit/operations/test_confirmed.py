"""What a user has confirmed must still be so when the command has its locks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.engine import runner
from gpunodes.errors import GpunodesError
from gpunodes.model import Machine, Role
from gpunodes.operations import claims, confirmed, preflight, revoke
from gpunodes.operations import run as running
from gpunodes.operations.remove import OPERATION as REMOVE
from gpunodes.operations.reset import OPERATION as RESET

from tests.stand_ins import Silent

CONTROL = Machine("c0", "addr-c0", Role.CONTROL_PLANE)
W0 = Machine("w0", "addr-w0", Role.WORKER)
JOINED = {"role": "worker", "nodes": [{"name": "w0", "uid": "u"}]}


@contextlib.contextmanager
def claimed(*_: Any) -> Iterator[Any]:
    yield SimpleNamespace(
        take_more=lambda *_, **__: None, lost=lambda **_: None, unrenewed=None, findings=(), holder="x"
    )


@pytest.mark.parametrize("operation", [REMOVE, RESET], ids=["remove", "reset"])
def test_a_machine_that_joined_while_the_question_was_open_is_left_alone(
    operation: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The question said that it is no node: nothing would be drained, and pods run on it by now."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    world: dict[str, Any] = {"role": None, "nodes": []}

    def inspect(*_: Any, **__: Any) -> Any:
        facts = {"w0": {"hostname": "w0", "kubernetes": {"role": world["role"]}}}
        cluster = {"nodes": list(world["nodes"]), "ca_hash": "x"}
        return SimpleNamespace(facts=facts, cluster=cluster, choice=SimpleNamespace(machine=CONTROL), interrupted=False)

    plays: list[runner.Play] = []

    def run(play: runner.Play, *_: Any) -> runner.PlayResult:
        plays.append(play)
        return runner.PlayResult(ok=True, interrupted=False, log=tmp_path / "log")

    monkeypatch.setattr(preflight, "inspect", inspect)
    monkeypatch.setattr(preflight, "requested_version", lambda *_, **__: "1.36.3")
    monkeypatch.setattr(claims, "claimed", claimed)
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(revoke, "leftovers", lambda *_: None)
    inventory: Any = SimpleNamespace(
        kubeconfig=None,
        cluster="test",
        controls_of=lambda _: [CONTROL],
        variables=lambda _: {},
        path=tmp_path,
        machines=lambda *_: [CONTROL, W0],
    )
    shown = inspect()
    options = running.RunOptions(seen=shown, confirmed=True)
    running.carry_out(operation, inventory, [W0], Silent(), options)
    assert [play.machines for play in plays] == [["w0"]]
    world |= JOINED
    with pytest.raises(GpunodesError, match="w0 changed since the question was asked"):
        running.carry_out(operation, inventory, [W0], Silent(), options)
    assert len(plays) == 1


@pytest.mark.parametrize(
    ("then", "now", "changed"),
    [
        ({"kubernetes": {"role": "worker"}}, {"kubernetes": {"role": "control_plane"}}, True),
        ({"machine_id": "a"}, {"machine_id": "b"}, True),
        ({"kubernetes": {"etcd": True}}, {"kubernetes": {"etcd": True}}, False),
        ({}, {"kubernetes": {"role": "worker"}}, False),
        ({"kubernetes": {"role": "worker"}}, {}, False),
    ],
)
def test_what_did_not_respond_is_not_compared(then: dict[str, Any], now: dict[str, Any], changed: bool) -> None:
    shown: Any = SimpleNamespace(facts={"w0": then}, cluster=None)
    with pytest.raises(GpunodesError, match="changed") if changed else contextlib.nullcontext():
        confirmed.check_same([W0], shown, {"w0": now}, {"nodes": [{"name": "w0", "uid": "u"}]})


def test_another_node_of_that_name_is_a_change() -> None:
    shown: Any = SimpleNamespace(
        facts={"w0": {"hostname": "W0.example"}}, cluster={"nodes": [{"name": "w0", "uid": "a"}]}
    )
    confirmed.check_same([W0], shown, {}, {"nodes": [{"name": "w0", "uid": "a"}, {"name": "w1", "uid": "c"}]})
    with pytest.raises(GpunodesError, match="changed"):
        confirmed.check_same([W0], shown, {}, {"nodes": [{"name": "w0", "uid": "b"}]})
    confirmed.check_same([W0], None, {}, {})
