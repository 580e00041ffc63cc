"""The upgrade of container runtimes: what is needed is read from the machines; the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpunodes.cli import main
from gpunodes.engine import runner
from gpunodes.errors import ExitCode, GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Outcome, TaskEnded
from gpunodes.operations.rolling import commands, runtime
from gpunodes.operations.rolling.work import Stopped, Target
from gpunodes.planner.runtime_upgrade import PlannedRuntime, ReplacedPackage, RuntimePlans
from gpunodes.rollout.record import RolloutOutcome
from gpunodes.rollout.result import MachineRollout, RolloutResult
from gpunodes.views import runtime_plan as views

OLD: dict[str, Any] = {"packages": [{"name": "containerd", "old": "1.7.24-1", "new": "2.1.4-1"}], "changes": []}
SAME: dict[str, Any] = {"packages": [], "changes": []}


class Machines:
    """Machines that report these; None: they are unreachable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **reports: Any) -> None:
        self.plays: list[runner.Play] = []
        self.rollouts: list[list[str]] = []
        self.interrupted = False
        self._reports = reports
        monkeypatch.setattr(runner, "run", self.run)
        monkeypatch.setattr(commands, "roll_out", self.roll_out)

    def run(self, play: runner.Play, folder: Path, on_event: Callable[[Event], None], *_: Any) -> runner.PlayResult:
        self.plays.append(play)
        assert folder.is_dir()
        for name in play.machines:
            found = self._reports[name.replace("-", "_")]
            outcome = Outcome.UNCHANGED if found is not None else Outcome.FAILED
            result = {"runtime_pending": found} if found is not None else {"msg": "no SSH"}
            on_event(TaskEnded(name, "runtime_pending", "Read", outcome, 1.0, result))
        ok = all(self._reports[name.replace("-", "_")] is not None for name in play.machines)
        return runner.PlayResult(ok=ok, interrupted=self.interrupted, log=Path("log"))

    def roll_out(self, _: Any, machines: Any, work: Any, *__: Any) -> RolloutResult:
        self.rollouts.append([f"{each.name}: {work.needed(Target(each))}" for each in machines])
        return RolloutResult("id", work.name, [MachineRollout(each.name, RolloutOutcome.DONE) for each in machines])


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {cp-1: }}\nworkers: {hosts: {w-1: , w-2: }}\n")
    return Inventory(path)


def call(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpunodes", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_what_is_needed_is_read_from_the_machine(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, w_1=OLD, w_2=None)
    work = runtime.RuntimeUpgrade(inventory)
    first, second = (Target(each) for each in inventory.select(["w-1", "w-2"]))
    assert work.needed(first) == "containerd becomes 2.1.4-1"
    assert (machines.plays[0].playbook, machines.plays[0].machines) == ("runtime_pending.yml", ["w-1"])
    with pytest.raises(GpunodesError, match=r"no SSH.*the log is"):
        work.needed(second)
    machines.interrupted = True
    with pytest.raises(Stopped):
        work.needed(first)


def test_what_a_plan_has_just_read_is_not_read_again_at_once(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = Machines(monkeypatch, w_1=SAME, w_2=OLD)
    row = ReplacedPackage("containerd", "1", "2")
    plan = RuntimePlans([PlannedRuntime("w-1", [row]), PlannedRuntime("w-2", unreadable="no SSH")])
    work = runtime.RuntimeUpgrade(inventory, plan)
    first, second = (Target(each) for each in inventory.select(["w-1", "w-2"]))
    assert (work.needed(first), machines.plays) == ("containerd becomes 2", [])
    # When it is begun, the machine itself decides, and what could not be read is read again.
    assert work.needed(first) == ""
    assert work.needed(second) == "containerd becomes 2.1.4-1"


def test_the_command_rolls_out_what_the_plan_shows(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = Machines(monkeypatch, w_1=OLD, w_2=SAME)
    assert call(monkeypatch, "runtime", "upgrade", "w-*", "--yes", "--json", "-i", str(inventory.path)) == 0
    shown = capsys.readouterr()
    assert "containerd 1.7.24-1 -> 2.1.4-1" in shown.err
    assert machines.rollouts == [["w-1: containerd becomes 2.1.4-1", "w-2: "]]
    assert json.loads(shown.out)["machines"]


def test_the_plan_changes_nothing_and_is_a_document(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = Machines(monkeypatch, w_1={**OLD, "changes": ["write /etc/x"]}, w_2=None)
    code = call(monkeypatch, "runtime", "plan", "w-1", "w-2", "--json", "-i", str(inventory.path))
    assert code == ExitCode.PARTLY
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "gpunodes.runtime-plan/1"
    assert [(each["name"], each["needed"]) for each in found["machines"]] == [("w-1", True), ("w-2", False)]
    assert "no SSH" in found["machines"][1]["unreadable"]
    assert not machines.rollouts
    assert [play.playbook for play in machines.plays] == ["runtime_pending.yml"]


def test_the_plan_for_people() -> None:
    rows = [ReplacedPackage("containerd", "1.7.24-1", "2.1.4-1"), ReplacedPackage("new", "", "1")]
    plans = RuntimePlans(
        [PlannedRuntime("w-1", rows, ["write x"]), PlannedRuntime("w-2"), PlannedRuntime("w-3", unreadable="no SSH")]
    )
    assert views.plan(plans).splitlines() == [
        "w-1: upgrade",
        "  package   containerd 1.7.24-1 -> 2.1.4-1",
        "  package   new 1",
        "  change    write x",
        "w-2: has what its settings request, nothing to do",
        "w-3: NOT POSSIBLE: no SSH",
    ]
