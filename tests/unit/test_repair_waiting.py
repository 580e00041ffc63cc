"""Machines that changed while they waited for their repair, or after they were chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from gpunodes.engine import records
from gpunodes.engine.scans import MachineScan
from gpunodes.model import Machine
from gpunodes.repair.policy import Decision, RepairLimits
from gpunodes.repair.record import RepairOutcome, Stage
from gpunodes.repair.result import MachineRepair

from tests import repair_fleet
from tests.repair_fleet import Fleet, bury, clean, fleet, hurry


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path)


def run(place: Fleet, **request: Any) -> dict[str, MachineRepair]:
    return {each.machine: each for each in repair_fleet.run(place, **request).machines}


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Something happens while the repair of w1 works."""
    collect = repair_fleet.StandInControl.collect

    def slow(control: Any, *given: Any, **options: Any) -> list[str]:
        if control._machine.name == "w1":
            happens()
        return collect(control, *given, **options)

    monkeypatch.setattr(repair_fleet.StandInControl, "collect", slow)


def kill(place: Fleet, monkeypatch: pytest.MonkeyPatch, method: str, **request: Any) -> None:
    """Run a repair that dies in a method of the machine control; the holder of its Lease is dead."""
    repair_fleet.kill(place, monkeypatch, method, **request)
    bury(place)


def boot_again(place: Fleet, name: str, *, seen: bool = True) -> None:
    """A machine boots; ``seen``: its kubelet has reported that."""
    place.machines[name].boot += 1
    if seen:
        place.api.nodes[name]["status"]["nodeInfo"]["bootID"] = place.machines[name].boot_id


def give_uuid(place: Fleet, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A machine and its node report a system UUID: another boot id alone makes them no strangers."""
    uuid, scan = "4c4c4544-0042-4810-8052-b2c04f595331", place.scan
    place.api.nodes[name]["status"]["nodeInfo"]["systemUUID"] = uuid

    def seen(machines: Sequence[Machine], **options: Any) -> dict[str, MachineScan]:
        found = scan(machines, **options)
        facts = {**repair_fleet.FACTS, "product_uuid": uuid}
        return found | {name: MachineScan(found[name].verdict, facts)} if name in found else found

    monkeypatch.setattr(place, "scan", seen)


def test_a_machine_that_recovered_while_it_waited_is_not_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was drained and rebooted by its verdict from before the repair of another machine."""
    place = fleet(12, ["w1", "w5"])
    place.api.add_pod("job", "w5")
    meanwhile(monkeypatch, lambda: setattr(place.machines["w5"], "sick", False))
    found = run(place)
    assert found["w1"].outcome is RepairOutcome.REPAIRED
    assert found["w5"].decision is Decision.NOTHING
    assert place.machines["w5"].done == []
    assert "job" in place.api.pods
    clean(place)


def test_a_machine_that_waited_is_scanned_again_before_its_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is still sick, in another boot: the repair works on that boot."""
    place = fleet(12, ["w1", "w5"])
    meanwhile(monkeypatch, lambda: boot_again(place, "w5"))
    assert run(place)["w5"].outcome is RepairOutcome.REPAIRED
    assert place.machines["w5"].done == ["reboot"]


def test_a_named_machine_that_was_booted_again_while_it_waited_keeps_its_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(12, ["w1", "w5"])
    place.api.add_pod("job", "w5")
    give_uuid(place, monkeypatch, "w5")
    meanwhile(monkeypatch, lambda: boot_again(place, "w5"))
    limits = RepairLimits(by_hand=True)
    chosen: Sequence[Machine] = [each for each in place.all_machines() if each.name in ("w1", "w5")]
    monkeypatch.setattr(place, "all_machines", lambda: chosen)
    found = run(place, limits=limits, named=frozenset({"w1", "w5"}))["w5"]
    assert found.decision is Decision.REFUSE
    assert "its machine was booted again" in found.why
    assert place.machines["w5"].done == []
    assert "job" in place.api.pods
    clean(place)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_machine_whose_kubelet_has_not_reported_its_boot_is_repaired(
    monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    """It hangs again before its kubelet started: the node has the boot before."""
    place = fleet(5, ["w1"])
    boot_again(place, "w1", seen=False)
    give_uuid(place, monkeypatch, "w1")
    chosen = {"named": frozenset({"w1"}), "limits": RepairLimits(by_hand=True)} if by_hand else {}
    assert run(place, **chosen)["w1"].outcome is RepairOutcome.REPAIRED
    assert "reboot" in place.machines["w1"].done


def test_a_node_uncordoned_just_before_its_repair_is_resumed_keeps_its_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines are scanned between the look at the nodes and the lock."""
    place = fleet(5, ["w1"])
    kill(place, monkeypatch, "boot")
    assert place.api.nodes["w1"]["spec"]["unschedulable"]
    place.api.add_pod("job", "w1")
    scan = place.scan

    def slow(machines: Sequence[Machine], **options: Any) -> dict[str, MachineScan]:
        place.uncordon("w1")
        return scan(machines, **options)

    monkeypatch.setattr(place, "scan", slow)
    record = records.read("test")["w1"]
    records.write(record.to(Stage.DRAIN))
    found = run(place)["w1"]
    assert found.decision is Decision.REFUSE
    assert "its node was uncordoned in the meantime" in found.why
    assert "job" in place.api.pods
    assert place.machines["w1"].done == []
