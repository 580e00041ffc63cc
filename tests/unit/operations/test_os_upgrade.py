"""The upgrade of operating systems: only machines with something to do are drained; the plan is shown first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpunodes.cli import main
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.operations import os_plan
from gpunodes.operations.rolling import commands
from gpunodes.operations.rolling.upgrades import SystemUpgrade
from gpunodes.operations.rolling.work import Target
from gpunodes.planner.os_upgrade import OsPlans, PendingPackage, PlannedOs
from gpunodes.repair.policy import Node
from gpunodes.rollout.record import RolloutOutcome
from gpunodes.rollout.result import MachineRollout, RolloutResult

BASH = PendingPackage("bash", "1", "2", security=False)
KERNEL = PendingPackage("linux-image-6.12.2", "", "6.12.2-1", security=True)
NEWER = "the kernel 6.12.2 is installed, and 6.12.1 runs"


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {cp-1: }}\nworkers: {hosts: {w-1: , w-2: , w-3: }}\n")
    return Inventory(path)


def call(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr("sys.argv", ["gpunodes", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("planned", "never", "if_needed"),
    [
        (PlannedOs("w-1"), "", ""),
        (PlannedOs("w-1", [BASH]), "1 package", "1 package"),
        (PlannedOs("w-1", [BASH, KERNEL], ["6.12.2"]), *["1 package, the kernel 6.12.2"] * 2),
        (PlannedOs("w-1", reboot=[NEWER]), "", f"a reboot: {NEWER}"),
        (PlannedOs("w-1", refused={"6.12.2": "it does not build"}), *["a hold of the kernel 6.12.2"] * 2),
        (PlannedOs("w-1", refused={"6.12.2": "it does not build"}, held=True), "", ""),
    ],
)
def test_what_a_machine_needs(planned: PlannedOs, never: str, if_needed: str) -> None:
    assert planned.needed(reboot=False) == never
    assert planned.needed(reboot=True) == if_needed


def test_only_machines_with_something_to_do_are_begun(inventory: Inventory) -> None:
    plan = OsPlans(False, [PlannedOs("w-1"), PlannedOs("w-2", [BASH]), PlannedOs("w-3", unreadable="packages by dnf")])
    work = SystemUpgrade(inventory, security=False, reboot=False, plan=plan)
    first, second, third = (Target(each) for each in inventory.select(["w-1", "w-2", "w-3"]))
    assert (work.needed(first), work.needed(second)) == ("", "1 package")
    with pytest.raises(GpunodesError, match="packages by dnf"):
        work.needed(third)


def test_what_was_begun_is_upgraded_to_the_end(inventory: Inventory) -> None:
    """A killed command may have left packages half installed, or a kernel without a driver: no list shows that."""
    [machine] = inventory.select(["w-1"])
    work = SystemUpgrade(inventory, security=False, reboot=False, plan=OsPlans(False, [PlannedOs("w-1")]))
    assert work.needed(Target(machine, Node("w-1", cordoned=True, rollout="r-1")))
    assert work.needed(Target(machine, Node("w-1"))) == ""


def test_the_command_shows_its_plan_and_rolls_it_out(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts: list[list[str]] = []

    def run(_: Any, machines: Any, __: Any, *, security: bool) -> OsPlans:
        return OsPlans(security, [PlannedOs(each.name, [BASH] if each.name == "w-2" else []) for each in machines])

    def roll_out(_: Any, machines: Any, work: Any, *__: Any) -> RolloutResult:
        rollouts.append([f"{each.name}: {work.needed(Target(each))}" for each in machines])
        return RolloutResult("id", work.name, [MachineRollout(each.name, RolloutOutcome.DONE) for each in machines])

    monkeypatch.setattr(os_plan, "run", run)
    monkeypatch.setattr(commands, "roll_out", roll_out)
    assert call(monkeypatch, "os", "upgrade", "w-1", "w-2", "--yes", "--json", "-i", str(inventory.path)) == 0
    shown = capsys.readouterr()
    assert "w-1: nothing to upgrade" in shown.err
    assert "bash 2" in shown.err
    assert rollouts == [["w-1: ", "w-2: 1 package"]]
    assert json.loads(shown.out)["machines"]
