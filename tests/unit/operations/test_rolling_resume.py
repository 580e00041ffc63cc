"""Roll-outs that were killed, resumed, abandoned; and records in the cluster that gpunodes did not write."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime as dt
import functools
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from gpunodes.ansible.module_utils import devices, pools
from gpunodes.engine import records
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.leases.errors import Held
from gpunodes.engine.leases.held import Leases
from gpunodes.errors import ExitCode, GpunodesError, WrongInput
from gpunodes.operations import power
from gpunodes.operations.machine_lock import MachineLock
from gpunodes.operations.repair import context as repair_context
from gpunodes.operations.rolling import abandon, commands, context, engine, following, running, stages, status, upgrades
from gpunodes.operations.rolling.reading import Reading
from gpunodes.operations.rolling.work import Target
from gpunodes.repair import record as repair_record
from gpunodes.repair.maintenance import Maintenance
from gpunodes.repair.policy import Budget
from gpunodes.rollout import record as recording
from gpunodes.rollout import state
from gpunodes.rollout.options import RolloutOptions
from gpunodes.rollout.record import Disruption, RolloutOutcome, RolloutRecord, Stage
from gpunodes.views import rollout as views

from tests.repair_fleet import Fleet, bury, fleet
from tests.rollout_fleet import LEASE, Killed, MemoryWork, clean, hurry, known, outcomes, resume, roll_out

RECORD = "gpunodes.dev/record"


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path)


def killed_at_request(
    place: Fleet, work: MemoryWork, number: int, then: Sequence[state.Following] = (), **options: Any
) -> bool:
    """Roll out, and die at the ``number``-th request that changes the cluster; False if there are not so many.

    From then on the API gets nothing of this command: its threads end, and it releases nothing.
    """
    counted = itertools.count(1)
    dead: list[int] = []

    def before(method: str, _path: str) -> None:
        if dead or (method not in {"GET", "LOCK"} and next(counted) == number):
            dead.append(1)
            raise Killed

    place.api.before = before
    try:
        result = roll_out(place, work, then=then, **options)
        following.follow(result, place, lambda *_: None, "test")
    except (Killed, Exception):
        assert dead
    finally:
        place.api.before = lambda *_: None
    bury(place)
    return bool(dead)


def far(place: Fleet, seconds: float) -> None:
    """The dead command ran on another controller: its locks on machines look held until they expire."""
    bury(place)
    for name, lease in place.api.leases.items():
        if name.startswith("gpunodes-machine-") and "holderIdentity" in lease["spec"]:
            lease["spec"] |= {
                "holderIdentity": "bob@far/rollout/boot/1/1/x",
                "renewTime": dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "leaseDurationSeconds": seconds,
            }


def killed_in(stage: str, machine: str, place: Fleet, work: MemoryWork, *, resumed: bool = False) -> None:
    """Roll out, or resume that, and die in a stage of a machine; the drain is one, too."""

    def die() -> None:
        place.api.before = lambda *_: (_ for _ in ()).throw(Killed)
        raise Killed

    def look(method: str, path: str) -> None:
        if stage == "drain" and method != "GET" and path.endswith("/eviction"):
            die()

    place.api.before = look
    work.during = lambda now, target: die() if (now, target.name) == (stage, machine) else None
    with pytest.raises((Killed, Exception)):
        resume(place) if resumed else roll_out(place, work)
    place.api.before = lambda *_: None
    work.during = lambda *_: None


@pytest.fixture
def two_controllers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Fleet, MemoryWork]:
    """A command that died in the preparation of w0, and one on another controller that died while it took that back.

    The first controller, whose record of w0 is older, is the one in use.
    """
    place = fleet(2)
    work = known(monkeypatch, MemoryWork(place, undoes=True, failing={"w0": "apply"}))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "first"))
    killed_in("prepare", "w0", place, work)
    bury(place)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "second"))
    killed_in("undo", "w0", place, work, resumed=True)
    bury(place)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "first"))
    work.failing.clear()
    work.done.clear()
    return place, work


def test_the_later_of_two_records_counts(two_controllers: tuple[Fleet, MemoryWork]) -> None:
    place, work = two_controllers
    found = status.read(place, lambda *_: None)
    assert {name: (each.stage, each.applied) for name, each in found.machines.items()} == {"w0": (Stage.UNDO, True)}
    assert outcomes(resume(place))["w0"] is RolloutOutcome.UNDONE
    assert work.stages("w0") == ["undo"], "what was being taken back is not applied again"
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    clean(place)


def test_a_record_of_work_that_ended_on_another_controller_is_not_resumed(
    two_controllers: tuple[Fleet, MemoryWork], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is taken back on a node that is in use."""
    place, work = two_controllers
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "third"))
    assert outcomes(resume(place))["w0"] is RolloutOutcome.UNDONE
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "second"))
    work.done.clear()
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    assert work.stages("w0") == ["prepare", "apply", "verify"]
    clean(place)


def test_a_machine_whose_lock_is_held_when_it_is_resumed_waits(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own mark does not make it a machine of another roll-out, and its cordon is not forgotten."""
    place = fleet(3)
    work = known(monkeypatch, MemoryWork(place))
    killed_in("apply", "w1", place, work)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    far(place, 600)
    result = resume(place)
    assert outcomes(result) == {"w0": RolloutOutcome.DONE, "w1": None, "w2": None}
    assert "bob" in result.stopped
    assert not result.finished
    assert place.api.leases[LEASE]["metadata"]["annotations"][RECORD]
    far(place, 0)
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    clean(place)


@pytest.mark.parametrize("stage", ["prepare", "apply"])
def test_a_machine_is_resumed_when_its_lock_expires(stage: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(3)
    work = known(monkeypatch, MemoryWork(place))
    killed_in(stage, "w1", place, work)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    made = context.TimeLimits
    monkeypatch.setattr(context, "TimeLimits", lambda **given: dataclasses.replace(made(**given), patience=20))
    far(place, 0.3)
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    assert work.stages("w1")[-3:] == ["prepare", "apply", "verify"]
    clean(place)


def test_a_machine_that_cannot_be_resumed_stays_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command of this user has it, such as `gpunodes power`."""
    place = fleet(2)
    work = known(monkeypatch, MemoryWork(place, failing={"w0": "apply"}))
    roll_out(place, work)
    work.failing.clear()
    with records.claimed("w0", "test"):
        result = resume(place)
    assert outcomes(result) == {"w0": None, "w1": None}
    assert "works on w0" in result.stopped
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    clean(place)


def test_killed_in_the_drain_a_node_that_never_drains_is_given_back(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mark does not say that the work was begun."""
    place = fleet(2)
    place.api.add_pod("train", "w0")
    work = known(monkeypatch, MemoryWork(place))
    killed_in("drain", "w0", place, work)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    bury(place)
    place.api.budgeted.add("train")
    assert outcomes(resume(place)) == {"w0": RolloutOutcome.NOT_DRAINED, "w1": RolloutOutcome.DONE}
    assert work.stages("w0") == ["prepare", "prepare"]
    clean(place)


def test_killed_in_the_drain_a_node_that_cannot_be_prepared_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(2)
    place.api.add_pod("train", "w0")
    work = known(monkeypatch, MemoryWork(place))
    killed_in("drain", "w0", place, work)
    bury(place)
    work.failing = {"w0": "prepare"}
    assert outcomes(resume(place)) == {"w0": RolloutOutcome.FAILED, "w1": None}
    assert not place.api.nodes["w0"]["spec"].get("unschedulable")
    assert place.api.nodes["w0"]["metadata"]["annotations"] == {}


def test_killed_in_the_drain_a_node_that_a_user_cordoned_then_keeps_that_cordon_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = fleet(1)
    place.api.add_pod("train", "w0")
    work = known(monkeypatch, MemoryWork(place))
    killed_in("drain", "w0", place, work)
    bury(place)
    place.cordon("w0")
    assert outcomes(resume(place)) == {"w0": RolloutOutcome.SKIPPED}
    assert place.api.nodes["w0"]["spec"]["unschedulable"]
    assert place.api.nodes["w0"]["metadata"]["annotations"] == {}
    assert place.api.leases == {}


@pytest.mark.parametrize("stage", ["prepare", "apply"])
def test_a_machine_in_maintenance_waits_until_that_ends(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person may have it open: nothing is done on it, and it stays cordoned."""
    place = fleet(2)
    work = known(monkeypatch, MemoryWork(place))
    killed_in(stage, "w0", place, work)
    bury(place)
    work.done.clear()
    cluster = Cluster(place.session())
    cluster.begin_maintenance("w0", Maintenance("new GPU"), cordon=True)
    result = resume(place)
    assert outcomes(result) == {"w0": None, "w1": None}
    assert work.done == []
    assert {each.machine: each.why for each in result.machines}["w0"] == "it is in maintenance: new GPU"
    assert place.api.nodes["w0"]["spec"]["unschedulable"]
    cluster.end_maintenance("w0")
    assert place.api.nodes["w0"]["spec"]["unschedulable"], "until the roll-out ends"
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    clean(place)


def test_maintenance_that_begins_when_a_machine_is_locked_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(1)
    work = known(monkeypatch, MemoryWork(place, failing={"w0": "apply"}))
    roll_out(place, work)
    work.failing.clear()
    work.done.clear()
    node = place.api.nodes["w0"]

    def before(method: str, path: str) -> None:
        if method in {"PATCH", "PUT"} and path.endswith("/gpunodes-machine-w0"):
            node["metadata"]["annotations"]["gpunodes.dev/maintenance"] = "new GPU"

    place.api.before = before
    result = resume(place)
    assert [each.why for each in result.machines] == ["it is in maintenance: new GPU"]
    assert work.stages("w0") == []


@pytest.mark.parametrize("protected", [False, True], ids=["drains", "never drains"])
def test_what_is_taken_back_after_an_uncordon_is_cordoned_and_drained_again(
    protected: bool, two_controllers: tuple[Fleet, MemoryWork]
) -> None:
    """`kubectl uncordon` leaves the mark, and pods return."""
    place, work = two_controllers
    place.uncordon("w0")
    place.api.add_pod("train", "w0")
    place.api.budgeted |= {"train"} if protected else set()
    seen = []
    work.during = lambda stage, _: seen.append((stage, {*place.api.pods}, place.api.nodes["w0"]["spec"].copy()))
    result = resume(place)
    if protected:
        assert outcomes(result)["w0"] is RolloutOutcome.FAILED
        assert "these pods cannot be evicted: default/train" in result.stopped
        assert "train" in place.api.pods
        assert seen == []
    else:
        assert outcomes(result)["w0"] is RolloutOutcome.UNDONE
        assert seen == [("undo", set(), {"unschedulable": True})]


def test_what_others_cordoned_again_is_not_taken_back(two_controllers: tuple[Fleet, MemoryWork]) -> None:
    place, work = two_controllers
    place.cordon("w0")
    assert outcomes(resume(place))["w0"] is RolloutOutcome.FAILED
    assert work.done == []


@pytest.mark.parametrize("stops_api", [True, False])
def test_only_the_work_on_an_only_control_plane_is_taken_back_without_an_api(stops_api: bool) -> None:
    """Its API may be down because of what is taken back; of any other machine nobody knows which pods run there."""
    place = fleet(1)
    record = RolloutRecord("id", "memory", "w0", "test", "w0", Disruption.NODE, 1.0, Stage.UNDO, undoes=True)
    with context.opened(place, "test", lambda *_: None) as opened:
        place.api.down = True
        command = dataclasses.replace(opened, cluster=Cluster(place.session(), patience_s=0))
        target = Target(place.all_machines()[0], None)
        tools = stages.Tools(command, MemoryWork(place), target, MachineLock(None, stops_api=stops_api))
        with contextlib.nullcontext() if stops_api else pytest.raises(NoResponse):
            assert stages._not_emptied(tools, record) == ""


def test_what_fails_while_the_control_plane_is_gone_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's network may have failed: the work was to be taken back, although nothing was wrong with it."""
    place = fleet(1)
    work = known(monkeypatch, MemoryWork(place, undoes=True))
    monkeypatch.setattr(Leases.__init__, "__defaults__", (1.0,))
    monkeypatch.setattr(repair_context, "Cluster", functools.partial(Cluster, patience_s=0.1))
    given = place.settings()
    monkeypatch.setattr(place, "settings", lambda: {**given, "gpunodes_rollout_verify_timeout": 0})

    def gone(stage: str, _: Target) -> None:
        if stage == "verify":
            place.api.down = True
            raise GpunodesError("w0 is unreachable")

    work.during = gone
    assert outcomes(roll_out(place, work)) == {"w0": None}
    place.api.down, work.during = False, lambda stage, target: None
    time.sleep(1.2)
    assert outcomes(resume(place))["w0"] is RolloutOutcome.DONE
    assert "undo" not in work.stages("w0")


@pytest.mark.long
@pytest.mark.parametrize("protected", [False, True], ids=["drains", "never drains"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same controller", "another controller"])
def test_killed_at_every_request_and_resumed(
    elsewhere: bool, protected: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the last request was: a new command knows where it stands, and each machine ends done and given back.

    One whose pod no budget lets go is given back, too.
    """
    resumed, made = 0, context.TimeLimits
    monkeypatch.setattr(context, "TimeLimits", lambda **given: dataclasses.replace(made(**given), patience=20))
    for number in itertools.count(1):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"a{number}"))
        place = fleet(2)
        place.api.add_pod("train", "w0")
        place.api.budgeted |= {"train"} if protected else set()
        work = known(monkeypatch, MemoryWork(place))
        if not killed_at_request(place, work, number):
            break
        if elsewhere:
            monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"b{number}"))
            far(place, 0.1)
        done = RolloutOutcome.DONE
        if LEASE in place.api.leases and place.api.leases[LEASE]["metadata"]["annotations"].get(RECORD):
            result = resume(place)
            resumed += 1
        else:
            # Before the first record, or after the end: then there is nothing left to do.
            done = RolloutOutcome.UNCHANGED if "w1" in work.versions else done
            result = roll_out(place, work)
        first = RolloutOutcome.NOT_DRAINED if protected else done
        assert outcomes(result) == {"w0": first, "w1": done}, number
        assert work.versions == ({"w1": "2"} if protected else {"w0": "2", "w1": "2"})
        assert ("train" in place.api.pods) is protected
        clean(place)
    assert resumed > 20


def test_nothing_follows_a_part_that_did_not_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    place, updates = fleet(2), list[int]()
    first = known(monkeypatch, MemoryWork(place, name="first", failing={"w1": "apply"}))
    monkeypatch.setattr(following, "_LAST", {state.ADDONS: lambda _: updates.append(1)})
    result = roll_out(place, first, then=[state.Following(state.ADDONS)], canary=1)
    assert (result.exit_code, result.then) == (ExitCode.PARTLY, "")
    found = status.read(place, lambda *_: None)
    assert "then: add-ons" in views.status(found)
    assert found.rollout
    assert found.rollout.options.canary == 1
    first.failing.clear()
    assert [each.work for each in following.resume(place, lambda *_: None)] == ["first", state.ADDONS]
    assert updates == [1]
    clean(place)


def test_a_record_of_what_follows_that_cannot_be_written_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    place, updates = fleet(1), list[int]()
    first = known(monkeypatch, MemoryWork(place, name="first"))
    monkeypatch.setattr(following, "_LAST", {state.ADDONS: lambda _: updates.append(1)})
    with monkeypatch.context() as broken:
        broken.setattr(context, "new_id", lambda _: (_ for _ in ()).throw(GpunodesError("no API")))
        rollout = state.Rollout("id", "first", first.parameters, RolloutOptions(), 1.0, "ann", ["w0"])
        rollout = dataclasses.replace(rollout, then=[state.Following(state.ADDONS)])
        with context.opened(place, "test", lambda *_: None) as opened, commands.locked(opened):
            result = engine.Engine(opened, first, rollout).run()
    assert (result.exit_code, result.then) == (ExitCode.PARTLY, "")
    assert result.stopped == "what follows is not begun: no API"
    assert [each.work for each in following.resume(place, lambda *_: None)] == ["first", state.ADDONS]
    assert updates == [1]
    clean(place)


def test_the_status_says_what_follows() -> None:
    """``kubernetes`` is the work of kubelets."""
    then = [state.Following(upgrades.KUBELETS, {}, [f"w{i}" for i in range(12)]), state.Following(state.ADDONS)]
    made = state.Rollout("id", upgrades.CONTROL_PLANES, {}, RolloutOptions(), 1.0, "ann", ["cp"], then=then)
    assert state.parse(made.text()).text() == made.text()
    shown = views.status(status.RolloutStatus(made))
    assert "next: cp\nthen: kubelets of 12 machines, add-ons" in shown
    assert views.status_document(status.RolloutStatus(made))["rollout"]["then"][0]["machines"] == then[0].machines
    last = made.next("a", 2.0).next("b", 3.0)
    assert (last.work, last.then, last.options) == (state.ADDONS, [], made.options)
    assert "next: the network add-on and the device plugin" in views.status(status.RolloutStatus(last))


def test_a_record_of_an_earlier_version_has_nothing_that_follows() -> None:
    made = state.Rollout("id", "os", {}, RolloutOptions(), 1.0, "ann", ["w0"])
    document = json.loads(made.text())
    del document["then"]
    assert state.parse(json.dumps(document)).text() == made.text()
    for odd in ([{"work": "a b", "parameters": {}, "machines": []}], [{"work": "os"}], "x", [7]):
        with pytest.raises(ValueError, match="not valid"):
            state.parse(json.dumps({**document, "then": odd}))


@pytest.mark.parametrize("stage", ["prepare", "apply", "verify"])
def test_killed_in_the_middle_of_a_stage(stage: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(3)
    work = known(monkeypatch, MemoryWork(place))

    def die(now: str, target: Target) -> None:
        if now == stage and target.name == "w1":
            place.api.before = lambda *_: (_ for _ in ()).throw(Killed)
            raise Killed

    work.during = die
    with pytest.raises((Killed, Exception)):
        roll_out(place, work)
    place.api.before = lambda *_: None
    work.during = lambda *_: None
    bury(place)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    assert work.stages("w0") == ["prepare", "apply", "verify"]
    assert work.stages("w1")[-1] == "verify", "what may have been applied is verified"
    clean(place)


def test_a_record_that_outlived_the_lease_of_its_machine_begins_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command was killed after the release, and before it removed the file on this controller."""
    place = fleet(2)
    work = known(monkeypatch, MemoryWork(place))
    monkeypatch.setattr(work, "needed", lambda _: "all there is")

    def die(*_: Any) -> None:
        place.api.before = lambda *_: (_ for _ in ()).throw(Killed)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(records, "remove", die)
        with pytest.raises((Killed, Exception)):
            roll_out(place, work)
    place.api.before = lambda *_: None
    bury(place)
    assert work.stages("w0") == ["prepare", "apply", "verify"]
    assert "gpunodes-machine-w0" not in place.api.leases
    assert [*records.read_kind("test", records.ROLLOUTS, recording.parse)] == ["w0"]
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    assert work.stages("w0") == ["prepare", "apply", "verify"]
    clean(place)


def test_an_interrupted_command_leaves_a_roll_out_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(3)
    work = known(monkeypatch, MemoryWork(place))
    reap = running.Running.reap

    def interrupt(*_: Any) -> Any:
        monkeypatch.setattr(running.Running, "reap", reap)
        raise KeyboardInterrupt

    monkeypatch.setattr(running.Running, "reap", interrupt)
    result = roll_out(place, work)
    assert (result.exit_code, result.finished) == (ExitCode.INTERRUPTED, False)
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    clean(place)


def test_a_command_that_is_interrupted_before_it_begins_leaves_nothing_to_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, lines = fleet(2), list[str]()
    work = known(monkeypatch, MemoryWork(place))

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Reading, "needed", interrupt)
        result = roll_out(place, work, report=lambda _, text: lines.append(text))
    assert (result.exit_code, result.finished) == (ExitCode.INTERRUPTED, True)
    assert lines[-1] == "nothing was begun; run the same command again"
    assert "resume" not in views.summary(result)
    clean(place)
    roll_out(place, MemoryWork(place, failing={"w0": "apply"}))
    with monkeypatch.context() as patched:
        patched.setattr(Reading, "needed", interrupt)
        result = resume(place)
    assert (result.exit_code, result.finished) == (ExitCode.INTERRUPTED, False)


def test_a_resumed_roll_out_keeps_its_options_and_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(6)
    work = known(monkeypatch, MemoryWork(place, failing={"w1": "apply"}))
    roll_out(place, work, max_unavailable=Budget(2), canary=1)
    work.failing.clear()
    most = []

    def during(*_: Any) -> None:
        time.sleep(0.2)  # the second machine begins meanwhile
        most.append(sum(bool(node["spec"].get("unschedulable")) for node in place.api.nodes.values()))

    work.during = during
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    assert max(most) == 2


def test_a_deleted_lease_is_found_by_the_marks_of_the_node(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(2)
    work = known(monkeypatch, MemoryWork(place, failing={"w0": "apply"}))
    roll_out(place, work)
    del place.api.leases["gpunodes-machine-w0"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    work.failing.clear()
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    clean(place)


def test_nothing_to_resume_is_one_sentence() -> None:
    with pytest.raises(WrongInput, match="no roll-out is unfinished"):
        resume(fleet(1))


def test_an_unknown_work_is_refused_before_any_change() -> None:
    place = fleet(2)
    roll_out(place, MemoryWork(place, failing={"w0": "apply"}))
    before = copy.deepcopy(place.api.nodes)
    with pytest.raises(WrongInput, match="'memory', which this gpunodes does not know"):
        resume(place)
    assert place.api.nodes == before
    assert LEASE in place.api.leases


# Status


def test_the_status_comes_from_the_cluster_alone(tmp_path: Any) -> None:
    place = fleet(3)
    work = MemoryWork(place)
    seen = []

    def look(stage: str, target: Target) -> None:
        if (stage, target.name) == ("apply", "w1"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
                seen.append(status.read(place, lambda *_: None))

    work.during = look
    roll_out(place, work)
    (found,) = seen
    assert "`gpunodes test` of" in found.holder
    document = views.status_document(found)["rollout"]
    assert (document["done"], document["waiting"]) == (["w0"], ["w2"])
    assert document["machines"] == [{"name": "w1", "state": "running", "stage": "apply", "why": ""}]
    assert document["next"] == "w2"
    shown = views.status(found)
    assert "done: 1 of 3" in shown
    assert "version 2" in shown
    assert views.status(status.read(place, lambda *_: None)) == "no roll-out is unfinished"


# Abandon


def test_abandon_gives_healthy_nodes_back_and_forgets() -> None:
    place = fleet(3)
    roll_out(place, MemoryWork(place, failing={"w0": "apply"}))
    result = abandon.abandon(place, lambda *_: None)
    assert [each.machine for each in result.machines] == ["w0"]
    clean(place)
    with pytest.raises(WrongInput, match="no roll-out is unfinished"):
        abandon.abandon(place, lambda *_: None)


def test_abandon_marks_a_node_that_is_not_healthy() -> None:
    place = fleet(2)
    roll_out(place, MemoryWork(place, failing={"w0": "apply"}))
    place.api.nodes["w0"]["status"]["conditions"][0]["status"] = "False"
    result = abandon.abandon(place, lambda *_: None)
    assert result.exit_code is ExitCode.PARTLY
    node = place.api.nodes["w0"]
    assert node["spec"]["unschedulable"]
    assert "its kubelet is not ready" in node["metadata"]["annotations"]["gpunodes.dev/needs-repair"]
    assert not {name for name in node["metadata"]["annotations"] if "rollout" in name}
    assert place.api.leases == {}


@pytest.mark.parametrize("by_others", [False, True])
def test_the_cordon_of_an_abandoned_roll_out_is_lifted_when_the_node_is_cleared(by_others: bool) -> None:
    place = fleet(2)
    roll_out(place, MemoryWork(place, failing={"w0": "apply"}))
    if by_others:
        place.uncordon("w0")
        place.cordon("w0")
    place.api.nodes["w0"]["status"]["conditions"][0]["status"] = "False"
    abandon.abandon(place, lambda *_: None)
    place.api.nodes["w0"]["status"]["conditions"][0]["status"] = "True"
    done = power.clear(place, place.all_machines()[0], without_cluster=False)
    assert done.schedulable is not by_others
    assert place.api.nodes["w0"]["metadata"]["annotations"] == {}


def without_plugin(place: Fleet, name: str) -> dict[str, Any]:
    """A node from which a command that was killed took the device plugin: it offers no GPUs."""
    node = place.api.nodes[name]
    node["metadata"]["labels"] |= {"gpunodes.dev/gpu-count": "8", "gpunodes.dev/pool": "a"}
    node["metadata"]["annotations"][pools.MANAGED] = '{"labels": ["gpunodes.dev/pool"], "taints": ["a:NoSchedule"]}'
    node["status"]["allocatable"] = {"nvidia.com/gpu": "0"}
    return node


def plugin_returns(place: Fleet, name: str, after: int = 3) -> None:
    """The device plugin offers the GPUs some requests after its label is back."""
    node, seen = place.api.nodes[name], []

    def look(*_: str) -> None:
        if devices.PLUGIN in node["metadata"]["labels"]:
            seen.append(1)
        if len(seen) >= after:
            node["status"]["allocatable"] = {"nvidia.com/gpu": "8"}

    place.api.before = look


def test_abandon_brings_the_device_plugin_back_before_it_judges() -> None:
    place = fleet(2)
    roll_out(place, MemoryWork(place, failing={"w0": "apply"}))
    node = without_plugin(place, "w0")
    plugin_returns(place, "w0")
    result = abandon.abandon(place, lambda *_: None)
    assert [each.why for each in result.machines] == ["its node was given back"]
    assert node["metadata"]["labels"]["gpunodes.dev/gpu"] == "true"
    assert pools.managed(node)["labels"].keys() == {"gpunodes.dev/gpu", "gpunodes.dev/pool"}
    assert json.loads(node["metadata"]["annotations"][pools.MANAGED])["taints"] == ["a:NoSchedule"]
    assert not node["spec"]["unschedulable"]


def test_abandon_waits_for_the_device_plugin_only_so_long() -> None:
    place = fleet(2)
    roll_out(place, MemoryWork(place, failing={"w0": "apply"}))
    node = without_plugin(place, "w0")
    assert abandon.abandon(place, lambda *_: None).exit_code is ExitCode.PARTLY
    assert node["metadata"]["labels"]["gpunodes.dev/gpu"] == "true", "a repair verifies it"
    assert "gpunodes.dev/needs-repair" in node["metadata"]["annotations"]


def test_the_next_roll_out_brings_the_device_plugin_back() -> None:
    place = fleet(1)
    node = without_plugin(place, "w0")
    plugin_returns(place, "w0")
    assert outcomes(roll_out(place, MemoryWork(place))) == {"w0": RolloutOutcome.DONE}
    assert node["metadata"]["labels"]["gpunodes.dev/gpu"] == "true"


def test_abandon_needs_no_valid_record() -> None:
    place = fleet(2)
    roll_out(place, MemoryWork(place, failing={"w0": "apply"}))
    for lease in place.api.leases.values():
        lease["metadata"]["annotations"][RECORD] = "{"
    assert "not valid" in status.read(place, lambda *_: None).problem
    abandon.abandon(place, lambda *_: None)
    assert place.api.leases == {}
    assert not place.api.nodes["w0"]["spec"]["unschedulable"]


def test_abandon_leaves_a_running_roll_out_alone() -> None:
    place = fleet(1)
    work = MemoryWork(place)
    refused = []

    def try_it(stage: str, _target: Target) -> None:
        if stage == "apply":
            with pytest.raises(Exception, match="is locked by") as caught:
                abandon.abandon(place, lambda *_: None)
            refused.append(caught.value)

    work.during = try_it
    roll_out(place, work)
    assert refused
    clean(place)


# Hostile records


def stopped(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Fleet, MemoryWork]:
    """A roll-out that stopped at w0, with changes of its record in the cluster."""
    place = fleet(2)
    work = known(monkeypatch, MemoryWork(place, failing={"w0": "apply"}))
    roll_out(place, work)
    work.failing.clear()
    work.done.clear()
    annotations = place.api.leases[LEASE]["metadata"]["annotations"]
    annotations[RECORD] = json.dumps({**json.loads(annotations[RECORD]), **changes})
    return place, work


@pytest.mark.parametrize(
    "changes",
    [
        {"work": "../../evil"}, {"work": "{{ lookup('pipe', 'id') }}"}, {"work": ["memory"]},
        {"waiting": ["w1; reboot"]}, {"waiting": ["../x"]}, {"waiting": "w1"}, {"waiting": [1]},
        {"waiting": ["w0"], "running": ["w0"]}, {"done": ["w1"], "waiting": ["w1"]},
        {"waiting": ["not-in-the-inventory"]}, {"id": "a/b"}, {"id": ""},
        {"options": {}}, {"options": {"max_unavailable": "100000000000000%"}},
        {"options": {"max_unavailable": "1", "canary": -1, "soak_s": 0, "windows": [], "wait_for_jobs_s": 0}},
        {"options": {"max_unavailable": "1", "canary": 0, "soak_s": 1e400, "windows": [], "wait_for_jobs_s": 0}},
        {"options": {"max_unavailable": "1", "canary": 0, "soak_s": 0, "windows": ["x"], "wait_for_jobs_s": 0}},
        {"parameters": {"version": {"a": 1}}}, {"parameters": []}, {"started": "now"}, {"stopped": None},
        {"started": 1e18}, {"started": -1}, {"soak_since": 1e18},
        {"ended": {"w0": {"outcome": "rooted", "why": ""}}}, {"canaries": ["w1"]},
    ],
)  # fmt: skip
def test_a_record_of_another_shape_changes_nothing(changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place, work = stopped(monkeypatch, **changes)
    before = copy.deepcopy(place.api.nodes)
    with pytest.raises(WrongInput):
        resume(place)
    assert work.done == []
    assert place.api.nodes == before
    views.status(status.read(place, lambda *_: None))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "1" * 100000, "[" * 100000, '{"id": "x"}', "\x1b[2J", "é" * 10]
)
def test_texts_that_are_no_records(text: str) -> None:
    with pytest.raises(ValueError, match="not"):
        state.parse(text)
    with pytest.raises(ValueError, match="not a record"):
        recording.parse(text)


def test_what_a_machines_record_says_of_the_work_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot avoid the drain, nor skip the verification."""
    place, work = stopped(monkeypatch)
    place.api.add_pod("train", "w0")
    annotations = place.api.leases["gpunodes-machine-w0"]["metadata"]["annotations"]
    record = json.loads(annotations[RECORD])
    annotations[RECORD] = json.dumps(
        {**record, "disrupts": "nothing", "stage": "apply", "work": "evil", "cluster": "../../x", "undoes": True}
    )
    for path in records._folder(records.ROLLOUTS).glob("*.json"):
        path.unlink()
    place.api.nodes["w0"]["spec"]["unschedulable"] = False
    seen = []
    work.during = lambda stage, target: seen.append((stage, "train" in place.api.pods))
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    assert ("apply", True) not in seen
    clean(place)


def test_a_record_for_another_node_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    place, work = stopped(monkeypatch)
    annotations = place.api.leases["gpunodes-machine-w0"]["metadata"]["annotations"]
    annotations[RECORD] = json.dumps({**json.loads(annotations[RECORD]), "node": "w1"})
    for path in records._folder(records.ROLLOUTS).glob("*.json"):
        path.unlink()
    assert set(outcomes(resume(place)).values()) == {RolloutOutcome.DONE}
    assert work.stages("w1") == ["prepare", "apply", "verify"]
    clean(place)


def test_records_keep_their_fields() -> None:
    record = RolloutRecord(
        "id", "work", "m", "c", "n", Disruption.GPU_PODS, 1.0, Stage.VERIFY, 2.0, True, True, gpus=8,
        outcome=RolloutOutcome.FAILED, why="{{ x }}", written=3.0,
    )  # fmt: skip
    assert recording.parse(record.text()) == record
    earlier = {name: value for name, value in json.loads(record.text()).items() if name != "written"}
    assert recording.parse(json.dumps(earlier)).written == 0.0
    assert set(json.loads(record.text())) == {field.name for field in dataclasses.fields(RolloutRecord)}
    with pytest.raises(ValueError, match="not a repair record"):
        repair_record.parse(record.text())


def test_too_many_machines_for_one_record_are_refused_before_any_change() -> None:
    place = fleet(2)
    work = MemoryWork(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "MOST_BYTES", 200)
        with pytest.raises(WrongInput, match="too many for one roll-out"):
            roll_out(place, work)
    assert work.done == []
    clean(place)


def test_a_check_before_a_roll_out_finds_another_one_without_taking_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before --wake switches machines on."""
    place = fleet(3)
    work = known(monkeypatch, MemoryWork(place))
    commands.check_free(place, lambda *_: None)
    assert place.api.leases == {}
    with (
        context.opened(place, "os upgrade", lambda *_: None) as other,
        commands.locked(other),
        pytest.raises(Held, match="the roll-out of this cluster is locked by"),
    ):
        commands.check_free(place, lambda *_: None)
    assert killed_at_request(place, work, 6)
    place.api.before = lambda *_: None
    before = copy.deepcopy(place.api.leases)
    with pytest.raises(WrongInput, match="is unfinished"):
        commands.check_free(place, lambda *_: None)
    assert place.api.leases == before
