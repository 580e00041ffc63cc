"""Roll-outs on machines in memory: order, budget, failures, drains, canaries, windows, maintenance."""

from __future__ import annotations

import time
from typing import Any

import pytest
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.leases.errors import Lost
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.leases.objects import DECISION_LOCK
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.health.model import Action
from gpunodes.operations.rolling.engine import Engine
from gpunodes.operations.rolling.work import Target
from gpunodes.repair import maintenance
from gpunodes.repair.maintenance import Maintenance
from gpunodes.repair.policy import Budget
from gpunodes.rollout import times
from gpunodes.rollout.record import Disruption, RolloutOutcome
from gpunodes.rollout.result import RolloutResult
from gpunodes.rollout.times import Window

from tests import repair_fleet
from tests.repair_fleet import fleet
from tests.rollout_fleet import LEASE, MemoryWork, clean, hurry, known, outcomes, resume, roll_out

DONE, FAILED, UNDONE = RolloutOutcome.DONE, RolloutOutcome.FAILED, RolloutOutcome.UNDONE
SKIPPED, NOT_DRAINED, UNCHANGED = RolloutOutcome.SKIPPED, RolloutOutcome.NOT_DRAINED, RolloutOutcome.UNCHANGED


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path)


def cordoned(place: repair_fleet.Fleet) -> set[str]:
    return {name for name, node in place.api.nodes.items() if node["spec"].get("unschedulable")}


def test_each_machine_is_drained_and_given_back() -> None:
    place = fleet(3)
    work = MemoryWork(place)
    place.api.add_pod("train", "w1")
    seen = []
    work.during = lambda stage, target: seen.append((stage, target.name, cordoned(place), "train" in place.api.pods))
    result = roll_out(place, work)
    assert outcomes(result) == {"w0": DONE, "w1": DONE, "w2": DONE}
    assert (result.exit_code, result.finished) == (ExitCode.DONE, True)
    assert all(nodes == {name} for _, name, nodes, _ in seen), "one at a time, and only that node"
    assert ("prepare", "w1", {"w1"}, True) in seen, "fetched while its pods go on"
    assert ("apply", "w1", {"w1"}, False) in seen
    clean(place)


def test_a_second_roll_out_changes_nothing() -> None:
    place = fleet(3)
    work = MemoryWork(place)
    roll_out(place, work)
    work.done.clear()
    version, calls = place.api.version, place.api.calls
    result = roll_out(place, work)
    assert [(each.outcome, each.why) for each in result.machines] == [(UNCHANGED, "nothing to do")] * 3
    assert (result.exit_code, result.finished) == (ExitCode.DONE, True)
    assert work.done == []
    assert place.api.version - version < 10, "only the lock of the roll-out"
    assert place.api.calls - calls < 15
    clean(place)


def test_control_planes_come_first_one_by_one_and_alone() -> None:
    place = fleet(5)
    for name in ("w3", "w4"):
        place.api.nodes[name]["metadata"]["labels"]["node-role.kubernetes.io/control-plane"] = ""
    place._control_planes = ("w3", "w4")
    work = MemoryWork(place)
    seen = []
    work.during = lambda stage, target: seen.append((target.name, cordoned(place)))
    roll_out(place, work, max_unavailable=Budget(3))
    order = list(dict.fromkeys(name for name, _ in seen))
    assert order[:2] == ["w3", "w4"]
    assert all(nodes == {name} for name, nodes in seen if name in {"w3", "w4"})
    clean(place)


@pytest.mark.parametrize("status", [0, 503])
def test_a_roll_out_goes_on_after_its_only_control_plane_has_restarted(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """An API server that starts refuses requests before it serves them."""
    place = fleet(3)
    place.api.nodes["w0"]["metadata"]["labels"]["node-role.kubernetes.io/control-plane"] = ""
    place._control_planes = ("w0",)
    work, away = MemoryWork(place), list[int]()
    answer = place.api._answer

    def answered(method: str, path: str, query: Any, body: Any) -> tuple[int, Any]:
        return (status, "it starts") if away else answer(method, path, query, body)

    def restart(stage: str, target: Target) -> None:
        if (stage, target.name) == ("apply", "w0"):
            place.api.down = not status
            away.append(1)
            before = place.api.calls
            while place.api.calls < before + 3:  # the engine asks meanwhile what it may begin
                time.sleep(0.01)
            place.api.down = False
            away.clear()

    monkeypatch.setattr(place.api, "_answer", answered)
    work.during = restart
    result = roll_out(place, work)
    assert (set(outcomes(result).values()), result.stopped) == ({DONE}, "")
    clean(place)


def test_workers_wait_for_a_control_plane_that_is_skipped() -> None:
    place = fleet(3)
    place.api.nodes["w0"]["metadata"]["labels"]["node-role.kubernetes.io/control-plane"] = ""
    place.api.nodes["w0"]["metadata"]["annotations"]["gpunodes.dev/maintenance"] = "new disks"
    place._control_planes = ("w0",)
    work = MemoryWork(place)
    result = roll_out(place, work)
    assert work.done == []
    assert outcomes(result) == {"w0": SKIPPED, "w1": None, "w2": None}
    assert "new disks" in result.stopped
    assert (result.exit_code, result.finished) == (ExitCode.PARTLY, False)


@pytest.mark.parametrize("budget", [1, 2, 4])
def test_the_budget_counts_nodes_that_are_down_for_another_reason(budget: int) -> None:
    place = fleet(8)
    place.api.nodes["w7"]["status"]["conditions"][0]["status"] = "False"
    place.api.nodes["w6"]["metadata"]["annotations"]["gpunodes.dev/maintenance"] = "no cordon"
    work = MemoryWork(place)
    most = 0

    def watch(_stage: str, _target: Target) -> None:
        nonlocal most
        most = max(most, len(cordoned(place) | {"w6", "w7"}))

    work.during = watch
    result = roll_out(place, work, max_unavailable=Budget(budget))
    if budget <= 2:
        assert work.done == []
        assert "w6, w7 of pool GPU workers unavailable" in result.stopped
        assert result.exit_code is ExitCode.PARTLY
    else:
        assert most <= budget
        assert sorted(name for name, outcome in outcomes(result).items() if outcome is DONE) == [
            f"w{i}" for i in range(6)
        ]
        assert outcomes(result)["w6"] is outcomes(result)["w7"] is SKIPPED


def test_a_failure_stops_and_keeps_the_node_cordoned(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(4)
    work = known(monkeypatch, MemoryWork(place, failing={"w1": "apply"}))
    result = roll_out(place, work)
    assert outcomes(result) == {"w0": DONE, "w1": FAILED, "w2": None, "w3": None}
    assert "apply of w1 fails" in result.stopped
    assert cordoned(place) == {"w1"}
    assert work.stages("w2") == []
    work.failing.clear()
    assert set(outcomes(resume(place)).values()) == {DONE}
    assert work.stages("w0") == ["prepare", "apply", "verify"], "what is done is not done again"
    clean(place)


def test_a_failed_verification_is_taken_back_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(3)
    work = known(monkeypatch, MemoryWork(place, undoes=True, failing={"w0": "verify"}))
    result = roll_out(place, work)
    assert outcomes(result) == {"w0": UNDONE, "w1": None, "w2": None}
    assert work.versions["w0"] == "1"
    assert work.stages("w0")[:2] == ["prepare", "apply"]
    assert work.stages("w0")[-1] == "undo"
    assert cordoned(place) == set(), "it was given back"
    assert list(place.api.leases) == [LEASE], "the roll-out stays, to be resumed or abandoned"


def test_a_failed_undo_keeps_the_node() -> None:
    place = fleet(2)
    result = roll_out(place, MemoryWork(place, undoes=True, failing={"w0": "apply undo"}))
    assert outcomes(result)["w0"] is FAILED
    assert cordoned(place) == {"w0"}


def test_a_node_that_does_not_come_back_fails() -> None:
    place = fleet(2)
    work = MemoryWork(place)

    def lose_gpus(stage: str, target: Target) -> None:
        if stage == "apply":
            place.api.nodes[target.name]["status"]["allocatable"]["nvidia.com/gpu"] = "7"

    work.during = lose_gpus
    result = roll_out(place, work)
    assert outcomes(result) == {"w0": FAILED, "w1": None}
    assert "7 of 8 GPUs" in result.stopped


def test_a_failed_preparation_gives_the_node_back_untouched() -> None:
    place = fleet(2)
    place.api.add_pod("train", "w0")
    result = roll_out(place, MemoryWork(place, failing={"w0": "prepare"}))
    assert outcomes(result) == {"w0": FAILED, "w1": None}
    assert "train" in place.api.pods
    assert cordoned(place) == set()


def test_a_refused_drain_gives_the_node_back_and_the_others_go_on() -> None:
    place = fleet(3)
    place.api.add_pod("guarded", "w1")
    place.api.budgeted.add("guarded")
    work = MemoryWork(place)
    result = roll_out(place, work)
    assert outcomes(result) == {"w0": DONE, "w1": NOT_DRAINED, "w2": DONE}
    assert (result.exit_code, result.finished) == (ExitCode.PARTLY, True)
    assert "apply" not in work.stages("w1")
    clean(place)


def test_pods_that_nothing_would_start_elsewhere_are_not_lost() -> None:
    place = fleet(1)
    place.api.add_pod("notebook", "w0", owner="")
    place.api.add_pod("train", "w0", owner="Job")
    result = roll_out(place, MemoryWork(place), wait_for_jobs_s=30.0)
    assert outcomes(result) == {"w0": NOT_DRAINED}
    assert "notebook" in result.machines[0].why
    assert {*place.api.pods} == {"notebook", "train"}, "nothing is evicted in vain, and no Job is waited for"
    clean(place)


def test_a_pod_that_ends_already_keeps_no_other_on_the_node() -> None:
    place = fleet(1)
    place.api.add_pod("notebook", "w0", owner="")
    place.api.pods["notebook"]["metadata"]["deletionTimestamp"] = "now"
    place.api.add_pod("train", "w0")

    def before(_: str, path: str) -> None:
        if path.endswith("/eviction"):
            place.api.pods.pop("notebook", None)

    place.api.before = before
    assert outcomes(roll_out(place, MemoryWork(place))) == {"w0": DONE}
    assert place.api.pods == {}
    clean(place)


def test_only_pods_with_gpus_leave_for_a_work_on_gpus() -> None:
    place = fleet(1)
    for name, limits in (("train", {"nvidia.com/gpu": "1"}), ("web", {"cpu": "1"})):
        place.api.add_pod(name, "w0")
        place.api.pods[name]["spec"]["containers"] = [{"resources": {"limits": limits}}]
    place.api.add_pod("claims", "w0")
    place.api.pods["claims"]["spec"]["resourceClaims"] = [{"name": "gpu"}]
    roll_out(place, MemoryWork(place, disrupts=Disruption.GPU_PODS))
    assert set(place.api.pods) == {"web"}
    clean(place)


def test_a_work_that_disrupts_nothing_neither_cordons_nor_drains() -> None:
    place = fleet(2)
    place.api.add_pod("train", "w0")
    work = MemoryWork(place, disrupts=Disruption.NOTHING)
    seen: set[str] = set()
    work.during = lambda stage, target: seen.update(cordoned(place))
    assert set(outcomes(roll_out(place, work)).values()) == {DONE}
    assert (seen, set(place.api.pods)) == (set(), {"train"})
    clean(place)


def test_jobs_may_end_first() -> None:
    place = fleet(1)
    place.api.add_pod("train", "w0", owner="Job")
    looked = []

    def before(_method: str, path: str) -> None:
        if path.startswith("/api/v1/pods"):
            looked.append(path)
            if len(looked) == 3:
                place.api.pods["train"]["status"]["phase"] = "Succeeded"
        assert not path.endswith("/eviction"), "it ended by itself"

    place.api.before = before
    assert outcomes(roll_out(place, MemoryWork(place), wait_for_jobs_s=30.0)) == {"w0": DONE}
    clean(place)


def test_machines_in_maintenance_cordoned_or_sick_are_skipped_and_reported() -> None:
    place = fleet(6, ["w3"], action=Action.REBOOT)
    place.api.nodes["w1"]["metadata"]["annotations"]["gpunodes.dev/maintenance"] = "new GPU"
    place.cordon("w2")
    work = MemoryWork(place)
    result = roll_out(place, work, max_unavailable=Budget(4))
    assert outcomes(result) == {"w0": DONE, "w1": SKIPPED, "w2": SKIPPED, "w3": SKIPPED, "w4": DONE, "w5": DONE}
    why = {each.machine: each.why for each in result.machines}
    assert "new GPU" in why["w1"]
    assert "cordoned" in why["w2"]
    assert "not healthy" in why["w3"]
    assert result.exit_code is ExitCode.PARTLY
    assert cordoned(place) == {"w2"}, "the cordon of a user stays"


def test_a_cordon_that_a_user_made_later_is_not_that_of_the_roll_out() -> None:
    """`kubectl uncordon` leaves the marks of an unfinished roll-out: it neither works under the user nor uncordons."""
    place = fleet(3)
    annotations = place.api.nodes["w0"]["metadata"]["annotations"]
    annotations |= {"gpunodes.dev/rollout": "r", "gpunodes.dev/rollout-cordon": "true"}
    place.cordon("w0")
    cluster = Cluster(place.session())
    assert not cluster.begin_rollout("w0", "r", cordon=True)
    cluster.end_rollout("w0", "r", time.time())
    assert cordoned(place) == {"w0"}


@pytest.mark.parametrize("expired", [True, False])
def test_maintenance_keeps_a_finished_node_cordoned_only_while_it_holds(expired: bool) -> None:
    """One that expired long ago was never ended by `maintenance off`."""
    place = fleet(1)
    annotations = place.api.nodes["w0"]["metadata"]["annotations"]
    made = Maintenance("disk", until=1.0 if expired else None)
    if expired:
        annotations["gpunodes.dev/maintenance"] = made.text()
    work = MemoryWork(place)

    def during(stage: str, _: Target) -> None:
        if stage == "apply":
            annotations.setdefault("gpunodes.dev/maintenance", made.text())

    work.during = during
    assert outcomes(roll_out(place, work)) == {"w0": DONE}
    assert cordoned(place) == (set() if expired else {"w0"})
    kept = maintenance.parse(annotations["gpunodes.dev/maintenance"])
    assert kept
    assert kept.cordoned is not expired


def test_a_cordon_in_the_last_moment_is_respected() -> None:
    place = fleet(1)

    def before(method: str, _path: str) -> None:
        if method == "PATCH":
            place.api.before = lambda *_: None
            place.cordon("w0")

    place.api.before = before
    work = MemoryWork(place)
    assert outcomes(roll_out(place, work)) == {"w0": SKIPPED}
    assert work.done == []
    assert cordoned(place) == {"w0"}


# Canaries and windows


def test_a_failed_canary_stops_before_the_others() -> None:
    place = fleet(6)
    work = MemoryWork(place, failing={"w0": "verify"})
    result = roll_out(place, work, max_unavailable=Budget(4), canary=1)
    assert {name for name, _ in work.done} == {"w0"}
    assert outcomes(result)["w0"] is FAILED


def test_canaries_soak_before_the_others() -> None:
    place = fleet(6)
    work = MemoryWork(place)
    moments: dict[str, float] = {}
    work.during = lambda stage, target: moments.__setitem__(f"{target.name} {stage}", time.monotonic())
    result = roll_out(place, work, max_unavailable=Budget(4), canary=2, soak_s=0.5)
    assert set(outcomes(result).values()) == {DONE}
    first = next(name for name, _ in work.done if name not in {"w0", "w1"})
    assert moments[f"{first} prepare"] - max(moments["w0 verify"], moments["w1 verify"]) > 0.4
    clean(place)


def test_a_canary_that_gets_sick_while_it_soaks_stops_the_roll_out(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(4)
    work = known(monkeypatch, MemoryWork(place))

    def sicken(stage: str, target: Target) -> None:
        if stage == "verify":
            place.machines[target.name].after = None

    work.during = sicken
    scan = place.scan

    def scanned(machines: Any, *, full: bool = True) -> Any:
        if full and work.done:
            place.machines["w0"].sick = True
        return scan(machines, full=full)

    monkeypatch.setattr(place, "scan", scanned)
    result = roll_out(place, work, canary=1, soak_s=0.1)
    assert outcomes(result) == {"w0": DONE, "w1": None, "w2": None, "w3": None}
    assert "the canaries did not stay healthy: w0" in result.stopped
    monkeypatch.setattr(place, "scan", scan)
    place.machines["w0"].sick = False
    assert set(outcomes(resume(place)).values()) == {DONE}


def test_no_machine_is_begun_outside_of_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(2)
    work = MemoryWork(place)
    asked = []

    def is_open(*_: Any) -> bool:
        asked.append(len(work.done))
        return len(asked) > 3

    monkeypatch.setattr(times, "is_open", is_open)
    assert set(outcomes(roll_out(place, work, windows=(Window(0, 1),))).values()) == {DONE}
    assert asked[:4] == [0, 0, 0, 0]


# Two commands


def test_two_roll_outs_at_once_are_refused() -> None:
    place = fleet(2)
    work = MemoryWork(place)
    refused: list[str] = []

    def second(stage: str, _target: Target) -> None:
        if stage == "apply" and not refused:
            with pytest.raises(Exception, match="is locked by") as caught:
                roll_out(place, MemoryWork(place))
            refused.append(str(caught.value))

    work.during = second
    assert set(outcomes(roll_out(place, work)).values()) == {DONE}
    assert "the roll-out of this cluster" in refused[0]


def test_an_unfinished_roll_out_is_resumed_or_abandoned_first(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(2)
    known(monkeypatch, MemoryWork(place, failing={"w0": "apply"}))
    roll_out(place, MemoryWork(place, failing={"w0": "apply"}))
    held = {name: lease["metadata"]["annotations"] for name, lease in place.api.leases.items()}
    with pytest.raises(WrongInput, match="is unfinished") as caught:
        roll_out(place, MemoryWork(place))
    assert "rollout abandon" in str(caught.value)
    assert held == {name: lease["metadata"]["annotations"] for name, lease in place.api.leases.items()}


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_machine_that_ended_before_a_kill_is_not_begun_again(
    ends_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command was killed before it noted that: not every work sees on the machine that there is nothing to do."""
    place = fleet(2)
    work = known(monkeypatch, MemoryWork(place, failing={} if ends_well else {"w0": "prepare"}))
    monkeypatch.setattr(work, "needed", lambda _: "all there is")

    def killed(*_: Any) -> None:
        raise SystemExit

    take = Engine._take
    monkeypatch.setattr(Engine, "_take", killed)
    with pytest.raises(SystemExit):
        roll_out(place, work)
    monkeypatch.setattr(Engine, "_take", take)
    first = work.stages("w0")
    work.failing = {}
    result = resume(place)
    assert set(outcomes(result).values()) <= {DONE, UNCHANGED}
    assert (work.stages("w0") == first) is ends_well


def test_a_repair_stays_away_from_a_machine_of_an_unfinished_roll_out() -> None:
    place = fleet(4)
    roll_out(place, MemoryWork(place, failing={"w0": "apply"}))
    place.machines["w0"].sick = True
    result = repair_fleet.run(place, named=frozenset({"w0"}))
    (why,) = [each.why for each in result.machines if each.machine == "w0"]
    assert "rollout resume" in why
    assert place.machines["w0"].done == []


def test_a_roll_out_waits_for_a_repair_and_counts_it() -> None:
    place = fleet(3, ["w0"])
    work = MemoryWork(place)
    inside: list[RolloutResult] = []
    use = repair_fleet.Machine.use

    def during_repair(self: repair_fleet.Machine, step: str) -> None:
        if not inside:
            inside.append(roll_out(place, work, ["w1"]))
        use(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repair_fleet.Machine, "use", during_repair)
        repair_fleet.run(place)
    assert outcomes(inside[0]) == {"w1": None}
    assert "w0 of pool GPU workers unavailable" in inside[0].stopped
    assert work.done == []


def test_a_machine_that_another_command_had_is_read_again() -> None:
    """It was sick, and could not be read, while it was being repaired."""
    place = fleet(1, ["w0"])
    work = MemoryWork(place)
    other = Leases(Cluster(place.session()), "repair")
    other.holder = "ann@desk/repair/another-boot/7/7/7"
    other.take("w0")

    def before(method: str, path: str) -> None:
        if method == "DELETE" and path.endswith(DECISION_LOCK):  # the first decision has ended
            place.api.before = lambda *_: None
            place.machines["w0"].sick = False
            other.release("w0")

    place.api.before = before
    assert outcomes(roll_out(place, work)) == {"w0": DONE}
    other.close()
    clean(place)


def test_a_lost_lock_stops_that_machine_and_the_roll_out() -> None:
    place = fleet(3)
    work = MemoryWork(place)

    def steal(stage: str, target: Target) -> None:
        if stage == "prepare":
            lease = place.api.leases[f"gpunodes-machine-{target.name}"]
            lease["spec"]["holderIdentity"] = "bob@far/repair/boot/1/1/x"
            lease["metadata"]["resourceVersion"] = "99999"

    work.during = steal
    result = roll_out(place, work)
    assert work.done == [("w0", "prepare")]
    assert outcomes(result) == {"w0": None, "w1": None, "w2": None}
    assert "taken by" in result.stopped


def test_a_decision_that_expired_before_the_lock_was_taken_begins_nothing() -> None:
    """The controller was suspended in between: another command may have used the budget."""
    place = fleet(3)
    work = MemoryWork(place)

    def before(method: str, path: str) -> None:
        if method == "POST" and path == repair_fleet.LEASES and "gpunodes-decision" in place.api.leases:
            del place.api.leases["gpunodes-decision"]

    place.api.before = before
    with pytest.raises(Lost, match="its Lease was deleted"):
        roll_out(place, work)
    assert (work.done, cordoned(place)) == ([], set())
    assert "gpunodes-machine-w0" not in place.api.leases


def test_without_an_api_nothing_begins() -> None:
    place = fleet(2)
    place.api.down = True
    work = MemoryWork(place)
    with pytest.raises(NoResponse):
        roll_out(place, work)
    assert work.done == []
