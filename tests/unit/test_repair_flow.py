"""Repairs from the first stage to the last: every outcome, many machines at once, and a kill at every stage."""

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
from gpunodes.engine import history, records
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.machine_control import Boot
from gpunodes.engine.remote.shell import Reached
from gpunodes.engine.scans import MachineScan
from gpunodes.errors import WrongInput
from gpunodes.health import judge
from gpunodes.health.model import Action, Finding, SiteRules, State, Verdict
from gpunodes.operations.repair import commands
from gpunodes.operations.repair.escalating import performed_by_itself
from gpunodes.operations.repair.running import Repairs
from gpunodes.repair import escalation, findings
from gpunodes.repair import record as recording
from gpunodes.repair.policy import Budget, Decision, RepairCandidate, RepairLimits
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage
from gpunodes.repair.request import RepairRequest
from gpunodes.repair.result import MachineRepair, RepairResult

from tests import repair_fleet
from tests.repair_fleet import Fleet, fleet, hurry

Messages = list[tuple[str, str]]
LOST = Finding("xid", "", Action.REBOOT, State.SICK, evidence=("the line",))


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path)


def run(place: Fleet, **request: Any) -> RepairResult:
    limits = request.pop("limits", RepairLimits())
    message: Messages = []
    made = RepairRequest("health", limits, **request)
    return commands.run(place, place.all_machines(), made, lambda name, text: message.append((name, text)))


def resume(place: Fleet) -> RepairResult:
    return commands.resume(place, RepairRequest("repair", RepairLimits()), lambda *_: None)


def outcomes(result: RepairResult) -> dict[str, RepairOutcome | None]:
    return {each.machine: each.outcome for each in result.machines}


def clean(place: Fleet) -> None:
    """Nothing of gpunodes is left: no lock, no cordon, no mark, no record."""
    assert place.api.leases == {}
    assert records.read("test") == {}
    for node in place.api.nodes.values():
        assert not node["spec"].get("unschedulable")
        assert not node["spec"].get("taints")
        assert set(node["metadata"]["annotations"]) <= {"gpunodes.dev/repairs"}


def test_a_hung_machine_is_repaired_and_uncordoned() -> None:
    place = fleet(5, ["w1"])
    place.api.add_pod("job", "w1")
    place.api.add_pod("agent", "w1", owner="DaemonSet")
    result = run(place)
    assert outcomes(result)["w1"] is RepairOutcome.REPAIRED
    assert result.exit_code == 0
    assert place.machines["w1"].done == ["reboot"]
    assert set(place.api.pods) == {"agent"}
    clean(place)
    entries = [(entry.kind.value, entry.what, entry.outcome) for entry in history.read("w1")]
    assert entries == [
        ("verdict", "reboot", "hung"),
        ("stage", "collect", ""),
        ("stage", "cordon", "cordoned"),
        ("stage", "drain", "drained"),
        ("step", "reboot", "succeeded"),
        ("verification", "reboot", "passed"),
        ("end", "repair", "repaired"),
    ]
    assert [event["reason"] for event in place.api.events] == ["RepairStarted", "RepairEnded"]


def test_gpus_that_the_device_plugin_dropped_before_the_repair_are_expected_after_it() -> None:
    place = fleet(5, ["w1"])
    node = place.api.nodes["w1"]
    node["metadata"]["labels"]["gpunodes.dev/gpu-count"] = "8"
    node["status"] |= {"capacity": {"nvidia.com/gpu": "7"}, "allocatable": {"nvidia.com/gpu": "7"}}
    (found,) = [each for each in run(place).machines if each.machine == "w1"]
    assert found.outcome is RepairOutcome.NEEDS_REPAIR
    assert "7 of 8 GPUs can be allocated" in found.why


def test_gpus_partitioned_after_the_join_are_expected_as_slices() -> None:
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


def test_it_escalates_until_a_step_succeeds() -> None:
    place = fleet(5, ["w1"], deaf=frozenset({"reboot", "force"}))
    result = run(place)
    assert place.machines["w1"].done == ["reboot", "force", "sysrq"]
    assert {each.machine: each.step for each in result.machines}["w1"] == "sysrq"
    clean(place)


def test_steps_that_the_machine_performed_by_itself_follow_from_its_boot_time() -> None:
    ordered_at = time.time() - 60
    armed = (("force", ordered_at + 15), ("sysrq", ordered_at + 23))
    record = RepairRecord("id", "w1", "test", 0.0, "", "reboot", hung=True, ordered_at=ordered_at, armed=armed)
    for uptime_s, names in ((50.0, []), (40.0, ["force"]), (30.0, ["force", "sysrq"])):
        escalated = performed_by_itself(record, escalation.step("reboot"), Boot(Reached.ENDED, "new", uptime_s))
        assert [step.name for step in escalated] == names
    working = dataclasses.replace(record, hung=False)
    assert not performed_by_itself(working, escalation.step("reboot"), Boot(Reached.ENDED, "new", 30.0))


def test_the_bmc_resets_a_machine_that_no_other_step_reboots() -> None:
    place = fleet(5, ["w1"], deaf=frozenset({"reboot", "force", "sysrq"}))
    assert outcomes(run(place))["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done[-1] == "bmc"
    clean(place)


def test_a_warm_reboot_that_does_not_help_is_followed_by_a_cold_cycle() -> None:
    place = fleet(5, ["w1"], cures=frozenset({"cold"}))
    assert outcomes(run(place))["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done == ["reboot", "cold"]
    clean(place)


@pytest.mark.parametrize("bmc", ["good", "none", "unreachable", "refused"])
def test_a_machine_that_no_step_repairs_needs_repair_until_it_is_cleared(bmc: str) -> None:
    place = fleet(5, ["w1"], cures=frozenset(), bmc=bmc)
    result = run(place)
    assert outcomes(result)["w1"] is RepairOutcome.NEEDS_REPAIR
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


def test_a_bmc_that_reports_a_false_state_ends_in_needs_repair() -> None:
    place = fleet(5, ["w1"], deaf=frozenset({"reboot", "force", "sysrq"}), bmc="lies")
    result = run(place)
    assert outcomes(result)["w1"] is RepairOutcome.NEEDS_REPAIR
    assert place.api.nodes["w1"]["spec"]["unschedulable"]


def test_without_sshd_only_the_bmc_is_used() -> None:
    place = fleet(5, ["w1"], sshd=False)
    assert {each.machine: each.decision for each in run(place).machines}["w1"] is Decision.REFUSE
    by_hand = run(place, limits=RepairLimits(by_hand=True), named=frozenset({"w1"}))
    assert outcomes(by_hand)["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done == ["bmc"]
    skipped = [entry.what for entry in history.read("w1") if entry.outcome == "skipped"]
    assert skipped == ["reboot", "force", "sysrq"]


def test_a_gpu_reset_may_suffice() -> None:
    place = fleet(5, ["w1"], action=Action.RESET_GPU, hung=False, cures=frozenset({"gpu-reset"}))
    limits = RepairLimits(actions=frozenset({Action.RESET_GPU, Action.REBOOT}))
    assert outcomes(run(place, limits=limits))["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done == ["gpu-reset"]
    assert place.machines["w1"].boot == 1
    clean(place)


def test_a_gpu_reset_names_the_gpus_that_are_to_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs on the other GPUs continue."""
    place = fleet(5, ["w1"], action=Action.RESET_GPU, hung=False, cures=frozenset({"gpu-reset"}))
    monkeypatch.setattr(findings, "resets", lambda *_: ("0000:17:00.0",))
    run(place, limits=RepairLimits(actions=frozenset({Action.RESET_GPU})))
    assert place.machines["w1"].reset == ["0000:17:00.0"]


@pytest.mark.parametrize(
    ("boot", "why"),
    [
        ("w1-boot-1", "it is still in the old boot"),
        ("another", "its kubelet has not reported the new boot yet"),
    ],
)
def test_a_verdict_or_node_of_another_boot_does_not_verify(
    boot: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A healthy verdict is not enough: it must be of the new boot, and the node must report that boot."""
    place = fleet(5, ["w1"])
    verdict = repair_fleet.Machine.verdict
    monkeypatch.setattr(
        repair_fleet.Machine,
        "verdict",
        lambda machine: dataclasses.replace(verdict(machine), boot_id=boot if machine.done else machine.boot_id),
    )
    assert outcomes(run(place))["w1"] is RepairOutcome.NEEDS_REPAIR
    assert next(each.detail for each in history.read("w1") if each.kind is history.EntryKind.VERIFICATION) == why


def test_a_missing_gpu_fails_the_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """All expected GPUs must be visible, whatever the verdict."""
    place = fleet(5, ["w1"])
    verdict = repair_fleet.Machine.verdict
    monkeypatch.setattr(
        repair_fleet.Machine,
        "verdict",
        lambda machine: dataclasses.replace(verdict(machine), gpus_seen=7 if machine.done else 8),
    )
    (found,) = [each for each in run(place).machines if each.machine == "w1"]
    assert (found.outcome, found.why) == (RepairOutcome.NEEDS_REPAIR, "7 of 8 GPUs are visible")


def test_a_machine_that_does_not_stay_healthy_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must stay healthy for gpunodes_repair_settle seconds."""
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
def test_an_invalid_number_is_refused_before_any_change(key: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative number of days deleted all evidence."""
    place = fleet(5, ["w1"])
    given = place.settings()
    monkeypatch.setattr(place, "settings", lambda: {**given, f"gpunodes_repair_{key}": value})
    with pytest.raises(WrongInput, match=f"gpunodes_repair_{key} is "):
        run(place)
    assert place.machines["w1"].done == []


def test_a_gpu_reset_that_does_not_help_is_followed_by_a_reboot() -> None:
    place = fleet(5, ["w1"], action=Action.RESET_GPU, hung=False, cures=frozenset({"reboot"}))
    assert (
        outcomes(run(place, limits=RepairLimits(actions=frozenset({Action.RESET_GPU}))))["w1"] is RepairOutcome.REPAIRED
    )
    assert place.machines["w1"].done == ["gpu-reset", "reboot"]


@pytest.mark.parametrize("hung", [True, False])
def test_a_disruption_budget_is_respected(hung: bool) -> None:
    place = fleet(5, ["w1"], hung=hung)
    place.api.add_pod("database", "w1", owner="StatefulSet")
    place.api.budgeted.add("database")
    result = run(place)
    assert outcomes(result)["w1"] is RepairOutcome.NOT_REPAIRED
    assert place.machines["w1"].done == []
    assert "default/database" in {each.machine: each.why for each in result.machines}["w1"]
    clean(place)
    forced = run(place, force_drain=True)
    assert outcomes(forced)["w1"] is (RepairOutcome.REPAIRED if hung else RepairOutcome.NOT_REPAIRED)
    drained = [entry for entry in history.read("w1") if entry.what == "drain"][-1]
    assert "default/database" in drained.detail, "pods deleted by force are named too"


def test_a_machine_is_not_scanned_while_its_node_becomes_ready() -> None:
    def scans(late: int) -> int:
        """The number of scans when a node is ready after ``late`` queries."""
        place = fleet(5, ["w1"])
        asked = 0

        def before(method: str, path: str) -> None:
            nonlocal asked
            if place.machines["w1"].done and (method, path) == ("GET", "/api/v1/nodes/w1"):
                asked += 1
                place.api.nodes["w1"]["status"]["conditions"][0]["status"] = str(asked > late)

        place.api.before = before
        assert outcomes(run(place))["w1"] is RepairOutcome.REPAIRED
        assert asked > late
        return place.scans

    assert scans(late=30) == scans(late=0)


def test_a_machine_whose_nvidia_smi_fails_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(5, ["w1"])
    monkeypatch.setattr(repair_fleet, "SMI", {"smi": {"status": "failed", "message": "Unknown\nError"}})
    assert outcomes(run(place))["w1"] is RepairOutcome.NEEDS_REPAIR
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
    ids=["an application's fault", "marked harmless", "off the bus", "marked as a fault", "unhealthy without a code"],
)
def test_the_sites_own_rules_decide_what_is_healthy(after: Verdict, outcome: RepairOutcome) -> None:
    """A machine is uncordoned exactly when its verdict is healthy by the site's rules, whatever its log contains."""
    place = fleet(5, ["w1"], after=after)
    assert outcomes(run(place))["w1"] is outcome
    assert place.machines["w1"].done == (["reboot"] if outcome is RepairOutcome.REPAIRED else ["reboot", "cold"])
    assert bool(place.api.nodes["w1"]["spec"].get("unschedulable")) is (outcome is RepairOutcome.NEEDS_REPAIR)


def test_a_pod_that_does_not_terminate_blocks_only_a_node_that_works() -> None:
    place = fleet(5, ["w1"])
    place.api.add_pod("stuck", "w1")
    place.api.sticky.add("stuck")
    assert outcomes(run(place))["w1"] is RepairOutcome.REPAIRED
    drained = next(entry for entry in history.read("w1") if entry.what == "drain")
    assert "default/stuck (it does not terminate)" in drained.detail
    works = fleet(5, ["w1"], hung=False)
    works.api.add_pod("slow", "w1")
    works.api.sticky.add("slow")
    assert outcomes(run(works))["w1"] is RepairOutcome.NOT_REPAIRED
    clean(works)


def test_a_cordon_by_others_stays() -> None:
    place = fleet(5, ["w1"])
    place.api.nodes["w1"]["spec"]["unschedulable"] = True
    assert outcomes(run(place, named=frozenset({"w1"})))["w1"] is RepairOutcome.REPAIRED
    assert place.api.nodes["w1"]["spec"]["unschedulable"]
    assert place.api.leases == {}


def test_a_verdict_must_be_confirmed_by_a_second_scan() -> None:
    place = fleet(5, ["w1"])
    first = {entry.name: MachineScan(place.machines[entry.name].verdict()) for entry in place.all_machines()}
    place.machines["w1"].sick = False
    request = RepairRequest("health", RepairLimits())
    result = commands.run(place, place.all_machines(), request, lambda *_: None, first)
    assert {each.machine: each.decision for each in result.machines}["w1"] is Decision.NOTHING
    assert place.machines["w1"].done == []


def test_a_plan_changes_nothing() -> None:
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
    assert all(outcomes(result)[name] is RepairOutcome.REPAIRED for name in names)
    assert most == 2
    clean(place)


def test_two_commands_at_once_repair_no_machine_twice() -> None:
    place = fleet(20, ["w1", "w5", "w9"])
    results: list[RepairResult] = []
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


def test_three_unhealthy_of_four_stop_repairs() -> None:
    place = fleet(4, ["w0", "w1", "w2"])
    result = run(place)
    assert {each.decision for each in result.machines if each.machine != "w3"} == {Decision.REFUSE}
    assert result.exit_code == 3
    clean(place)
    run(place)
    (noted,) = history.read("w1")
    assert (noted.kind, noted.what, noted.outcome) == (history.EntryKind.VERDICT, "reboot", "hung"), "once"
    assert noted.detail.startswith("refuse: 3 of 4")
    assert history.read("w3") == []


def run_on(place: Fleet, *names: str, **request: Any) -> MachineRepair:
    """Repair some machines of a place only; the first one's result."""
    chosen = [entry for entry in place.all_machines() if entry.name in names]
    result = commands.run(place, chosen, RepairRequest("health", RepairLimits(), **request), lambda *_: None)
    return {each.machine: each for each in result.machines}[names[0]]


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("without_cluster", [False, True])
def test_one_selected_of_three_unhealthy_is_refused_too(ready: bool, without_cluster: bool) -> None:
    """A selection does not shrink a pool: its other machines are scanned, or known from their nodes."""
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
def test_cpu_nodes_do_not_dilute_unhealthy_gpu_nodes(labelled: bool, without_cluster: bool) -> None:
    """GPU nodes are a separate pool: by the label gpunodes.dev/pool, or by their GPUs without that label."""
    place = fleet(20, ["w0", "w1", "w2"])
    for name, node in list(place.api.nodes.items())[4:]:
        node["status"] |= {"capacity": {"cpu": "4"}, "allocatable": {"cpu": "4"}}
        place.machines[name].gpus = 0
    if labelled:
        for name, node in place.api.nodes.items():
            node["metadata"]["labels"]["gpunodes.dev/pool"] = "h100" if name in {"w0", "w1", "w2", "w3"} else "cpu"
    found = run_on(place, "w0", "w1", "w2", without_cluster=without_cluster)
    assert (found.decision, found.why[:6]) == (Decision.REFUSE, "3 of 4"), found.why


def test_only_the_pool_of_a_repaired_machine_is_scanned_too() -> None:
    """A repair of one machine scans its own pool and no other."""
    place = fleet(20, ["w0"])
    for name, node in place.api.nodes.items():
        node["metadata"]["labels"]["gpunodes.dev/pool"] = "a" if name in {"w0", "w1", "w2", "w3"} else "b"
    assert run_on(place, "w0", dry_run=True).decision is Decision.REPAIR
    assert place.scans == 1 + 1 + 3, "itself twice, each other machine of its pool once"


def test_the_loop_guard_stops_the_third_repair() -> None:
    place = fleet(5, ["w1"])
    for _ in range(2):
        place.machines["w1"].sick = True
        assert outcomes(run(place))["w1"] is RepairOutcome.REPAIRED
        time.sleep(1)  # a node remembers its repairs by the second
    place.machines["w1"].sick = True
    remembered = history.path().read_text()
    history.path().unlink()
    plan = {each.machine: each for each in run(place, dry_run=True).machines}["w1"]
    assert plan.decision is Decision.NEEDS_REPAIR, "by its node"
    assert not place.api.nodes["w1"]["spec"].get("unschedulable"), "a plan changes nothing"
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


def test_without_a_cluster_only_the_machine_is_changed() -> None:
    place = fleet(5, ["w1"])
    place.api.down = True
    with pytest.raises(Exception, match="does not respond"):
        run(place)
    assert outcomes(run(place, without_cluster=True))["w1"] is RepairOutcome.REPAIRED
    assert records.read("test") == {}


FULL = OSError(errno.ENOSPC, "No space left on device", "/var/lib/x")


def odd_control(place: Fleet, patch: pytest.MonkeyPatch) -> None:
    machine_control = place.machine_control

    def give(machine: Any, **_: Any) -> Any:
        if machine.name == "w1":
            raise ValueError("its variables are odd")
        return machine_control(machine)

    patch.setattr(place, "machine_control", give)


def odd_boot(_: Fleet, patch: pytest.MonkeyPatch) -> None:
    boot = repair_fleet.StandInControl.boot

    def answer(self: repair_fleet.StandInControl) -> Boot:
        if self._machine.name == "w1":
            raise ValueError("could not convert string to float: 'load:'")
        return boot(self)

    patch.setattr(repair_fleet.StandInControl, "boot", answer)


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

    patch.setattr("gpunodes.operations.repair.deciding.RepairCandidate", odd)


ODD = {
    "decision": (odd_report, "unexpected KeyError: 'what it reported'"),
    "machine_control": (odd_control, "unexpected ValueError: its variables are odd"),
    "boot": (odd_boot, "unexpected ValueError: could not convert"),
    "scan": (odd_scan, "unexpected RecursionError: deep"),
    "history before": (full_at(history.EntryKind.VERDICT), "/var/lib/x: No space left on device"),
    "history after the order": (full_at(history.EntryKind.STEP), "/var/lib/x: No space left on device"),
    "history at the end": (full_at(history.EntryKind.END), "/var/lib/x: No space left on device"),
    "record": (full_record, "/var/lib/x: No space left on device"),
}


@pytest.mark.parametrize("where", list(ODD))
def test_an_error_about_one_machine_stops_no_other_repair(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any error about one machine ends its repair with a sentence; the others are repaired."""
    place = fleet(20, ["w1", "w5", "w9"])
    prepare, message = ODD[where]
    with monkeypatch.context() as patch:
        prepare(place, patch)
        # Only a machine whose repair is unfinished counts in the budget.
        budget = Budget(2 if where in {"boot", "scan", "history after the order"} else 1)
        results = {each.machine: each for each in run(place, limits=RepairLimits(max_unavailable=budget)).machines}
    assert results["w1"].why.startswith(message)
    assert not results["w1"].healthy
    assert [results[name].outcome for name in ("w5", "w9")] == [RepairOutcome.REPAIRED] * 2
    # The same command resumes the repair.
    bury(place)
    run(place)
    assert place.machines["w1"].done == ["reboot"], "ordered only once"
    clean(place)


def test_an_unfinished_repair_that_cannot_be_resumed_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair that cannot be resumed does not prevent the next run from repairing the others."""
    place = fleet(20, ["w1", "w5"])
    place.cordon("w1", "id-1")
    records.write(
        RepairRecord("id-1", "w1", "test", 0.0, "", "reboot", recording.Stage.ESCALATE, node="w1", step="reboot")
    )
    odd_control(place, monkeypatch)
    results = {each.machine: each for each in run(place, limits=RepairLimits(max_unavailable=Budget(2))).machines}
    assert results["w1"].why == "unexpected ValueError: its variables are odd"
    assert results["w5"].outcome is RepairOutcome.REPAIRED


def test_an_unresponsive_control_plane_stops_only_repairs_that_have_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting machines are refused with the reason; started repairs continue."""
    place = fleet(20, ["w1", "w5"])
    deciding = Leases.deciding

    def once(self: Leases) -> Any:
        if place.machines["w1"].done:
            raise NoResponse("the control plane does not respond")
        return deciding(self)

    monkeypatch.setattr(Leases, "deciding", once)
    results = {each.machine: each for each in run(place).machines}
    assert results["w1"].outcome is RepairOutcome.REPAIRED
    assert (results["w5"].decision, results["w5"].why) == (Decision.REFUSE, "the control plane does not respond")
    assert place.machines["w5"].done == []
    clean(place)


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


def bury(place: Fleet) -> None:
    """Mark the holders of all locks as dead."""
    for lease in place.api.leases.values():
        if "holderIdentity" not in lease["spec"]:
            continue  # it was released
        parts = lease["spec"]["holderIdentity"].rsplit("/", 3)
        lease["spec"]["holderIdentity"] = "/".join([parts[0], "1", "0", parts[3]])


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
        # No repair was started, or no record of it was stored.
        assert at == 1
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


def test_a_live_lock_of_another_command_is_respected() -> None:
    place = fleet(5, ["w1"])
    place.api.add_node("other")
    other = Leases(Cluster(place.session()), "repair")
    other.holder = "ann@desk/repair/x/1/1/1"
    other.take("w1", "")
    result = run(place)
    assert {each.machine: (each.decision, "ann@desk" in each.why) for each in result.machines}["w1"] == (
        Decision.REFUSE,
        True,
    )
    other.release("w1")
    other.close()


def test_a_record_is_restored_from_its_text() -> None:
    record = RepairRecord("id", "w1", "test", 1.0, "why", "reboot", outcome=RepairOutcome.REPAIRED, tried=("reboot",))
    assert recording.parse(record.text()) == record
    assert recording.parse(record.text()[:-1] + ', "new": 1}') == record
    for text in ("", "[]", "{}", '{"stage": "dance"}'):
        with pytest.raises(ValueError, match=r".*"):
            recording.parse(text)


def test_the_escalation_steps() -> None:
    names = [step.name for step in escalation.steps()]
    assert names == ["gpu-reset", "reboot", "force", "sysrq", "bmc", "cold"]
    assert all(step.source for step in escalation.steps())
