"""Repairs that a command left: a kill at every stage, records and forgotten cordons."""

from __future__ import annotations

import contextlib
import functools
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from gpunodes.engine import history, records
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.leases.held import Leases
from gpunodes.errors import GpunodesError
from gpunodes.operations import power
from gpunodes.operations.repair import commands
from gpunodes.operations.repair.running import Repairs
from gpunodes.repair import record as recording
from gpunodes.repair.policy import Decision, RepairLimits
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage
from gpunodes.repair.request import RepairRequest
from gpunodes.rollout.record import Disruption, RolloutRecord
from gpunodes.rollout.record import Stage as RolloutStage

from tests.repair_fleet import Fleet, bury, clean, fleet, hurry, kill, outcomes, resume, run


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path)


ODD_RECORDS = [b"\xff", b"[" * 100_000, b'{"id": 5}', b'{"machine": []}', b'{"armed": [["a", 1' + b"0" * 400 + b"]]}"]


@pytest.mark.parametrize("text", ODD_RECORDS)
def test_an_invalid_record_in_a_lock_is_ignored(text: bytes) -> None:
    """A lock may contain anything."""
    with pytest.raises(ValueError, match=r"not a repair record|JSON|Expecting|decode"):
        recording.parse(text.decode("utf-8", "replace"))


def test_a_full_disk_keeps_the_previous_record() -> None:
    """A partial record was ignored, so a machine that was switched off was forgotten."""
    record = RepairRecord("id-1", "w1", "test", 1.0, "hung", "reboot", Stage.CORDON, node="w1", boot_id="b")
    records.write(record)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            records.write(record.to(Stage.ESCALATE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert records.read("test") == {"w1": record}
    assert [path.suffix for path in records._folder().iterdir()] == [".json"]


class Killed(BaseException):
    """Simulates kill -9 in one process: no further code of the command runs."""


STEPS = ("collect", "cordon", "drain", "escalate", "escalate", "verify", "uncordon", "release")
GIVING_UP = (*STEPS[:6], "escalate", "escalate", "verify", "give-up", "release")


def killed(place: Fleet, monkeypatch: pytest.MonkeyPatch, at: int, late: bool) -> list[str]:
    """Run a repair that dies at its ``at``-th write, before or after it reaches the disk; the stages written."""
    written: list[str] = []
    write = records.write

    def die(record: RepairRecord) -> None:
        written.append(record.stage.value)
        if len(written) == at and not late:
            raise Killed
        write(record)
        if len(written) == at:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(records, "write", die)
        # There is no cleanup after kill -9; the lock's holder is dead.
        patch.setattr(Repairs, "interrupt", lambda _: None)
        with contextlib.suppress(Killed):
            run(place)
    bury(place)
    return written


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lost_laptop", [False, True])
@pytest.mark.parametrize("go_on", [resume, run])
@pytest.mark.parametrize("at", range(1, len(STEPS) + 1))
def test_a_kill_at_every_stage_and_a_second_run(
    monkeypatch: pytest.MonkeyPatch, at: int, go_on: Callable[[Fleet], Any], lost_laptop: bool, late: bool
) -> None:
    place = fleet(5, ["w1"])
    place.api.add_pod("job", "w1")
    written = killed(place, monkeypatch, at, late)
    assert written == list(STEPS[:at])
    if lost_laptop:
        for record in records.read("test").values():
            records.remove(record)
        history.path().unlink(missing_ok=True)
    go_on(place)
    if place.machines["w1"].sick:
        # No repair was started, or no record of it was stored, or it had not cordoned the node.
        assert at <= STEPS.index("cordon") + 1
        run(place)
    assert place.machines["w1"].done == ["reboot"], "only once"
    clean(place)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", range(1, len(GIVING_UP) + 1))
def test_a_kill_at_every_stage_before_giving_up(monkeypatch: pytest.MonkeyPatch, at: int, late: bool) -> None:
    place = fleet(5, ["w1"], cures=frozenset())
    assert killed(place, monkeypatch, at, late) == list(GIVING_UP[:at])
    run(place)
    assert place.api.leases == {}
    assert records.read("test") == {}
    assert place.api.nodes["w1"]["spec"]["taints"][0]["key"] == "gpunodes.dev/needs-repair"
    assert place.machines["w1"].done == ["reboot", "cold"]


@pytest.mark.parametrize("lost_laptop", [False, True])
@pytest.mark.parametrize("go_on", [resume, run])
@pytest.mark.parametrize("at", range(3, len(GIVING_UP) + 1))
def test_a_node_that_a_user_uncordoned_is_left_to_its_pods(
    monkeypatch: pytest.MonkeyPatch, at: int, go_on: Callable[[Fleet], Any], lost_laptop: bool
) -> None:
    """`kubectl uncordon` leaves the annotation of the repair; pods have come back."""
    place = fleet(5, ["w1"], cures=frozenset())
    killed(place, monkeypatch, at, late=False)
    done = list(place.machines["w1"].done)
    place.machines["w1"].sick = False
    place.uncordon("w1")
    place.api.add_pod("job", "w1")
    if lost_laptop:
        for record in records.read("test").values():
            records.remove(record)
        history.path().unlink(missing_ok=True)
    go_on(place)
    node = place.api.nodes["w1"]
    assert place.machines["w1"].done == done
    assert "job" in place.api.pods
    assert not node["spec"].get("unschedulable")
    assert "gpunodes.dev/cordoned-by" not in node["metadata"]["annotations"]
    assert place.api.leases == {}
    assert records.read("test") == {}


@pytest.mark.parametrize("by_others", [False, True], ids=["own cordon", "a cordon of others"])
@pytest.mark.parametrize("tainted_by", ["20260101T000000Z-W1-abc", "another"])
def test_a_repair_that_is_dropped_leaves_no_taint(tainted_by: str, by_others: bool) -> None:
    """It was killed while it reset GPUs, and a user uncordoned the node: the taint would keep all pods away."""
    place, own = fleet(5), "20260101T000000Z-W1-abc"
    place.cordon("w1", "" if by_others else own)
    record = RepairRecord(own, "w1", "test", time.time(), "sick", "reset_gpu", node="w1", step="gpu-reset")
    records.write(record.to(Stage.ESCALATE, own_cordon=not by_others, named=by_others))
    Cluster(place.session()).taint_temporarily("w1", tainted_by)
    place.api.nodes["w1"]["spec"]["taints"].append({"key": "theirs", "effect": "NoSchedule"})
    place.uncordon("w1")
    resume(place)
    node = place.api.nodes["w1"]
    kept = [] if tainted_by == own else ["gpunodes.dev/repair"]
    assert sorted(each["key"] for each in node["spec"]["taints"]) == [*kept, "theirs"]
    assert node["metadata"]["annotations"] == {}
    assert records.read("test") == {}


def test_the_taint_of_a_repair_stays_while_another_command_is_at_work() -> None:
    place = fleet(5)
    place.cordon("w1", "r1")
    record = RepairRecord("r1", "w1", "test", time.time(), "sick", "reset_gpu", node="w1", step="gpu-reset")
    records.write(record.to(Stage.ESCALATE, own_cordon=True))
    Cluster(place.session()).taint_temporarily("w1", "r1")
    place.uncordon("w1")
    with records.claimed("w1", "test"):
        resume(place)
    assert [each["key"] for each in place.api.nodes["w1"]["spec"]["taints"]] == ["gpunodes.dev/repair"]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("sick", [False, True])
def test_a_cordon_that_a_user_lifted_is_no_forgotten_repair(sick: bool, again: bool) -> None:
    """Neither a record nor a lock is left; ``again``: the user cordoned the node later, to work there."""
    place = fleet(5, ["w1"] if sick else [])
    place.cordon("w1", "some-repair")
    place.uncordon("w1")
    if again:
        place.cordon("w1")
    assert outcomes(resume(place)) == {}
    node = place.api.nodes["w1"]
    assert bool(node["spec"].get("unschedulable")) == again
    assert not node["spec"].get("taints")
    assert place.machines["w1"].done == []


def test_a_node_that_was_uncordoned_before_the_kill_is_reported_as_uncordoned() -> None:
    place, message = fleet(5), list[str]()
    record = RepairRecord("r1", "w1", "test", time.time(), "sick", "reboot", node="w1", step="reboot")
    records.write(record.to(Stage.UNCORDON, outcome=RepairOutcome.REPAIRED))
    commands.resume(place, RepairRequest("repair", RepairLimits()), lambda _, text: message.append(text))
    assert "uncordoned" in message


def test_a_cordon_of_an_unknown_repair_is_found() -> None:
    place = fleet(5)
    node = place.api.nodes["w1"]
    node["spec"]["unschedulable"] = True
    node["metadata"]["annotations"]["gpunodes.dev/cordoned-by"] = "some-repair"
    assert outcomes(resume(place))["w1"] is RepairOutcome.REPAIRED
    clean(place)


def test_a_record_is_restored_from_its_text() -> None:
    record = RepairRecord("id", "w1", "test", 1.0, "why", "reboot", outcome=RepairOutcome.REPAIRED, tried=("reboot",))
    assert recording.parse(record.text()) == record
    assert recording.parse(record.text()[:-1] + ', "new": 1}') == record
    for text in ("", "[]", "{}", '{"stage": "dance"}'):
        with pytest.raises(ValueError, match=r".*"):
            recording.parse(text)


@pytest.mark.parametrize("go_on", [resume, run])
@pytest.mark.parametrize("lost_laptop", [False, True])
def test_a_repair_that_had_not_cordoned_yet_does_not_pass_over_the_budget(
    monkeypatch: pytest.MonkeyPatch, go_on: Callable[[Fleet], Any], lost_laptop: bool
) -> None:
    """Without a cordon and a live lock it uses no budget: another controller repairs another machine meanwhile."""
    place = fleet(12, ["w1"])
    place.api.add_pod("job", "w1")
    assert killed(place, monkeypatch, 2, late=False) == ["collect", "cordon"]
    if lost_laptop:
        for record in records.read("test").values():
            records.remove(record)
    place.cordon("w2", "anns-repair")
    other = Leases(Cluster(place.session()), "repair")
    other.holder = "ann@desk/repair/another-boot/7/7/7"
    other.take("w2", "")
    go_on(place)
    other.close()
    assert place.machines["w1"].done == []
    assert "job" in place.api.pods
    assert not place.api.nodes["w1"]["spec"].get("unschedulable")
    assert records.read("test") == {}
    assert list(place.api.leases) == ["gpunodes-machine-w2"]


def test_a_running_repair_that_has_not_cordoned_yet_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second command of the same user finds its record."""
    place = fleet(5, ["w1"])
    killed(place, monkeypatch, 2, late=False)
    (before,) = records.read("test").values()
    other = Leases(Cluster(place.session()), "repair")
    other.holder = "ann@desk/repair/another-boot/7/7/7"
    other.take("w1")
    noted = history.read("w1")
    resume(place)
    assert records.read("test") == {"w1": before}
    assert history.read("w1") == noted
    other.close()


@pytest.mark.parametrize("go_on", [resume, run, functools.partial(run, without_cluster=True)])
def test_a_repair_without_cluster_that_changed_nothing_is_not_resumed(
    monkeypatch: pytest.MonkeyPatch, go_on: Callable[[Fleet], Any]
) -> None:
    """The machine recovered in the same boot, and its node got pods again: the next timer rebooted it under them."""
    place = fleet(5, ["w1"])
    kill(place, monkeypatch, "collect", without_cluster=True)
    place.machines["w1"].sick = False
    place.api.add_pod("job", "w1")
    go_on(place)
    assert place.machines["w1"].done == []
    assert "job" in place.api.pods
    clean(place)


def test_a_repair_without_cluster_is_not_resumed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node was never drained; the cold cycle would have come next."""
    place = fleet(5, ["w1"], deaf=frozenset({"reboot", "force", "sysrq"}))
    kill(place, monkeypatch, "reset", without_cluster=True)
    done = list(place.machines["w1"].done)
    place.api.add_pod("job", "w1")
    (found,) = [each for each in run(place).machines if each.machine == "w1"]
    assert (found.decision, place.machines["w1"].done) == (Decision.REFUSE, done)
    assert "begun with --without-cluster; resume it with that option" in found.why
    assert outcomes(run(place, without_cluster=True))["w1"] is RepairOutcome.REPAIRED


@pytest.mark.parametrize("busy", [False, True])
def test_a_user_ends_a_repair_without_cluster(monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    """Its record stayed, and the machine that a person had repaired was reset by the next command."""
    place = fleet(5, ["w1"], deaf=frozenset({"reboot", "force", "sysrq"}))
    kill(place, monkeypatch, "reset", without_cluster=True)
    entry = place.all_machines()[1]
    if busy:
        with records.claimed("w1", "test"), pytest.raises(GpunodesError, match="another command"):
            power.clear(place, entry, without_cluster=True)
        assert list(records.read("test")) == ["w1"]
        return
    power.clear(place, entry, without_cluster=True)
    assert records.read("test") == {}


def test_a_running_repair_without_cluster_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second command of the same user finds its record."""
    place = fleet(5, ["w1"])
    kill(place, monkeypatch, "collect", without_cluster=True)
    before, noted = records.read("test"), history.read("w1", "test")
    with records.claimed("w1", "test"):
        resume(place)
    assert (records.read("test"), history.read("w1", "test")) == (before, noted)


@pytest.mark.parametrize(
    "end", [resume, lambda place: power.clear(place, place.all_machines()[1], without_cluster=False)]
)
def test_the_end_of_a_repair_keeps_the_record_of_a_roll_out(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[Fleet], Any]
) -> None:
    """A user had uncordoned the node, and a roll-out of another controller was killed on it."""
    place = fleet(5, ["w1"])
    kill(place, monkeypatch, "run_step")
    bury(place)
    place.uncordon("w1")
    disrupts = Disruption.NODE
    rollout = RolloutRecord(
        "r1", "os", "w1", "test", "w1", disrupts, time.time(), stage=RolloutStage.APPLY, applied=True
    )
    lease = place.api.leases["gpunodes-machine-w1"]
    lease["metadata"]["annotations"]["gpunodes.dev/record"] = rollout.text()
    end(place)
    assert records.read("test") == {}
    (left,) = Leases(Cluster(place.session()), "rollout resume").observe()
    assert (left.record, left.live) == (rollout.text(), False)


@pytest.mark.parametrize("go_on", [resume, run])
def test_a_repair_that_was_killed_at_its_very_end_ends_once(
    monkeypatch: pytest.MonkeyPatch, go_on: Callable[[Fleet], Any]
) -> None:
    """Between the release of the lock and the removal of the record: metrics counted the repair twice."""
    place = fleet(5, ["w1"])

    def die(_: RepairRecord) -> None:
        raise Killed

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(records, "remove", die)
        patch.setattr(Repairs, "interrupt", lambda _: None)
        run(place)
    assert [record.stage for record in records.read("test").values()] == [Stage.RELEASE]
    go_on(place)
    assert history.repairs("test") == {RepairOutcome.REPAIRED: 1}
    clean(place)
