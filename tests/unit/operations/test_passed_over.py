"""Machines that are off, silent, not ready or in maintenance stop no upgrade of the others, and are results of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.cli import main, terminal
from gpunodes.errors import ExitCode
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, PreflightFinding, Role
from gpunodes.operations import gpu_upgrade_plan, preflight, switched_off, upgrade_plan
from gpunodes.operations.rolling import commands, upgrades
from gpunodes.operations.rolling.work import Target
from gpunodes.planner import gpu_upgrade
from gpunodes.planner.candidates import MachineFacts
from gpunodes.planner.gpu import RequestedSoftware
from gpunodes.planner.upgrade_model import Part, PassedOver
from gpunodes.repair.switched_off import Switched
from gpunodes.rollout.record import RolloutOutcome
from gpunodes.rollout.result import MachineRollout, RolloutResult

from tests.stand_ins import Silent
from tests.unit.operations import test_upgrades
from tests.unit.planner.test_gpu_upgrade import facts as gpu_facts
from tests.unit.planner.test_upgrade import CONTROL, OWN

MACHINES = {"cp-1": 1, "w-1": 2, "w-2": 3, "w-3": 4, "w-4": 5, "w-5": 6}
INVENTORY = "control_plane: {hosts: {cp-1: {ansible_host: 10.0.0.1}}}\nworkers:\n  hosts:\n" + "".join(
    f"    {name}: {{ansible_host: 10.0.0.{number}}}\n" for name, number in MACHINES.items() if name != "cp-1"
)


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / "hosts.yml").write_text(INVENTORY)
    return Inventory(tmp_path / "hosts.yml")


def node(name: str, **changes: Any) -> dict[str, Any]:
    number = MACHINES[name]
    return {
        "name": name,
        "address": f"10.0.0.{number}",
        "boot_id": f"boot-{number}",
        "version": "v1.35.4",
        "ready": True,
        "reason": "",
        "maintenance": "",
        **changes,
    }


def candidate(name: str, **changes: Any) -> MachineFacts:
    number = MACHINES[name]
    role = Role.CONTROL_PLANE if name == "cp-1" else Role.WORKER
    found = {"hostname": name, "boot_id": f"boot-{number}", "kubernetes": {"role": role.value}, "packages": {}}
    given: dict[str, Any] = {"facts": {**found, "cgroup": 2}, "address": f"10.0.0.{number}", **changes}
    return MachineFacts(name, role, **given)


def planned(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> upgrade_plan.Planned:
    """w-2 is in maintenance, w-3 off with such a node, w-4 off on purpose, and w-5's maintenance has ended."""
    ended = json.dumps({"reason": "old fans", "until": "2020-01-01T00:00:00Z"})
    nodes = [
        node("cp-1"),
        node("w-1"),
        node("w-2", maintenance='{"reason": "new fans", "by": "ann"}'),
        node("w-3", ready=False, reason="no contact"),
        node("w-5", maintenance=ended),
    ]
    silent = candidate("w-3", facts=None, unreachable="timed out")
    candidates = [candidate("cp-1"), candidate("w-1"), candidate("w-2"), silent, candidate("w-5")]
    cluster = {"version": "v1.35.4", "nodes": nodes}
    seen = preflight.Inspection(candidates, "cp-1", cluster, None, "", interrupted=False, log=Path("log"))
    off = {"w-4": Switched("off", 1_800_000_000, "no pod needs it")}
    own = dict.fromkeys(("w-1", "w-2", "w-5"), OWN) | {"cp-1": CONTROL}
    answers = SimpleNamespace(answers={"upgrade_facts": own}, failures={})
    monkeypatch.setattr(switched_off, "read", lambda _: off)
    monkeypatch.setattr(preflight, "inspect", lambda *_, **__: seen)
    monkeypatch.setattr(upgrade_plan, "_read", lambda *_: answers)
    return upgrade_plan.run(inventory, "1.36", Silent())


def test_a_plan_names_what_it_passes_over(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(inventory, monkeypatch).plan
    assert plan.possible, plan.findings
    assert [(each.machine, each.present, each.holds_addons) for each in plan.passed_over] == [
        ("w-2", "1.35.4", False),
        ("w-3", "1.35.4", True),
        ("w-4", "", False),
    ]
    why = [each.why for each in plan.passed_over]
    assert why[:2] == ["it is in maintenance: new fans, by ann", "timed out"]
    assert why[2].startswith("off on purpose: switched off by the autoscaler")
    assert "--wake --only w-4" in why[2]
    assert [step.machine for step in plan.steps] == ["cp-1", "cp-1", "w-1", "w-5"]
    assert plan.findings == [], "the node of w-3 is known"


def call(monkeypatch: pytest.MonkeyPatch, inventory: Inventory, *words: str) -> int:
    monkeypatch.setattr(terminal, "confirm", lambda *_, **__: None)
    monkeypatch.setattr("sys.argv", ["gpunodes", *words, "-i", str(inventory.path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_plan_command_says_it_in_its_exit_code_and_its_documents(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(inventory, monkeypatch)
    assert call(monkeypatch, inventory, "upgrade", "plan", "1.36") == ExitCode.PARTLY
    shown = capsys.readouterr().out
    assert "w-2 (1.35.4): it is in maintenance: new fans, by ann" in shown
    assert "The add-ons stay as they are, since w-3 is not ready" in shown
    assert call(monkeypatch, inventory, "upgrade", "plan", "1.36", "--json") == ExitCode.PARTLY
    document = json.loads(capsys.readouterr().out)
    assert document["passed_over"][1] == {
        "machine": "w-3",
        "present": "1.35.4",
        "why": "timed out",
        "holds_addons": True,
    }


def test_an_upgrade_ends_with_what_it_passed_over(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(inventory, monkeypatch)
    rolled = test_upgrades.Rolled(monkeypatch)
    assert call(monkeypatch, inventory, "upgrade", "1.36", "--yes", "--no-backup") == ExitCode.PARTLY
    assert rolled.rollouts == [(upgrades.CONTROL_PLANES, ["cp-1"]), (upgrades.KUBELETS, ["cp-1", "w-1", "w-5"])]
    shown = capsys.readouterr().out
    assert "w-3: skipped: timed out" in shown
    assert "kubernetes: 3 done, 3 skipped" in shown


def test_a_machine_outside_of_only_stops_no_other(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = PreflightFinding("w-5", "cgroup", Problem("it runs cgroup v1", "cgroup v2", "boot with v2"))
    left = PassedOver("w-3", "", "off", holds_addons=False)
    plan = test_upgrades._plan(("w-1", Part.NODE), ("w-5", Part.NODE), passed_over=[left])
    broken = replace(plan, findings=[problem])
    monkeypatch.setattr(upgrade_plan, "run", lambda *_: SimpleNamespace(plan=broken))
    rolled = test_upgrades.Rolled(monkeypatch)
    words = ("upgrade", "1.36", "--yes", "--no-backup")
    assert call(monkeypatch, inventory, *words, "--only", "w-1") == ExitCode.DONE
    assert rolled.rollouts == [(upgrades.KUBELETS, ["w-1"])]
    assert "Warnings:" in capsys.readouterr().err
    assert call(monkeypatch, inventory, *words, "--only", "w-5") == ExitCode.WRONG_INPUT
    assert len(rolled.rollouts) == 1


def drivers(monkeypatch: pytest.MonkeyPatch, *more: gpu_upgrade.PlannedUpgrade) -> list[Any]:
    """The plan of a new driver, in which w-2 is silent; what its roll-out would do to each machine is returned."""
    silent = gpu_upgrade.planned("w-2", None, RequestedSoftware("", "590"), "timed out")
    plan = gpu_upgrade.Upgrades("590", [*more, silent])
    done: list[Any] = []

    def roll_out(_: Any, machines: list[Machine], work: upgrades.DriverUpgrade, *__: Any) -> RolloutResult:
        for machine in machines:
            try:
                done.append(work.needed(Target(machine)))
            except Exception as problem:
                done.append(str(problem))
        return RolloutResult("id", work.name, [MachineRollout("w-2", RolloutOutcome.SKIPPED, "timed out")])

    monkeypatch.setattr(switched_off, "read", lambda _: {})
    monkeypatch.setattr(gpu_upgrade_plan, "run", lambda *_: plan)
    monkeypatch.setattr(commands, "roll_out", roll_out)
    return done


def test_a_silent_machine_stops_no_upgrade_of_drivers(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a result of the roll-out, which works on no machine that was not judged."""
    words = ("gpu", "upgrade", "w-1", "w-2", "--driver", "590", "--yes")
    good = gpu_upgrade.planned("w-1", gpu_facts(), RequestedSoftware("", "590"))
    done = drivers(monkeypatch, good)
    assert call(monkeypatch, inventory, *words) == ExitCode.PARTLY
    assert done == ["its driver becomes 590", "timed out"]
    has_it = gpu_upgrade.planned("w-1", gpu_facts(), RequestedSoftware("", "580"))
    done = drivers(monkeypatch, has_it)
    assert call(monkeypatch, inventory, *words) == ExitCode.PARTLY
    assert done == []
    assert "w-2: skipped: timed out" in capsys.readouterr().out
    old_card = gpu_upgrade.planned("w-1", gpu_facts("V100"), RequestedSoftware("", "590"))
    drivers(monkeypatch, old_card)
    assert call(monkeypatch, inventory, *words) == ExitCode.WRONG_INPUT
