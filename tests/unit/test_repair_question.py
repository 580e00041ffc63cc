"""What a user is asked before machines are repaired, and that nothing else is repaired then."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from gpunodes.cli import repair_options, terminal
from gpunodes.engine import history, records
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.leases.held import Leases
from gpunodes.errors import GpunodesError
from gpunodes.repair.policy import Decision, RepairLimits
from gpunodes.repair.request import RepairRequest

from tests import repair_fleet
from tests.repair_fleet import Fleet, bury, clean, fleet, hurry

REQUEST = RepairRequest("health", RepairLimits())


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path)


def left_unfinished(place: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repair of w1 was killed after its drain; the machine has recovered since."""
    repair_fleet.kill(place, monkeypatch, "boot")
    bury(place)
    place.machines["w1"].sick = False


def asked(
    place: Fleet, monkeypatch: pytest.MonkeyPatch, answer: Callable[[], None] = lambda: None
) -> tuple[list[str], int]:
    """Repair a fleet without --yes; the questions, and the exit code. ``answer`` may raise."""
    questions: list[str] = []

    def confirm(consequence: str, *, yes: bool) -> None:
        assert not yes
        questions.append(consequence)
        answer()

    monkeypatch.setattr(terminal, "check_confirmable", lambda *_, **__: None)
    monkeypatch.setattr(terminal, "confirm", confirm)
    code = repair_options.carry_out(place, place.all_machines(), REQUEST, yes=False, as_json=True)
    return questions, code


def test_an_unfinished_repair_is_in_the_plan_and_in_the_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was drained and rebooted without a question, as its verdict needed no repair."""
    place = fleet(5, ["w1"])
    left_unfinished(place, monkeypatch)

    def no() -> None:
        raise GpunodesError("not confirmed")

    with pytest.raises(GpunodesError, match="not confirmed"):
        asked(place, monkeypatch, no)
    assert place.machines["w1"].done == []
    assert records.read("test")["w1"].stage.value == "escalate"
    repair = records.read("test")["w1"].id
    assert (
        f"w1: would be repaired: its unfinished repair {repair} is resumed at stage escalate" in capsys.readouterr().err
    )
    assert asked(place, monkeypatch) == (["w1 will be repaired as planned"], 0)
    assert place.machines["w1"].done == ["reboot"]
    clean(place)


def test_a_machine_that_hangs_after_the_plan_is_not_repaired(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = fleet(12, ["w1"])
    questions, code = asked(place, monkeypatch, lambda: setattr(place.machines["w5"], "sick", True))
    assert (questions, code) == (["w1 will be repaired as planned"], 3)
    assert (place.machines["w1"].done, place.machines["w5"].done) == (["reboot"], [])
    result = {each["name"]: each for each in json.loads(capsys.readouterr().out)["machines"]}
    assert result["w5"]["decision"] == "refuse"
    assert "it was not in the plan" in result["w5"]["why"]
    clean(place)


def test_without_a_repair_in_the_plan_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no question then; a machine hangs, and another command leaves a repair, after the plan."""
    place = fleet(12)
    shown = terminal.report

    def report(text: str, *, err: bool = False) -> None:
        shown(text, err=err)
        place.machines["w5"].sick = True
        place.cordon("w1", "anns-repair")

    monkeypatch.setattr(terminal, "report", report)
    assert asked(place, monkeypatch) == ([], 3)
    assert (place.machines["w1"].done, place.machines["w5"].done) == ([], [])
    assert place.api.nodes["w1"]["spec"]["unschedulable"]


def test_machines_that_wait_for_others_are_in_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command repairs them one after the other."""
    place = fleet(12, ["w1", "w5"])
    assert asked(place, monkeypatch) == (["w1, w5 will be repaired as planned"], 0)
    assert place.machines["w5"].done == ["reboot"]


def test_a_plan_with_unfinished_repairs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of w1, which would be dropped, nor that of w2, which would be resumed."""
    place = fleet(12, ["w1"])
    left_unfinished(place, monkeypatch)
    place.uncordon("w1")
    place.cordon("w2", "anns-repair")
    before, noted = (dict(records.read("test")), json.dumps([place.api.nodes, place.api.leases])), history.read()
    result = repair_fleet.run(place, dry_run=True)
    decisions = {each.machine: each.decision for each in result.machines}
    assert (decisions["w1"], decisions["w2"]) == (Decision.NOTHING, Decision.REPAIR)
    assert (dict(records.read("test")), json.dumps([place.api.nodes, place.api.leases])) == before
    assert history.read() == noted


def test_a_repair_that_runs_is_no_unfinished_one_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(5, ["w1"])
    left_unfinished(place, monkeypatch)
    anns = Leases(Cluster(place.session()), "repair")
    anns.holder = "ann@desk/repair/another-boot/7/7/7"
    anns.take("w1")
    found = {each.machine: each for each in repair_fleet.run(place, dry_run=True).machines}["w1"]
    assert found.decision is Decision.REFUSE
    assert "it is being worked on: `gpunodes repair` of ann@desk" in found.why
    anns.close()
