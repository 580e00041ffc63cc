"""What a resumed roll-out does to machines that its plan left out: it has no plan, so the works read each machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.engine import runner
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Outcome, Role, TaskEnded
from gpunodes.operations import preflight
from gpunodes.operations.rolling import upgrades, works
from gpunodes.operations.rolling.work import Target, Work
from gpunodes.planner.candidates import MachineFacts
from gpunodes.planner.gpu import RequestedSoftware
from gpunodes.repair.policy import Node

from tests.unit.planner.test_gpu_upgrade import facts as gpu_facts

NO_PENDING: dict[str, Any] = {"packages": [], "kernels": [], "kept_back": [], "reboot": [], "held": []}
BASH = {"name": "bash", "old": "1", "new": "2", "security": True, "kernel_meta": False}


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "hosts.yml").write_text("control_plane: {hosts: {cp-1: }}\nworkers: {hosts: {w-1: }}\n")
    return Inventory(tmp_path / "hosts.yml")


def resumed(inventory: Inventory, name: str, parameters: Mapping[str, str]) -> tuple[Work, Target]:
    [machine] = inventory.select(["w-1"])
    return works.make(InventoryFleet(inventory), name, parameters), Target(machine, Node("w-1"))


def reports(monkeypatch: pytest.MonkeyPatch, facts: Mapping[str, Any] | None, driver: str = "") -> None:
    """The machine reports these facts; None: it does not respond."""
    each = MachineFacts(
        "w-1", Role.WORKER, facts, "" if facts else "no SSH", requested=RequestedSoftware("", driver), address="w-1"
    )
    seen = SimpleNamespace(
        candidates=[each],
        facts={"w-1": facts} if facts else {},
        cluster={"version": "v1.36.3"},
        interrupted=False,
    )

    def inspect(_: Inventory, machines: Any, folder: Path, *__: Any, **___: Any) -> Any:
        assert ([machine.name for machine in machines], folder.is_dir()) == (["w-1"], True)
        return seen

    monkeypatch.setattr(preflight, "inspect", inspect)


def test_the_packages_of_a_machine_are_read(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, Any] | None] = [{**NO_PENDING, "packages": [BASH]}, NO_PENDING, None]

    def run(play: runner.Play, _: Path, on_event: Callable[[Event], None], *__: Any) -> runner.PlayResult:
        assert (play.playbook, play.machines) == ("os_pending.yml", ["w-1"])
        found = answers.pop(0)
        outcome = Outcome.FAILED if found is None else Outcome.UNCHANGED
        result = {"msg": "its packages come by dnf"} if found is None else {"os_pending": found}
        on_event(TaskEnded("w-1", "os_pending", "Read", outcome, 1.0, result))
        return runner.PlayResult(ok=found is not None, interrupted=False, log=Path("log"))

    reports(monkeypatch, {"gpu": {"functions": []}})
    monkeypatch.setattr(runner, "run", run)
    work, target = resumed(inventory, upgrades.SYSTEM, {"security": "no", "reboot": "no"})
    assert (work.needed(target), work.needed(target)) == ("1 package", "")
    with pytest.raises(GpunodesError, match="by dnf"):
        work.needed(target)


def test_the_driver_of_a_machine_is_read(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    def needed(driver: str) -> str:
        work, target = resumed(inventory, upgrades.DRIVER, {"driver": driver, "reboot": "no"})
        return work.needed(target)

    reports(monkeypatch, gpu_facts(), "590")
    assert needed("590") == "its driver becomes 590"
    reports(monkeypatch, gpu_facts(), "580")
    assert needed("580") == "", "it has it already: it was off when the roll-out began"
    reports(monkeypatch, gpu_facts("V100"), "590")
    with pytest.raises(GpunodesError, match="V100"):
        needed("590")
    reports(monkeypatch, None, "590")
    with pytest.raises(GpunodesError, match="no SSH"):
        needed("590")


def test_the_earlier_kubelet_of_a_machine_is_read(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    work, target = resumed(inventory, upgrades.ROLLBACK, {})

    def needed(before: str, present: str = "1.36.3-1.1") -> str:
        reports(monkeypatch, {"kubernetes": {"before": before}, "packages": {"kubelet": present}})
        return work.needed(target)

    assert needed("1.35.4") == "its kubelet becomes 1.35.4"
    assert needed("1.35.4", "1.35.4-1.1") == ""
    with pytest.raises(GpunodesError, match="no earlier version"):
        needed("")
    reports(monkeypatch, None)
    with pytest.raises(GpunodesError, match="w-1 did not respond"):
        work.needed(target)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (upgrades.SYSTEM, {"security": "no", "reboot": "no"}),
        (upgrades.DRIVER, {"driver": "590", "reboot": "no"}),
        (upgrades.ROLLBACK, {}),
    ],
)
def test_what_was_begun_is_not_read(inventory: Inventory, name: str, parameters: Mapping[str, str]) -> None:
    """What an interruption left there would decide otherwise: it is worked on to the end."""
    work, target = resumed(inventory, name, parameters)
    assert work.needed(Target(target.machine, Node("w-1", cordoned=True, rollout="r-1")))
