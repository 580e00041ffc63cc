"""Repairs concurrent with users and other commands: a repair respects their changes before its next stage."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.engine import records
from gpunodes.engine.cluster import marks
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import NoResponse, Refused
from gpunodes.engine.leases.errors import Lost
from gpunodes.engine.leases.held import Leases
from gpunodes.errors import GpunodesError
from gpunodes.health.model import Action
from gpunodes.model import Machine
from gpunodes.operations import maintenance, power
from gpunodes.operations.repair import commands, context, escalating
from gpunodes.repair.escalation import EscalationStep
from gpunodes.repair.flow import StepOutcome
from gpunodes.repair.policy import Budget, Decision, RepairLimits
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage
from gpunodes.repair.request import RepairRequest
from gpunodes.repair.result import MachineRepair

from tests import repair_fleet
from tests.repair_fleet import LEASES, Fleet, fleet, hurry

ANN = "ann@desk/repair/another-boot/7/7/7"


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, locks of one second, and very short time limits."""
    hurry(monkeypatch, tmp_path)
    monkeypatch.setattr(Leases.__init__, "__defaults__", (1.0,))


def run(place: Fleet, message: list[str] | None = None, **request: Any) -> dict[str, MachineRepair]:
    made = RepairRequest("health", request.pop("limits", RepairLimits()), **request)
    messages = message if message is not None else []
    result = commands.run(place, place.all_machines(), made, lambda name, text: messages.append(f"{name}: {text}"))
    return {each.machine: each for each in result.machines}


def entry(place: Fleet, name: str) -> Machine:
    return next(each for each in place.all_machines() if each.name == name)


def kill(place: Fleet, monkeypatch: pytest.MonkeyPatch, method: str, **request: Any) -> None:
    """Run a repair that dies in a method of the machine control, and let its Lease expire."""
    repair_fleet.kill(place, monkeypatch, method, **request)
    time.sleep(1.2)


def test_a_node_cordoned_by_a_user_during_collection_is_not_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(5, ["w1"])
    place.api.add_pod("job", "w1")
    collect = repair_fleet.StandInControl.collect

    def slow(machine_control: Any, folder: Path, facts: Mapping[str, Any] | None, *, bug_report: bool) -> list[str]:
        place.cordon("w1")
        return collect(machine_control, folder, facts, bug_report=bug_report)

    monkeypatch.setattr(repair_fleet.StandInControl, "collect", slow)
    found = run(place)["w1"]
    assert found.outcome is RepairOutcome.NOT_REPAIRED
    assert "in the meantime: a user or another program cordoned it" in found.why
    assert place.machines["w1"].done == []
    assert "job" in place.api.pods
    assert place.api.leases == {}
    found = run(place, limits=RepairLimits(by_hand=True), named=frozenset({"w1"}))["w1"]
    assert found.outcome is RepairOutcome.REPAIRED, "named machines are repaired despite the cordon"


def test_a_node_cordoned_by_a_user_after_a_kill_is_not_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(5, ["w1"])
    kill(place, monkeypatch, "collect")
    place.cordon("w1")
    found = run(place)["w1"]
    assert found.decision is Decision.REFUSE
    assert "a user or another program cordoned it" in found.why
    assert place.machines["w1"].done == []


def test_maintenance_written_by_hand_during_collection_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no lock, as `gpunodes maintenance on` does."""
    place = fleet(5, ["w1"])
    place.api.add_pod("job", "w1")
    collect = repair_fleet.StandInControl.collect

    def slow(machine_control: Any, folder: Path, facts: Mapping[str, Any] | None, *, bug_report: bool) -> list[str]:
        place.api.nodes["w1"]["metadata"]["annotations"]["gpunodes.dev/maintenance"] = "ann swaps the disk"
        return collect(machine_control, folder, facts, bug_report=bug_report)

    monkeypatch.setattr(repair_fleet.StandInControl, "collect", slow)
    found = run(place, limits=RepairLimits(by_hand=True), named=frozenset({"w1"}))["w1"]
    assert found.outcome is RepairOutcome.NOT_REPAIRED
    assert "in the meantime: it is in maintenance: ann swaps the disk" in found.why
    assert place.machines["w1"].done == []
    assert "job" in place.api.pods
    assert not place.api.nodes["w1"]["spec"].get("unschedulable")
    assert place.api.leases == {}


@pytest.mark.parametrize("again", [False, True])
def test_a_node_uncordoned_by_a_user_during_the_drain_is_not_rebooted(again: bool) -> None:
    """`kubectl uncordon` takes no lock; ``again``: the user cordoned it then, to work there."""
    place, armed = fleet(5, ["w1"]), [True]
    place.api.add_pod("job", "w1")

    def before(_: str, path: str) -> None:
        if armed and path.endswith("/eviction"):
            armed.clear()
            place.uncordon("w1")
            if again:
                place.cordon("w1")

    place.api.before = before
    found = run(place)["w1"]
    assert found.outcome is RepairOutcome.NOT_REPAIRED
    assert "its node was uncordoned in the meantime" in found.why
    assert place.machines["w1"].done == []
    assert bool(place.api.nodes["w1"]["spec"].get("unschedulable")) == again
    assert "gpunodes.dev/cordoned-by" not in place.api.nodes["w1"]["metadata"]["annotations"]
    assert place.api.leases == {}


@pytest.mark.parametrize(
    ("manager", "again"), [("kubectl-cordon", True), ("gpunodes", False), ("ancient-changes", False)]
)
def test_a_cordon_whose_manager_the_api_no_longer_knows_stays_that_of_the_repair(manager: str, again: bool) -> None:
    """The API keeps ten managers of updates, and merges older ones."""
    fields: dict[str, Any] = {"f:spec": {"f:unschedulable": {}}}
    metadata = {
        "annotations": {"gpunodes.dev/cordoned-by": "r-1"},
        "managedFields": [{"manager": "kubelet"}, {"manager": manager, "fieldsV1": fields}],
    }
    node = {"metadata": metadata, "spec": {"unschedulable": True}}
    assert marks.cordoned_again(node) == again
    assert marks.cordoned_by(node) == ("" if again else "r-1")
    assert ("unschedulable" in marks.uncordon(node, "r-1", 0.0)["spec"]) != again


@pytest.mark.parametrize("error", [NoResponse("it does not respond"), Refused(500, "etcdserver: request timed out")])
@pytest.mark.parametrize("stops_api", [True, False])
def test_the_repair_of_a_control_plane_goes_on_without_its_api(error: GpunodesError, stops_api: bool) -> None:
    def node(_: str, *, wait: bool) -> None:
        assert wait is not stops_api
        raise error

    tools: Any = SimpleNamespace(
        cluster=SimpleNamespace(node=node), lock=SimpleNamespace(stops_api=stops_api), now=lambda: 0.0
    )
    record = RepairRecord("r-1", "w1", "test", 0.0, "", "reboot", node="w1", stage=Stage.ESCALATE)
    with contextlib.nullcontext() if stops_api else pytest.raises(type(error)):
        assert escalating._interrupted(tools, record) == ""


@pytest.mark.parametrize("armed", [(), (("force", 5.0),)])
def test_a_step_that_the_machine_performs_by_itself_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch, armed: tuple[tuple[str, float], ...]
) -> None:
    """Its node was uncordoned: nothing more is ordered, but what was armed happens, and is verified."""
    ended: list[str] = []
    monkeypatch.setattr(escalating, "_interrupted", lambda *_: "its node was uncordoned")
    monkeypatch.setattr(escalating, "_order", lambda _, record, __: (StepOutcome.FAILED, "", record))

    def end(_: object, record: RepairRecord, step: EscalationStep, *__: object) -> RepairRecord:
        ended.append(step.name)
        return record

    monkeypatch.setattr(escalating, "_ended", end)
    control = SimpleNamespace(boot=lambda: None)
    tools: Any = SimpleNamespace(control=control, lock=SimpleNamespace(confirm=lambda _: None))
    monkeypatch.setattr(escalating, "_rebooted", lambda *_: False)
    record = RepairRecord("r-1", "w1", "test", 0.0, "", "reboot", stage=Stage.ESCALATE, step="force", armed=armed)
    after = escalating.escalate(tools, record)
    assert (ended, after.stage) == ((["force"], Stage.ESCALATE) if armed else ([], Stage.UNDO))


@pytest.mark.parametrize("named", [False, True])
def test_a_node_cordoned_by_a_user_after_an_uncordon_is_not_rebooted(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """The annotation of the killed repair is still there; that a user named the machine was before that, too."""
    place = fleet(5, ["w1"])
    kill(place, monkeypatch, "boot", limits=RepairLimits(by_hand=named), named=frozenset({"w1"} if named else ()))
    place.uncordon("w1")
    place.cordon("w1")
    message = list[str]()
    found = run(place, message)["w1"]
    assert "its node was uncordoned in the meantime" in "".join(message)
    assert found.decision is Decision.REFUSE
    assert "a user or another program cordoned it" in found.why
    assert place.machines["w1"].done == []
    assert place.api.nodes["w1"]["spec"]["unschedulable"]
    assert "gpunodes.dev/cordoned-by" not in place.api.nodes["w1"]["metadata"]["annotations"]


def test_maintenance_that_begins_before_the_lock_counts() -> None:
    """The decision has already read the nodes."""
    place, armed = fleet(5, ["w1"]), [True]

    def before(method: str, path: str) -> None:
        if armed and method == "POST" and path == LEASES and "gpunodes-decision" in place.api.leases:
            armed.clear()
            maintenance.begin(place, [entry(place, "w1")], "ann is inside the box", None)

    place.api.before = before
    found = run(place)["w1"]
    assert "it is in maintenance: ann is inside the box" in found.why
    assert place.machines["w1"].done == []
    assert place.api.leases == {}


def test_maintenance_uses_the_control_planes_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's clock is five hours ahead."""
    place = fleet(5, ["w1"])
    maintenance.begin(place, [entry(place, "w1")], "until the evening", time.time() + 4 * 3600)
    real, request = time.time, place.api.request
    monkeypatch.setattr(time, "time", lambda: real() + 5 * 3600)
    monkeypatch.setattr(place.api, "request", lambda *a, **k: dataclasses.replace(request(*a, **k), time=real()))
    assert run(place)["w1"].decision is Decision.REFUSE
    assert place.machines["w1"].done == []
    # Maintenance that starts there is stored in the control plane's time, too.
    maintenance.begin(place, [entry(place, "w1")], "an hour", time.time() + 3600)
    (kept,) = maintenance.listed(place)
    assert kept.maintenance is not None
    assert kept.maintenance.until == pytest.approx(real() + 3600, abs=5)


def test_maintenance_of_a_node_deleted_in_the_meantime_is_an_error() -> None:
    place = fleet(3)

    def before(method: str, path: str) -> None:
        if method == "POST" and path == LEASES:
            place.api.nodes.pop("w1", None)

    place.api.before = before
    with pytest.raises(GpunodesError, match="w1 was deleted in the meantime"):
        maintenance.begin(place, [entry(place, "w1")], "x", None)


def test_a_node_that_was_cleared_by_hand_is_not_repaired_from_an_old_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair was killed and a user fixed and uncordoned the machine; the timer then rebooted it with its pods."""
    place = fleet(5, ["w1"])
    kill(place, monkeypatch, "boot")
    place.machines["w1"].sick = False
    power.clear(place, entry(place, "w1"), without_cluster=False)
    assert place.api.leases == {}
    assert records.read("test") == {}
    place.api.add_pod("job", "w1")
    assert run(place)["w1"].decision is Decision.NOTHING
    assert place.machines["w1"].done == []
    assert "job" in place.api.pods


@pytest.mark.parametrize(
    ("checks", "why"), [(1, "its machine was booted again"), (2, "its node was uncordoned in the meantime")]
)
def test_a_record_of_a_repair_that_another_command_has_ended_is_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checks: int, why: str
) -> None:
    """The lock was lost and another command repaired the machine; the next run of the first one evicted its pods."""
    place, seen = fleet(5, ["w1"]), itertools.count(1)

    def lost(_: Leases, __: str) -> None:
        """Before the cordon, or before the drain."""
        if next(seen) >= checks:
            raise Lost("taken by ann", "", "")

    with monkeypatch.context() as patch:
        patch.setattr(Leases, "check", lost)
        assert run(place)["w1"].outcome is RepairOutcome.NOT_REPAIRED
    time.sleep(1.2)
    (tmp_path / "other").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
        assert run(place)["w1"].outcome is RepairOutcome.REPAIRED
    place.api.add_pod("job", "w1")
    message: list[str] = []
    assert run(place, message)["w1"].decision is Decision.NOTHING
    assert why in "".join(message)
    assert "job" in place.api.pods
    assert records.read("test") == {}


def test_the_record_of_a_node_that_is_gone_is_dropped() -> None:
    """`gpunodes remove` deleted it; every later run failed at that machine."""
    place = fleet(5, ["w1"])
    held = Leases(Cluster(place.session()), "repair")
    fields = {"started": 1.0, "reason": "x", "action": "reboot", "step": "reboot", "boot_id": "w1-boot-1"}
    record = RepairRecord("r1", "w1", "test", stage=Stage.ESCALATE, node="w1", **fields)  # type: ignore[arg-type]  # of several types
    held.take("w1", record.text())
    held.close()
    for lease in place.api.leases.values():
        lease["spec"]["renewTime"] = "2020-01-01T00:00:00.000000Z"
    del place.api.nodes["w1"]
    message: list[str] = []
    result = commands.resume(place, RepairRequest("repair", RepairLimits()), lambda _, text: message.append(text))
    assert result.exit_code == 0
    assert message == ["its repair r1 is not resumed: its node no longer exists"]
    assert place.api.leases == {}


def test_a_repair_that_ended_with_an_error_releases_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """`repair --resume` can resume it while this command works on others."""
    place = fleet(12, ["w1", "w2"])
    boot = repair_fleet.StandInControl.boot

    def odd(machine_control: Any) -> Any:
        if machine_control._machine.name == "w1":
            raise RuntimeError("odd")
        return boot(machine_control)

    monkeypatch.setattr(repair_fleet.StandInControl, "boot", odd)
    monkeypatch.setattr(EscalationStep, "limit", lambda self, hung: 2.5)
    place.machines["w2"].deaf = frozenset({"reboot"})
    thread = threading.Thread(target=run, args=(place,), kwargs={"limits": RepairLimits(max_unavailable=Budget(2))})
    thread.start()
    time.sleep(1.5)
    anns = Leases(Cluster(place.session()), "repair")
    anns.holder = ANN
    assert "odd" not in anns.take("w1", None)
    assert records.read("test")["w1"].stage is Stage.ESCALATE
    anns.release_all()
    anns.close()
    thread.join()


def test_a_decision_that_expired_before_the_lock_was_taken_is_made_again() -> None:
    """The controller was suspended in between, and another command used the budget."""
    place, armed = fleet(5, ["w1"]), [True]

    def before(method: str, path: str) -> None:
        if armed and method == "POST" and path == LEASES and "gpunodes-decision" in place.api.leases:
            armed.clear()
            del place.api.leases["gpunodes-decision"]
            place.cordon("w2", "anns-repair")
            place.api.leases["gpunodes-machine-w2"] = {
                "metadata": {"name": "gpunodes-machine-w2", "annotations": {}, "resourceVersion": "1"},
                "spec": {"holderIdentity": ANN, "renewTime": "2099-01-01T00:00:00.000000Z", "leaseDurationSeconds": 60},
            }

    place.api.before = before
    found = run(place)["w1"]
    assert (found.decision, found.why[:2]) == (Decision.WAIT, "w2")
    assert place.machines["w1"].done == []
    assert list(place.api.leases) == ["gpunodes-machine-w2"]
    assert records.read("test") == {}


def ann_takes(place: Fleet) -> None:
    """Another command takes the lock on w1."""
    lease = place.api.leases["gpunodes-machine-w1"]
    place.api.version += 1
    lease["spec"]["holderIdentity"], lease["metadata"]["resourceVersion"] = ANN, str(place.api.version)


@pytest.mark.parametrize("step", ["bmc", "cold"])
def test_a_lock_that_is_lost_while_the_bmc_responds_stops_the_order(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The BMC is compared with the machine after the lock was confirmed: it may need longer than a lock lasts."""
    place = fleet(5, ["w1"])

    monkeypatch.setattr(repair_fleet.StandInControl, "compared", lambda _: ann_takes(place))
    found = run(place, limits=RepairLimits(by_hand=True), first=step)["w1"]
    assert found.outcome is RepairOutcome.NOT_REPAIRED
    assert "was taken by `gpunodes repair` of ann@desk" in found.why
    assert place.machines["w1"].done == []
    assert records.read("test")["w1"].stage is Stage.ESCALATE, "to resume, with the same step"


def test_a_gpu_reset_is_not_begun_if_the_lock_is_lost_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is tainted first, and the API may respond late."""
    place = fleet(5, ["w1"], action=Action.RESET_GPU, hung=False)
    taint = Cluster.taint_temporarily

    def slow(self: Cluster, name: str, repair: str) -> None:
        taint(self, name, repair)
        ann_takes(place)

    monkeypatch.setattr(Cluster, "taint_temporarily", slow)
    found = run(place, limits=RepairLimits(actions=frozenset({Action.RESET_GPU})))["w1"]
    assert "was taken by `gpunodes repair` of ann@desk" in found.why
    assert place.machines["w1"].done == []


def test_the_control_plane_is_not_repaired_together_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Lease can be renewed while it reboots, so a concurrent repair of a worker was aborted."""
    place = fleet(5, ["w0", "w1"])
    place._control_planes = ("w0",)
    use, away = repair_fleet.Machine.use, list[str]()

    def used(machine: repair_fleet.Machine, step: str) -> None:
        use(machine, step)
        if machine.name == "w0" and not away:
            away.append(step)
            place.api.down = True
            threading.Timer(1.6, lambda: setattr(place.api, "down", False)).start()

    monkeypatch.setattr(repair_fleet.Machine, "use", used)
    place.machines["w1"].deaf = frozenset({"reboot", "force", "sysrq"})
    given = place.settings()
    monkeypatch.setattr(place, "settings", lambda: {**given, "gpunodes_repair_verify_timeout": 5})
    found = run(place, limits=RepairLimits(by_hand=True), named=frozenset({"w0", "w1"}))
    assert {name: found[name].outcome for name in ("w0", "w1")} == dict.fromkeys(("w0", "w1"), RepairOutcome.REPAIRED)


def test_the_repair_of_the_control_plane_holds_the_ssh_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    place, held = fleet(3, ["w0"]), list[tuple[str, str]]()
    place._control_planes = ("w0",)
    lock = place.lock

    def noted(command: str, holder: str) -> Any:
        held.append((command, holder))
        return lock(command, holder)

    monkeypatch.setattr(place, "lock", noted)
    found = run(place, limits=RepairLimits(by_hand=True), named=frozenset({"w0"}))["w0"]
    assert found.outcome is RepairOutcome.REPAIRED
    ((command, holder),) = held
    assert command == "health"
    assert "/health/" in holder


@pytest.mark.parametrize(
    ("bmc", "network", "limit_s"),
    [("none", False, 5), ("good", True, 0)],
    ids=["the API", "the controller's network, at the time limit"],
)
def test_an_outage_during_the_verification_is_no_failure_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, bmc: str, network: bool, limit_s: int
) -> None:
    """The record had the cold cycle by the time the lock was lost, or that the machine needs manual repair."""
    place = fleet(5, ["w1"], bmc=bmc)
    machine, scan, given = place.machines["w1"], place.scan, place.settings()
    monkeypatch.setattr(place, "settings", lambda: {**given, "gpunodes_repair_verify_timeout": limit_s})
    monkeypatch.setattr(context, "Cluster", functools.partial(Cluster, patience_s=0.1))

    def gone(machines: Any, *, full: bool = True) -> Any:
        if machine.done and not place.api.down:
            place.api.down, machine.sshd = True, not network
            machine.sick = not network
        return scan(machines, full=full)

    monkeypatch.setattr(place, "scan", gone)
    assert run(place)["w1"].outcome is RepairOutcome.NOT_REPAIRED
    assert (records.read("test")["w1"].stage, machine.done) == (Stage.VERIFY, ["reboot"])
    monkeypatch.setattr(place, "scan", scan)
    place.api.down, machine.sshd, machine.sick = False, True, False
    time.sleep(1.2)
    assert run(place)["w1"].outcome is RepairOutcome.REPAIRED
    assert machine.done == ["reboot"]
