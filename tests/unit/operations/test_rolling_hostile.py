"""Roll-outs with machines, nodes and pods whose strings are attacks: what is shown, written and kept.

All commands that roll something out use this engine: their own plans are in tests/unit/cli/test_plan_commands.py.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
import json
import os
from pathlib import Path

import pytest
from gpunodes.cli import terminal
from gpunodes.engine import history
from gpunodes.engine.leases.errors import Held
from gpunodes.errors import GpunodesError
from gpunodes.operations.rolling import abandon, commands, status
from gpunodes.operations.rolling.work import Target
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.record import RolloutOutcome
from gpunodes.rollout.result import RolloutResult
from gpunodes.views import repair as progress
from gpunodes.views import rollout as views

from tests.hostile import ATTACKS, is_plain
from tests.repair_fleet import Fleet, fleet
from tests.rollout_fleet import LEASE, MemoryWork, hurry, known, outcomes

ATTACKED = pytest.mark.parametrize("attack", ATTACKS, ids=ascii)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path / "state")


def rolled(place: Fleet, work: MemoryWork) -> tuple[RolloutResult, str]:
    """A roll-out, and all that it shows."""
    shown = io.StringIO()
    report = progress.RepairLines(shown).report
    result = commands.roll_out(place, place.all_machines(), work, RolloutOptions(), report, "test")
    return result, shown.getvalue() + everything(place, result)


def everything(place: Fleet, result: RolloutResult) -> str:
    """What commands show of a roll-out, its documents, its history, and what it wrote into the cluster."""
    now = status.read(place, lambda *_: None)
    documents = [views.document(result), views.status_document(now), place.api.events, place.api.leases]
    entries = progress.history([dataclasses.asdict(each) for each in history.read()])
    return "\n".join([views.summary(result), views.status(now), entries, *map(json.dumps, documents)])


@ATTACKED
@pytest.mark.parametrize("stage", ["prepare", "apply", "verify"])
def test_what_a_machine_reports_is_shown_as_text(attack: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its notes, and why a stage failed."""

    def during(now: str, target: Target) -> None:
        target.report(attack)
        if now == stage:
            raise GpunodesError(attack)

    place = fleet(1)
    work = known(monkeypatch, MemoryWork(place, versions={"w0": attack}, during=during))
    result, shown = rolled(place, work)
    assert [each.good for each in outcomes(result).values() if each] == [False]
    assert is_plain(shown)
    assert all(is_plain(each["message"]) for each in place.api.events)
    # Its record, which another command reads, has the words as they are.
    assert status.read(place, lambda *_: None).problem == ""


@ATTACKED
def test_what_pods_of_a_node_say_is_shown_as_text(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of those that do not leave, and why."""
    place = fleet(2)
    place.api.add_pod(attack, "w0")
    place.api.add_pod(f"alone{attack}", "w1", owner="")
    place.api.budgeted.add(attack)
    place.api.refusal = attack
    paths: list[str] = []
    place.api.before = lambda _, path: paths.append(path)
    result, shown = rolled(place, known(monkeypatch, MemoryWork(place)))
    assert outcomes(result) == dict.fromkeys(("w0", "w1"), RolloutOutcome.NOT_DRAINED)
    assert is_plain(shown)
    assert all(path.isprintable() and " " not in path for path in paths)
    # A name is one part of a path, whatever it has in it.
    assert {path.count("/") for path in paths if path.endswith("/eviction")} == {7}


@ATTACKED
def test_a_command_that_holds_the_roll_out_is_shown_as_text(
    attack: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = fleet(1)
    work = known(monkeypatch, MemoryWork(place, failing={"w0": "apply"}))
    rolled(place, work)
    for lease in place.api.leases.values():
        moment = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lease["spec"] |= {"holderIdentity": attack, "renewTime": moment, "leaseDurationSeconds": 10**6}
        lease["metadata"]["annotations"] |= {"gpunodes.dev/machine": attack}
    with pytest.raises(Held) as refused:
        commands.resume(place, lambda *_: None)
    terminal.error(refused.value)
    shown = capsys.readouterr().err
    assert "locked by" in shown
    assert is_plain(shown + everything(place, RolloutResult("id", "memory", [])))


@ATTACKED
def test_a_record_whose_words_are_hostile_is_shown_as_text(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(2)
    rolled(place, known(monkeypatch, MemoryWork(place, failing={"w0": "apply"})))
    notes = place.api.leases[LEASE]["metadata"]["annotations"]
    record = json.loads(notes["gpunodes.dev/record"])
    record |= {"by": attack, "stopped": attack, "parameters": {"version": attack}}
    record["ended"] = {name: {**each, "why": attack} for name, each in record["ended"].items()}
    notes["gpunodes.dev/record"] = json.dumps(record)
    assert status.read(place, lambda *_: None).rollout is not None
    assert is_plain(everything(place, RolloutResult("id", "memory", [])))


@pytest.mark.parametrize("name", [*ATTACKS, "../../outside", "/absolute", "a/../../b", ".."], ids=ascii)
def test_a_node_whose_name_is_hostile_is_given_back_by_name_alone(name: str, tmp_path: Path) -> None:
    """`rollout abandon` also gives nodes back that no machine of the inventory has: its files stay in their folder."""
    name = name.replace("/absolute", str(tmp_path / "absolute"))
    place = fleet(1)
    place.api.add_node(name)
    place.api.nodes[name]["metadata"]["annotations"] = {"gpunodes.dev/rollout": name}
    shown = io.StringIO()
    result = abandon.abandon(place, progress.RepairLines(shown).report)
    assert len(result.machines) == 1
    assert is_plain(shown.getvalue() + everything(place, result))
    files = {Path(folder, each).relative_to(tmp_path) for folder, _, found in os.walk(tmp_path) for each in found}
    assert {each.parts[0] for each in files} == {"state"}
    assert all(len(each.parts) == 4 or each.name == "history.jsonl" for each in files), files
