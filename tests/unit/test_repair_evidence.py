"""Evidence of repairs: its folder, its age and size limits."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from gpunodes.engine import evidence, history, journal, records
from gpunodes.errors import GpunodesError
from gpunodes.operations.repair import commands
from gpunodes.repair.policy import RepairLimits
from gpunodes.repair.record import RepairRecord, Stage
from gpunodes.repair.request import RepairRequest
from gpunodes.repair.result import RepairResult
from gpunodes.settings import state_home
from gpunodes.views import repair as views

from tests.repair_fleet import Fleet, fleet


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def run(place: Fleet) -> RepairResult:
    return commands.run(place, place.all_machines(), RepairRequest("health", RepairLimits()), lambda *_: None)


def keep(repair_id: str, mib: float, age_days: float) -> Path:
    folder = evidence.open_folder(repair_id)
    with (folder / "gpu-1.kernel.log").open("wb") as file:
        file.truncate(int(mib * 2**20))
    moment = time.time() - age_days * 24 * 3600
    os.utime(folder, (moment, moment))
    return folder


def test_scans_without_findings_leave_nothing_and_evidence_is_kept() -> None:
    """The runs of a timer leave no folder and do not displace the evidence of a repair."""
    place = fleet(5, ["w1"])
    (found,) = [each for each in run(place).machines if each.machine == "w1"]
    kept = Path(found.evidence)
    assert (kept / "w1.kernel.log").read_text() == "the line\n"
    assert kept.stat().st_mode & 0o777 == 0o700
    before = sorted(state_home().rglob("*"))
    run(place)
    assert sorted(state_home().rglob("*")) == before
    for _ in range(journal.KEEP + 1):
        journal.open_run("status")
    assert [path for path in sorted(state_home().rglob("*")) if "/runs" not in str(path)] == before
    assert len(list((state_home() / "runs").iterdir())) == journal.KEEP


def test_the_folder_is_named_in_the_result_and_in_the_history() -> None:
    """The summary, the JSON document and the history name the folder."""
    result = run(fleet(5, ["w1"]))
    (found,) = [each for each in result.machines if each.machine == "w1"]
    assert f"evidence: {found.evidence}" in views.summary(result)
    (document,) = [each for each in views.document(result)["machines"] if each["name"] == "w1"]
    assert document["evidence"] == found.evidence
    (collected,) = [entry for entry in history.read("w1") if entry.what == "collect"]
    assert collected.detail == f"{found.evidence}: w1.kernel.log"


def test_without_evidence_no_folder_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without evidence leaves no empty folder."""
    monkeypatch.setattr("tests.repair_fleet.StandInControl.collect", lambda *_, **__: [])
    (found,) = [each for each in run(fleet(5, ["w1"])).machines if each.machine == "w1"]
    assert found.evidence == ""
    assert list((state_home() / "evidence").iterdir()) == []


def test_evidence_is_kept_within_age_and_size_limits() -> None:
    """Old evidence is deleted, then the oldest above the size limit, but never that of an unfinished repair."""
    old, young, newest = keep("old", 1, 91), keep("young", 3, 80), keep("newest", 3, 1)
    evidence.prune(90, 100)
    assert [path.exists() for path in (old, young, newest)] == [False, True, True]
    evidence.prune(90, 5, keep={"young"})
    assert young.exists()
    evidence.prune(90, 5)
    assert [path.exists() for path in (young, newest)] == [False, True]


def test_a_repair_prunes_by_its_settings_except_unfinished_repairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Days and MiB are settings; the evidence of an unfinished repair stays, however old."""
    place = fleet(5)
    old, large, unfinished, elsewhere = keep("old", 1, 3), keep("large", 4, 1), keep("r1", 1, 30), keep("r2", 1, 30)
    given = place.settings()
    changed = {"gpunodes_repair_evidence_days": 2, "gpunodes_repair_evidence_mib": 3}
    place.cordon("w1", "r1")
    fields = {"started": time.time(), "reason": "x", "action": "reboot", "step": "reboot", "boot_id": "w1-boot-0"}
    records.write(RepairRecord("r1", "w1", "test", stage=Stage.VERIFY, node="w1", **fields))  # type: ignore[arg-type]  # of several types
    records.write(RepairRecord("r2", "w1", "another cluster", stage=Stage.VERIFY, node="w1", **fields))  # type: ignore[arg-type]  # of several types
    monkeypatch.setattr(place, "settings", lambda: {**given, **changed})
    run(place)
    assert [path.exists() for path in (old, large, unfinished, elsewhere)] == [False, False, True, True]


@pytest.mark.parametrize("repair_id", ["", "..", "../runs", "a/b", "-", "a\n", "x" * 300])
def test_a_repairs_id_cannot_be_a_path(repair_id: str) -> None:
    """An id may come from a lock in the cluster."""
    with pytest.raises(GpunodesError, match="is not a repair id"):
        evidence.open_folder(repair_id)


def test_a_result_without_evidence_does_not_mention_it() -> None:
    result = run(fleet(3))
    assert all(each.evidence == "" for each in result.machines)
    assert "evidence" not in views.summary(dataclasses.replace(result, dry_run=True))
