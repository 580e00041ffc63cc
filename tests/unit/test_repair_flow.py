"""One repair from the first stage to the last, with every outcome."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.engine import history, records
from gpunodes.engine.history import EntryKind
from gpunodes.engine.machine_control import Boot
from gpunodes.engine.remote.shell import Reached
from gpunodes.health import judge
from gpunodes.health.model import Action, Finding, SiteRules, State, Verdict
from gpunodes.operations.repair.escalating import performed_by_itself
from gpunodes.repair import escalation, findings
from gpunodes.repair.escalation import EscalationStep
from gpunodes.repair.policy import Decision, RepairLimits
from gpunodes.repair.record import RepairOutcome, RepairRecord, Stage

from tests import repair_fleet
from tests.repair_fleet import clean, fleet, hurry, outcomes, resume, run


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path)


LOST = Finding("xid", "", Action.REBOOT, State.SICK, evidence=("the line",))


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


def test_gpus_that_pods_share_are_expected_as_shares() -> None:
    """Also where the device plugin had no GPU left before the repair: whole GPUs afterwards are too few."""
    for allocatable, outcome in (("16", RepairOutcome.REPAIRED), ("4", RepairOutcome.NEEDS_REPAIR)):
        place = fleet(5, ["w1"])
        node = place.api.nodes["w1"]
        node["metadata"]["labels"] |= {"gpunodes.dev/gpu-count": "4", "gpunodes.dev/sharing": "time-slicing-4"}
        node["status"] |= {"capacity": {"nvidia.com/gpu": "0"}, "allocatable": {"nvidia.com/gpu": allocatable}}
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
        escalated = performed_by_itself(record, escalation.step("reboot"), Boot(Reached.ENDED, "new", uptime_s), 60.0)
        assert [step.name for step in escalated] == names
    working = dataclasses.replace(record, hung=False)
    assert not performed_by_itself(working, escalation.step("reboot"), Boot(Reached.ENDED, "new", 30.0), 60.0)


def still_down(monkeypatch: pytest.MonkeyPatch, polls: int, act: Callable[[], None] = lambda: None) -> None:
    """The machine runs its old boot for some polls after a step was ordered; at the first one ``act`` is called."""
    monkeypatch.setattr(EscalationStep, "limit", lambda self, hung: 30.0)
    boot, seen = repair_fleet.StandInControl.boot, itertools.count(1)

    def boot_of(control: repair_fleet.StandInControl) -> Boot:
        if not control._machine.done:
            return boot(control)
        number = next(seen)
        if number == 1:
            act()
        return Boot(Reached.ENDED, f"{control._machine.name}-boot-1", 1000.0) if number <= polls else boot(control)

    monkeypatch.setattr(repair_fleet.StandInControl, "boot", boot_of)


@pytest.mark.parametrize("jump", [1000.0, -1000.0])
@pytest.mark.parametrize("without_cluster", [False, True])
def test_a_clock_that_is_set_during_a_reboot_orders_no_other_step(
    monkeypatch: pytest.MonkeyPatch, jump: float, *, without_cluster: bool
) -> None:
    place = fleet(5, ["w1"])
    now = time.time
    still_down(monkeypatch, 3, lambda: monkeypatch.setattr(time, "time", lambda: now() + jump))
    result = run(place, without_cluster=without_cluster)
    assert outcomes(result)["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done == ["reboot"]
    (step,) = [entry for entry in history.read("w1") if entry.kind is EntryKind.STEP]
    assert re.search(r"after \d s", step.detail), step.detail


def test_a_repair_that_a_controller_with_another_clock_resumes_orders_no_other_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control plane's clock counts, whichever controller ordered the step."""
    place, now = fleet(5, ["w1"]), time.time
    monkeypatch.setattr(repair_fleet, "time", SimpleNamespace(time=lambda: now() - 86400))
    ordered_at = now() - 86400
    place.cordon("w1", "r1")
    place.machines["w1"].use("reboot")
    record = RepairRecord("r1", "w1", "test", ordered_at, "hung", "reboot", node="w1", boot_id="w1-boot-1", hung=True)
    records.write(record.to(Stage.ESCALATE, step="reboot", ordered_at=ordered_at))
    still_down(monkeypatch, 3)
    assert outcomes(resume(place))["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done == ["reboot"]


def test_an_order_in_the_future_is_not_waited_for_longer_than_a_boot() -> None:
    """The control plane's clock was set back, or the record was not written by gpunodes."""
    place = fleet(5, ["w1"], deaf=frozenset({"reboot"}))
    place.cordon("w1", "r1")
    later = time.time() + 1e6
    record = RepairRecord("r1", "w1", "test", time.time(), "hung", "reboot", node="w1", boot_id="w1-boot-1", hung=True)
    records.write(record.to(Stage.ESCALATE, step="reboot", ordered_at=later))
    assert outcomes(resume(place))["w1"] is RepairOutcome.REPAIRED
    assert place.machines["w1"].done[0] == "force"


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


def test_a_repair_brings_back_a_device_plugin_that_a_command_took() -> None:
    """Without it the repaired node would never offer its GPUs."""
    place = fleet(5, ["w1"])
    node = place.api.nodes["w1"]
    node["metadata"]["labels"]["gpunodes.dev/gpu-count"] = "8"
    assert outcomes(run(place))["w1"] is RepairOutcome.REPAIRED
    assert node["metadata"]["labels"]["gpunodes.dev/gpu"] == "true"


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

    # A busy computer may need one scan more.
    assert scans(late=30) < scans(late=0) + 10


def test_a_machine_whose_nvidia_smi_fails_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    place = fleet(5, ["w1"])
    failed = {"smi": {"status": "failed", "message": "Unknown\nError"}}
    monkeypatch.setattr(repair_fleet, "FACTS", repair_fleet.FACTS | failed)
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


def test_the_escalation_steps() -> None:
    names = [step.name for step in escalation.steps()]
    assert names == ["gpu-reset", "reboot", "force", "sysrq", "bmc", "cold"]
    assert all(step.source for step in escalation.steps())
