"""The way of machines through a repair: every ending, many at once, and a kill at every step."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from gpunodes.engine import history, leases, records
from gpunodes.engine.cluster import Cluster, NoResponse
from gpunodes.engine.machine_control import Boot
from gpunodes.engine.shell import Reached
from gpunodes.errors import WrongInput
from gpunodes.health import judge
from gpunodes.health.model import Action, Finding, SiteRules, State, Verdict
from gpunodes.operations import repair, repair_one
from gpunodes.repair import escalation
from gpunodes.repair import record as recording
from gpunodes.repair.policy import Budget, Decision, RepairCandidate, RepairLimits
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage

from tests import repair_fleet
from tests.repair_fleet import Fleet, fleet, hurry

Messages = list[tuple[str, str]]
LOST = Finding("xid", "", Action.REBOOT, State.SICK, evidence=("the line",))


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder of the test's own, and rungs that wait for a moment only."""
    hurry(monkeypatch, tmp_path)


def run(place: Fleet, **request: Any) -> repair.RepairResult:
    limits = request.pop("limits", RepairLimits())
    message: Messages = []
    made = repair.RepairRequest("health", limits, **request)
    return repair.run(place, place.entries, made, lambda name, text: message.append((name, text)))


def resume(place: Fleet) -> repair.RepairResult:
    return repair.resume(place, repair.RepairRequest("repair", RepairLimits()), lambda *_: None)


def of(result: repair.RepairResult) -> dict[str, RepairOutcome | None]:
    return {each.machine: each.outcome for each in result.machines}


def clean(place: Fleet) -> None:
    """Nothing of ours is left: no lock, no cordon, no mark, no record."""
    assert place.api.leases == {}
    assert records.read("test") == {}
    for node in place.api.nodes.values():
        assert not node["spec"].get("unschedulable")
        assert not node["spec"].get("taints")
        assert set(node["metadata"]["annotations"]) <= {"gpunodes.dev/repairs"}


def test_a_hung_machine_is_repaired_and_given_back() -> None:
    place = fleet(5, ["w1"])
    place.api.add_pod("job", "w1")
    place.api.add_pod("agent", "w1", owner="DaemonSet")
    result = run(place)
    assert of(result)["w1"] is RepairOutcome.REPAIRED
    assert result.exit_code == 0
    assert place.machines["w1"].done == ["reboot"]
    assert set(place.api.pods) == {"agent"}
    clean(place)
    told = [(entry.kind.value, entry.what, entry.outcome) for entry in history.read("w1")]
    assert told == [
        ("verdict", "reboot", "hung"),
        ("stage", "collect", ""),
        ("stage", "cordon", "cordoned"),
        ("stage", "drain", "drained"),
        ("step", "reboot", "succeeded"),
        ("verification", "reboot", "passed"),
        ("end", "repair", "repaired"),
    ]
    assert [event["reason"] for event in place.api.events] == ["RepairStarted", "RepairEnded"]


def test_gpus_that_the_device_plugin_let_go_before_the_repair_are_missed_after_it() -> None:
    place = fleet(5, ["w1"])
    node = place.api.nodes["w1"]
    node["metadata"]["labels"]["gpunodes.dev/gpu-count"] = "8"
    node["status"] |= {"capacity": {"nvidia.com/gpu": "7"}, "allocatable": {"nvidia.com/gpu": "7"}}
    (found,) = [each for each in run(place).machines if each.machine == "w1"]
    assert found.outcome is RepairOutcome.NEEDS_REPAIR
    assert "7 of 8 GPUs can be allocated" in found.why


def test_gpus_that_were_cut_into_slices_since_the_node_came_are_expected_as_slices() -> None:
    slices = {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "28", "nvidia.com/mig-3g.40gb": "8"}
    for allocatable, outcome in (
        (slices, RepairOutcome.REPAIRED),
        ({"nvidia.com/gpu": "8"}, RepairOutcome.NEEDS_REPAIR),
    ):
        place = fleet(5, ["w1"])
        node = place.api.nodes["w1"]
        node["metadata"]["labels"]["gpunodes.dev/gpu-count"] = "8"
        node["status"] |= {"capacity": slices, "allocatable": allocatable}
        (found,) = [each for each in run(place).machines if each.machine == "w1"]
        assert found.outcome is outcome, found.why


def test_it_climbs_until_something_helps() -> None:
    place = fleet(5, ["w1"], deaf=frozenset({"reboot", "force"}))
    result = run(place)
    assert place.machines["w1"].done == ["reboot", "force", "sysrq"]
    assert {each.machine: each.step for each in result.machines}["w1"] == "sysrq"
    clean(place)


def test_what_the_machine_climbed_by_itself_is_told_from_its_new_kernels_start() -> None:
    place = fleet(5, ["w1"])
    ordered_at = time.time() - 60
    armed = (("force", ordered_at + 15), ("sysrq", ordered_at + 23))
    record = RepairRecord("id", "w1", "test", 0.0, "", "reboot", hung=True, ordered_at=ordered_at, armed=armed)
    one = repair_one.OneRepair(record, repair_fleet.Hands(place.machines["w1"]), None)  # type: ignore[arg-type]  # it asks for none
    for uptime_s, names in ((50.0, []), (40.0, ["force"]), (30.0, ["force", "sysrq"])):
        escalated = one._performed_by_itself(record, escalation.step("reboot"), Boot(Reached.ENDED, "new", uptime_s))
        assert [step.name for step in escalated] == names
    working = dataclasses.replace(record, hung=False)
    assert not one._performed_by_itself(working, escalation.step("reboot"), Boot(Reached.ENDED, "new", 30.0))


def test_a_bmc_ends_what_nothing_else_does() -> None:
    place = fleet(5, ["w1"], deaf=frozenset({"reboot", "force", "sysrq"}))
    assert of(run(place))["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done[-1] == "bmc"
    clean(place)


def test_a_warm_reboot_that_does_not_help_is_followed_by_a_cold_one() -> None:
    place = fleet(5, ["w1"], cures=frozenset({"cold"}))
    assert of(run(place))["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done == ["reboot", "cold"]
    clean(place)


@pytest.mark.parametrize("bmc", ["good", "none", "down", "refused"])
def test_what_nothing_cures_needs_repair_until_it_is_cleared(bmc: str) -> None:
    place = fleet(5, ["w1"], cures=frozenset(), bmc=bmc)
    result = run(place)
    assert of(result)["w1"] is RepairOutcome.NEEDS_REPAIR
    assert result.exit_code == 3
    node = place.api.nodes["w1"]
    assert node["spec"]["unschedulable"]
    assert node["spec"]["taints"][0]["key"] == "gpunodes.dev/needs-repair"
    assert node["spec"]["taints"][0]["effect"] == "NoSchedule"
    assert "gpunodes.dev/needs-repair" in node["metadata"]["labels"]
    assert place.api.leases == {}
    assert place.api.events[-1]["reason"] == "NeedsRepair"
    before = list(place.machines["w1"].done)
    again = run(place)
    assert {each.machine: each.decision for each in again.machines}["w1"] is Decision.NEEDS_REPAIR
    assert place.machines["w1"].done == before


def test_a_bmc_that_lies_ends_in_needs_repair() -> None:
    place = fleet(5, ["w1"], deaf=frozenset({"reboot", "force", "sysrq"}), bmc="lies")
    result = run(place)
    assert of(result)["w1"] is RepairOutcome.NEEDS_REPAIR
    assert place.api.nodes["w1"]["spec"]["unschedulable"]


def test_without_sshd_the_bmc_is_left() -> None:
    place = fleet(5, ["w1"], sshd=False)
    assert {each.machine: each.decision for each in run(place).machines}["w1"] is Decision.REFUSE
    by_hand = run(place, limits=RepairLimits(by_hand=True), named=frozenset({"w1"}))
    assert of(by_hand)["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done == ["bmc"]
    skipped = [entry.what for entry in history.read("w1") if entry.outcome == "skipped"]
    assert skipped == ["reboot", "force", "sysrq"]


def test_a_gpu_reset_may_suffice() -> None:
    place = fleet(5, ["w1"], action=Action.RESET_GPU, hung=False, cures=frozenset({"gpu-reset"}))
    limits = RepairLimits(actions=frozenset({Action.RESET_GPU, Action.REBOOT}))
    assert of(run(place, limits=limits))["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done == ["gpu-reset"]
    assert place.machines["w1"].boot == 1
    clean(place)


def test_a_gpu_reset_names_the_gpus_that_are_to_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs on the others go on."""
    place = fleet(5, ["w1"], action=Action.RESET_GPU, hung=False, cures=frozenset({"gpu-reset"}))
    monkeypatch.setattr(repair_one, "resets", lambda *_: ("0000:17:00.0",))
    run(place, limits=RepairLimits(actions=frozenset({Action.RESET_GPU})))
    assert place.machines["w1"].reset == ["0000:17:00.0"]


@pytest.mark.parametrize(
    ("boot", "why"),
    [
        ("w1-boot-1", "it is still in the old boot"),
        ("another", "its kubelet has not reported the new boot yet"),
    ],
)
def test_what_is_in_another_boot_is_not_verified(boot: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict of well is not enough: it must be of the new boot, and the node must be in that boot."""
    place = fleet(5, ["w1"])
    verdict = repair_fleet.Machine.verdict
    monkeypatch.setattr(
        repair_fleet.Machine,
        "verdict",
        lambda machine: dataclasses.replace(verdict(machine), boot_id=boot if machine.done else machine.boot_id),
    )
    assert of(run(place))["w1"] is RepairOutcome.NEEDS_REPAIR
    assert next(each.detail for each in history.read("w1") if each.kind is history.EntryKind.VERIFICATION) == why


def test_a_gpu_that_is_missing_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it should have, whatever the verdict."""
    place = fleet(5, ["w1"])
    verdict = repair_fleet.Machine.verdict
    monkeypatch.setattr(
        repair_fleet.Machine,
        "verdict",
        lambda machine: dataclasses.replace(verdict(machine), gpus_seen=7 if machine.done else 8),
    )
    (found,) = [each for each in run(place).machines if each.machine == "w1"]
    assert (found.outcome, found.why) == (RepairOutcome.NEEDS_REPAIR, "7 of 8 GPUs are visible")


def test_what_does_not_stay_well_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must for as long as the setting says."""
    place = fleet(5, ["w1"])
    given, verdict, seen = place.settings(), repair_fleet.Machine.verdict, list[str]()

    def relapsing(machine: repair_fleet.Machine) -> Verdict:
        if machine.name == "w1" and machine.done:
            seen.append(machine.name)
            if len(seen) > 1:
                return dataclasses.replace(verdict(machine), state=State.SICK, findings=(LOST,))
        return verdict(machine)

    monkeypatch.setattr(place, "settings", lambda: {**given, "gpunodes_repair_settle": 0.1})
    monkeypatch.setattr(repair_fleet.Machine, "verdict", relapsing)
    (found,) = [each for each in run(place).machines if each.machine == "w1"]
    assert found.outcome is RepairOutcome.NEEDS_REPAIR


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("evidence_days", "soon"), ("evidence_days", -1), ("evidence_mib", 0), ("guard_repairs", "{{ 2 }}"),
        ("boot_timeout", "nan"), ("settle", [1]), ("unhealthy_percent", 0),
    ],
)  # fmt: skip
def test_a_setting_that_is_no_number_is_refused_before_anything(
    key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative number of days deleted all evidence."""
    place = fleet(5, ["w1"])
    given = place.settings()
    monkeypatch.setattr(place, "settings", lambda: {**given, f"gpunodes_repair_{key}": value})
    with pytest.raises(WrongInput, match=f"gpunodes_repair_{key} is "):
        run(place)
    assert place.machines["w1"].done == []


def test_a_gpu_reset_that_does_not_help_is_followed_by_a_reboot() -> None:
    place = fleet(5, ["w1"], action=Action.RESET_GPU, hung=False, cures=frozenset({"reboot"}))
    assert of(run(place, limits=RepairLimits(actions=frozenset({Action.RESET_GPU}))))["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done == ["gpu-reset", "reboot"]


@pytest.mark.parametrize("hung", [True, False])
def test_a_disruption_budget_is_respected(hung: bool) -> None:
    place = fleet(5, ["w1"], hung=hung)
    place.api.add_pod("database", "w1", owner="StatefulSet")
    place.api.budgeted.add("database")
    result = run(place)
    assert of(result)["w1"] is RepairOutcome.NOT_REPAIRED
    assert place.machines["w1"].done == []
    assert "default/database" in {each.machine: each.why for each in result.machines}["w1"]
    clean(place)
    forced = run(place, force_drain=True)
    assert of(forced)["w1"] is (RepairOutcome.REPAIRED if hung else RepairOutcome.NOT_REPAIRED)
    drained = [entry for entry in history.read("w1") if entry.what == "drain"][-1]
    assert "default/database" in drained.detail, "what is deleted by force is named too"


def test_a_machine_is_not_looked_at_while_its_node_comes_back() -> None:
    def scans(late: int) -> int:
        """How often machines are looked at when a node is ready at the question after the first ``late``."""
        place = fleet(5, ["w1"])
        asked = 0

        def before(method: str, path: str) -> None:
            nonlocal asked
            if place.machines["w1"].done and (method, path) == ("GET", "/api/v1/nodes/w1"):
                asked += 1
                place.api.nodes["w1"]["status"]["conditions"][0]["status"] = str(asked > late)

        place.api.before = before
        assert of(run(place))["w1"] is RepairOutcome.REPAIRED
        assert asked > late
        return place.scans

    assert scans(late=30) == scans(late=0)


def test_a_machine_whose_nvidia_smi_fails_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(5, ["w1"])
    monkeypatch.setattr(repair_fleet, "SMI", {"smi": {"status": "failed", "message": "Unknown\nError"}})
    assert of(run(place))["w1"] is RepairOutcome.NEEDS_REPAIR
    assert "nvidia-smi fails: Unknown Error" in place.api.events[-1]["message"]


XID_43 = b"[   61.000000] NVRM: Xid (PCI:0000:3b:00): 43, pid=4242, name=python3, Ch 00000010\n"
XID_79 = b"[   61.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid=0, name=, GPU has fallen off the bus.\n"
NO_FABRIC = Finding("fabric-manager", "", Action.RESTART_APP, State.SICK)


@pytest.mark.parametrize(
    ("after", "outcome"),
    [
        (judge.judge_files("w1", [[XID_43]], SiteRules()), RepairOutcome.REPAIRED),
        (judge.judge_files("w1", [[XID_79]], SiteRules(xids={79: Action.NONE})), RepairOutcome.REPAIRED),
        (judge.judge_files("w1", [[XID_79]], SiteRules()), RepairOutcome.NEEDS_REPAIR),
        (judge.judge_files("w1", [[XID_43]], SiteRules(xids={43: Action.RESTART_APP})), RepairOutcome.NEEDS_REPAIR),
        (Verdict("w1", "live", State.SICK, Action.RESTART_APP, findings=(NO_FABRIC,)), RepairOutcome.NEEDS_REPAIR),
    ],
    ids=["an application's fault", "marked harmless", "off the bus", "marked as a fault", "sick without a code"],
)
def test_the_sites_own_rules_say_what_is_well_again(after: Verdict, outcome: RepairOutcome) -> None:
    """A machine is given back exactly when its verdict is well by the site's rules, whatever codes its log has."""
    place = fleet(5, ["w1"], after=after)
    assert of(run(place))["w1"] is outcome
    assert place.machines["w1"].done == (["reboot"] if outcome is RepairOutcome.REPAIRED else ["reboot", "cold"])
    assert bool(place.api.nodes["w1"]["spec"].get("unschedulable")) is (outcome is RepairOutcome.NEEDS_REPAIR)


def test_a_pod_that_cannot_end_holds_up_only_a_node_that_works() -> None:
    place = fleet(5, ["w1"])
    place.api.add_pod("stuck", "w1")
    place.api.sticky.add("stuck")
    assert of(run(place))["w1"] is RepairOutcome.REPAIRED
    drained = next(entry for entry in history.read("w1") if entry.what == "drain")
    assert "default/stuck (it does not terminate)" in drained.detail
    works = fleet(5, ["w1"], hung=False)
    works.api.add_pod("slow", "w1")
    works.api.sticky.add("slow")
    assert of(run(works))["w1"] is RepairOutcome.NOT_REPAIRED
    clean(works)


def test_somebody_elses_cordon_stays() -> None:
    place = fleet(5, ["w1"])
    place.api.nodes["w1"]["spec"]["unschedulable"] = True
    assert of(run(place, named=frozenset({"w1"})))["w1"] is RepairOutcome.REPAIRED
    assert place.api.nodes["w1"]["spec"]["unschedulable"]
    assert place.api.leases == {}


def test_a_verdict_must_hold_twice() -> None:
    place = fleet(5, ["w1"])
    first = {entry.name: repair.MachineScan(place.machines[entry.name].verdict()) for entry in place.entries}
    place.machines["w1"].sick = False
    request = repair.RepairRequest("health", RepairLimits())
    result = repair.run(place, place.entries, request, lambda *_: None, first)
    assert {each.machine: each.decision for each in result.machines}["w1"] is Decision.NOTHING
    assert place.machines["w1"].done == []


def test_a_plan_touches_nothing() -> None:
    place = fleet(12, ["w1", "w2"])
    before = dataclasses.asdict(place.api)["nodes"]
    result = run(place, dry_run=True)
    decisions = {each.machine: (each.decision, each.step) for each in result.machines}
    assert decisions["w1"] == (Decision.REPAIR, "reboot")
    assert decisions["w2"] == (Decision.WAIT, "reboot")
    assert place.api.nodes == before
    assert place.api.leases == {}
    assert history.read() == []


def test_many_one_after_the_other_and_never_more_than_the_budget() -> None:
    names = [f"w{index}" for index in range(0, 20, 4)]
    place = fleet(20, names)
    most = 0

    def watch(*_: str) -> None:
        nonlocal most
        most = max(most, sum(bool(node["spec"].get("unschedulable")) for node in place.api.nodes.values()))

    place.api.before = watch
    result = run(place, limits=RepairLimits(max_unavailable=Budget(2)))
    assert all(of(result)[name] is RepairOutcome.REPAIRED for name in names)
    assert most == 2
    clean(place)


def test_two_commands_at_once_repair_no_machine_twice() -> None:
    place = fleet(20, ["w1", "w5", "w9"])
    results: list[repair.RepairResult] = []
    threads = [threading.Thread(target=lambda: results.append(run(place))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2, "one ended by an error"
    assert {name: machine.done for name, machine in place.machines.items() if machine.done} == {
        "w1": ["reboot"],
        "w5": ["reboot"],
        "w9": ["reboot"],
    }
    clean(place)


def test_three_of_four_sick_stops() -> None:
    place = fleet(4, ["w0", "w1", "w2"])
    result = run(place)
    assert {each.decision for each in result.machines if each.machine != "w3"} == {Decision.REFUSE}
    assert result.exit_code == 3
    clean(place)
    run(place)
    (told,) = history.read("w1")
    assert (told.kind, told.what, told.outcome) == (history.EntryKind.VERDICT, "reboot", "hung"), "once"
    assert told.detail.startswith("refuse: 3 of 4")
    assert history.read("w3") == []


def run_on(place: Fleet, *names: str, **request: Any) -> repair.MachineRepair:
    """Repair some machines of a place only; the first one's result."""
    chosen = [entry for entry in place.entries if entry.name in names]
    result = repair.run(place, chosen, repair.RepairRequest("health", RepairLimits(), **request), lambda *_: None)
    return {each.machine: each for each in result.machines}[names[0]]


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("without_cluster", [False, True])
def test_one_selected_of_three_sick_stops_as_well(ready: bool, without_cluster: bool) -> None:
    """What was selected does not shrink a pool: the others of it are looked at, or known from their nodes."""
    place = fleet(4, ["w0", "w1", "w2"])
    if not ready:
        place.machines["w1"].sick = place.machines["w2"].sick = without_cluster
        for name in ("w0", "w1", "w2"):
            place.api.nodes[name]["status"]["conditions"][0]["status"] = "Unknown"
    found = run_on(place, "w0", without_cluster=without_cluster)
    assert (found.decision, found.why[:6]) == (Decision.REFUSE, "3 of 4")
    assert not any(machine.done for machine in place.machines.values())


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("without_cluster", [False, True])
def test_cpu_nodes_do_not_thin_out_sick_gpu_nodes(labelled: bool, without_cluster: bool) -> None:
    """GPU nodes are a pool of their own: by the label gpunodes.dev/pool, or by their GPUs where none has it."""
    place = fleet(20, ["w0", "w1", "w2"])
    for name, node in list(place.api.nodes.items())[4:]:
        node["status"] |= {"capacity": {"cpu": "4"}, "allocatable": {"cpu": "4"}}
        place.machines[name].gpus = 0
    if labelled:
        for name, node in place.api.nodes.items():
            node["metadata"]["labels"]["gpunodes.dev/pool"] = "h100" if name in {"w0", "w1", "w2", "w3"} else "cpu"
    found = run_on(place, "w0", "w1", "w2", without_cluster=without_cluster)
    assert (found.decision, found.why[:6]) == (Decision.REFUSE, "3 of 4"), found.why


def test_only_the_pool_of_what_is_repaired_is_looked_at_beside_it() -> None:
    """A repair of one machine costs a look at its own pool, and none at the others'."""
    place = fleet(20, ["w0"])
    for name, node in place.api.nodes.items():
        node["metadata"]["labels"]["gpunodes.dev/pool"] = "a" if name in {"w0", "w1", "w2", "w3"} else "b"
    assert run_on(place, "w0", dry_run=True).decision is Decision.REPAIR
    assert place.scans == 1 + 1 + 3, "twice at itself, once at each of its pool"


def test_the_loop_guard_stops_the_third() -> None:
    place = fleet(5, ["w1"])
    for _ in range(2):
        place.machines["w1"].sick = True
        assert of(run(place))["w1"] is RepairOutcome.REPAIRED
        time.sleep(1)  # a node remembers its repairs by the second
    place.machines["w1"].sick = True
    remembered = history.path().read_text()
    history.path().unlink()
    plan = {each.machine: each for each in run(place, dry_run=True).machines}["w1"]
    assert plan.decision is Decision.NEEDS_REPAIR, "by its node"
    assert not place.api.nodes["w1"]["spec"].get("unschedulable"), "a plan touches nothing"
    history.path().write_text(remembered)
    found = {each.machine: each for each in run(place).machines}["w1"]
    assert (found.decision, found.outcome) == (Decision.NEEDS_REPAIR, RepairOutcome.NEEDS_REPAIR)
    assert "2 times in 24 h" in found.why
    assert place.machines["w1"].done == ["reboot", "reboot"]
    node = place.api.nodes["w1"]
    assert node["spec"]["unschedulable"]
    assert node["spec"]["taints"][0]["key"] == "gpunodes.dev/needs-repair"
    assert place.api.events[-1]["reason"] == "NeedsRepair"
    assert place.api.leases == {}


def test_without_a_cluster_only_the_machine_is_touched() -> None:
    place = fleet(5, ["w1"])
    place.api.down = True
    with pytest.raises(Exception, match="does not answer"):
        run(place)
    assert of(run(place, without_cluster=True))["w1"] is RepairOutcome.REPAIRED
    assert records.read("test") == {}


FULL = OSError(errno.ENOSPC, "No space left on device", "/var/lib/x")


def odd_hands(place: Fleet, patch: pytest.MonkeyPatch) -> None:
    machine_control = place.machine_control

    def give(machine: Any, **_: Any) -> Any:
        if machine.name == "w1":
            raise ValueError("its variables are odd")
        return machine_control(machine)

    patch.setattr(place, "machine_control", give)


def odd_boot(_: Fleet, patch: pytest.MonkeyPatch) -> None:
    boot = repair_fleet.Hands.boot

    def answer(self: repair_fleet.Hands) -> Boot:
        if self._machine.name == "w1":
            raise ValueError("could not convert string to float: 'load:'")
        return boot(self)

    patch.setattr(repair_fleet.Hands, "boot", answer)


def odd_scan(place: Fleet, patch: pytest.MonkeyPatch) -> None:
    scan = place.scan

    def answer(machines: Any, **_: Any) -> Any:
        if place.machines["w1"].done and machines[0].name == "w1":
            raise RecursionError("deep")
        return scan(machines)

    patch.setattr(place, "scan", answer)


def full_at(kind: history.EntryKind) -> Callable[[Fleet, pytest.MonkeyPatch], None]:
    def prepare(_: Fleet, patch: pytest.MonkeyPatch) -> None:
        append = history.append

        def full(entry: history.HistoryEntry) -> None:
            if entry.machine == "w1" and entry.kind is kind:
                raise FULL
            append(entry)

        patch.setattr(history, "append", full)

    return prepare


def full_record(_: Fleet, patch: pytest.MonkeyPatch) -> None:
    write = records.write

    def full(record: RepairRecord) -> None:
        if record.machine == "w1":
            raise FULL
        write(record)

    patch.setattr(records, "write", full)


def odd_report(_: Fleet, patch: pytest.MonkeyPatch) -> None:
    def odd(**values: Any) -> RepairCandidate:
        if values["name"] == "w1":
            raise KeyError("what it reported")
        return RepairCandidate(**values)

    patch.setattr("gpunodes.operations.repair.RepairCandidate", odd)


ODD = {
    "decision": (odd_report, "unexpected KeyError: 'what it reported'"),
    "machine_control": (odd_hands, "unexpected ValueError: its variables are odd"),
    "boot": (odd_boot, "unexpected ValueError: could not convert"),
    "scan": (odd_scan, "unexpected RecursionError: deep"),
    "history before": (full_at(history.EntryKind.VERDICT), "/var/lib/x: No space left on device"),
    "history after the order": (full_at(history.EntryKind.STEP), "/var/lib/x: No space left on device"),
    "history at the end": (full_at(history.EntryKind.END), "/var/lib/x: No space left on device"),
    "record": (full_record, "/var/lib/x: No space left on device"),
}


@pytest.mark.parametrize("where", list(ODD))
def test_an_odd_machine_stops_no_other(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong with one machine ends its repair with a sentence; the others are repaired all the same."""
    place = fleet(20, ["w1", "w5", "w9"])
    prepare, message = ODD[where]
    with monkeypatch.context() as patch:
        prepare(place, patch)
        # One that works still, or is not under repair, takes nothing of the budget; one that is half repaired does.
        budget = Budget(2 if where in {"boot", "scan", "history after the order"} else 1)
        results = {each.machine: each for each in run(place, limits=RepairLimits(max_unavailable=budget)).machines}
    assert results["w1"].why.startswith(message)
    assert not results["w1"].healthy
    assert [results[name].outcome for name in ("w5", "w9")] == [RepairOutcome.REPAIRED] * 2
    # Nothing stands in the way any more: the same command goes on with it.
    bury(place)
    run(place)
    assert place.machines["w1"].done == ["reboot"], "and it was asked once"
    clean(place)


def test_an_odd_machine_that_was_left_behind_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair that cannot be gone on with does not keep the next run from the others."""
    place = fleet(20, ["w1", "w5"])
    place.cordon("w1", "id-1")
    records.write(
        RepairRecord("id-1", "w1", "test", 0.0, "", "reboot", recording.Stage.ESCALATE, node="w1", step="reboot")
    )
    odd_hands(place, monkeypatch)
    results = {each.machine: each for each in run(place, limits=RepairLimits(max_unavailable=Budget(2))).machines}
    assert results["w1"].why == "unexpected ValueError: its variables are odd"
    assert results["w5"].outcome is RepairOutcome.REPAIRED


def test_a_control_plane_that_goes_away_stops_only_what_was_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is left with the reason, what was begun goes on by itself."""
    place = fleet(20, ["w1", "w5"])
    deciding = leases.Leases.deciding

    def once(self: leases.Leases) -> Any:
        if place.machines["w1"].done:
            raise NoResponse("the control plane does not answer")
        return deciding(self)

    monkeypatch.setattr(leases.Leases, "deciding", once)
    results = {each.machine: each for each in run(place).machines}
    assert results["w1"].outcome is RepairOutcome.REPAIRED
    assert (results["w5"].decision, results["w5"].why) == (Decision.REFUSE, "the control plane does not answer")
    assert place.machines["w5"].done == []
    clean(place)


ODD_RECORDS = [b"\xff", b"[" * 100_000, b'{"id": 5}', b'{"machine": []}', b'{"armed": [["a", 1' + b"0" * 400 + b"]]}"]


@pytest.mark.parametrize("text", ODD_RECORDS)
def test_a_lock_with_an_odd_record_is_a_lock_without_one(text: bytes) -> None:
    """What stands in a lock may be anything."""
    with pytest.raises(ValueError, match=r"not a repair record|JSON|Expecting|decode"):
        recording.parse(text.decode("utf-8", "replace"))


def test_a_disk_that_is_full_leaves_the_record_of_before() -> None:
    """Half a record was taken for none, and a machine that is switched off forgotten."""
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
    """kill -9, as far as a test in one process can have it: nothing of the command runs on."""


STEPS = ("collect", "cordon", "drain", "escalate", "escalate", "verify", "uncordon", "release")
GIVING_UP = (*STEPS[:6], "escalate", "escalate", "verify", "give-up", "release")


def killed(place: Fleet, monkeypatch: pytest.MonkeyPatch, at: int, late: bool) -> list[str]:
    """Run a repair that dies at its ``at``-th write, before or after it reaches the disk; the steps written."""
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
        # Nobody tidies up after kill -9; the lock's holder is dead.
        patch.setattr(repair._Repairs, "_interrupt", lambda _: None)
        with contextlib.suppress(Killed):
            run(place)
    bury(place)
    return written


def bury(place: Fleet) -> None:
    """Let the holders of all locks be dead."""
    for lease in place.api.leases.values():
        if "holderIdentity" not in lease["spec"]:
            continue  # it was let go
        parts = lease["spec"]["holderIdentity"].rsplit("/", 3)
        lease["spec"]["holderIdentity"] = "/".join([parts[0], "1", "0", parts[3]])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lost_laptop", [False, True])
@pytest.mark.parametrize("go_on", [resume, run])
@pytest.mark.parametrize("at", range(1, len(STEPS) + 1))
def test_a_kill_at_every_step_and_then_again(
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
        # Nothing was begun, or nothing of it came anywhere: a repair that is only to be begun again.
        assert at == 1
        run(place)
    assert place.machines["w1"].done == ["reboot"], "and not once more"
    clean(place)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", range(1, len(GIVING_UP) + 1))
def test_a_kill_on_the_way_to_giving_up(monkeypatch: pytest.MonkeyPatch, at: int, late: bool) -> None:
    place = fleet(5, ["w1"], cures=frozenset())
    assert killed(place, monkeypatch, at, late) == list(GIVING_UP[:at])
    run(place)
    assert place.api.leases == {}
    assert records.read("test") == {}
    assert place.api.nodes["w1"]["spec"]["taints"][0]["key"] == "gpunodes.dev/needs-repair"
    assert place.machines["w1"].done == ["reboot", "cold"]


def test_a_node_that_was_uncordoned_before_the_kill_is_not_called_somebody_else_s() -> None:
    place, message = fleet(5), list[str]()
    record = RepairRecord("r1", "w1", "test", time.time(), "sick", "reboot", node="w1", step="reboot")
    records.write(record.to(Stage.UNCORDON, outcome=RepairOutcome.REPAIRED))
    repair.resume(place, repair.RepairRequest("repair", RepairLimits()), lambda _, text: message.append(text))
    assert "uncordoned" in message


def test_a_forgotten_cordon_is_found() -> None:
    place = fleet(5)
    node = place.api.nodes["w1"]
    node["spec"]["unschedulable"] = True
    node["metadata"]["annotations"]["gpunodes.dev/cordoned-by"] = "some-repair"
    assert of(resume(place))["w1"] is RepairOutcome.REPAIRED
    clean(place)


def test_a_live_lock_of_another_is_respected() -> None:
    place = fleet(5, ["w1"])
    place.api.add_node("other")
    other = leases.Leases(Cluster(place.session()), "repair")
    other._me = "ann@desk/repair/x/1/1/1"
    other.take("w1", "")
    result = run(place)
    assert {each.machine: (each.decision, "ann@desk" in each.why) for each in result.machines}["w1"] == (
        Decision.REFUSE,
        True,
    )
    other.release("w1")
    other.close()


def test_a_record_survives_its_text() -> None:
    record = RepairRecord("id", "w1", "test", 1.0, "why", "reboot", outcome=RepairOutcome.REPAIRED, tried=("reboot",))
    assert recording.parse(record.text()) == record
    assert recording.parse(record.text()[:-1] + ', "new": 1}') == record
    for text in ("", "[]", "{}", '{"stage": "dance"}'):
        with pytest.raises(ValueError, match=r".*"):
            recording.parse(text)


def test_the_ladder_is_named_once() -> None:
    names = [step.name for step in escalation.steps()]
    assert names == ["gpu-reset", "reboot", "force", "sysrq", "bmc", "cold"]
    assert all(step.source for step in escalation.steps())
