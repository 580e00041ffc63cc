"""Which machines a command repairs: scans, pools, budgets, the loop guard and other commands."""

from __future__ import annotations

import dataclasses
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.engine import history, records
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.leases.held import Leases
from gpunodes.engine.scans import MachineScan
from gpunodes.errors import GpunodesError
from gpunodes.model import Role
from gpunodes.operations import power
from gpunodes.operations.repair import commands
from gpunodes.repair.policy import Budget, Decision, RepairLimits
from gpunodes.repair.record import RepairOutcome
from gpunodes.repair.request import RepairRequest
from gpunodes.repair.result import MachineRepair, RepairResult

from tests import repair_fleet
from tests.repair_fleet import Fleet, clean, fleet, hurry, outcomes, resume, run


@pytest.fixture(autouse=True)
def quick(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own state folder, and very short time limits."""
    hurry(monkeypatch, tmp_path)


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


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize(("hosts", "without_cluster"), [(True, False), (False, False), (True, True)])
def test_machines_that_are_no_nodes_do_not_dilute_unhealthy_nodes(
    hosts: bool, every: bool, without_cluster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen GPU hosts, or machines that have not joined yet, beside four nodes; the timer selects all of them."""
    place = fleet(20, ["w0", "w1", "w2"])
    bare = list(place.machines)[4:]
    if not without_cluster:
        for name in bare:
            del place.api.nodes[name]
    if hosts:
        entries = [
            dataclasses.replace(each, role=Role.GPU_HOST) if each.name in bare else each
            for each in place.all_machines()
        ]
        monkeypatch.setattr(place, "all_machines", lambda: entries)
    names = list(place.machines) if every else ["w0", "w1", "w2"]
    found = run_on(place, *names, without_cluster=without_cluster)
    assert (found.decision, found.why[:6]) == (Decision.REFUSE, "3 of 4"), found.why
    assert not any(machine.done for machine in place.machines.values())


def test_gpu_hosts_are_repaired_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a pool of their own: unhealthy nodes do not stop that."""
    place = fleet(8, ["w0", "w1", "w2", "w7"])
    entries = [
        dataclasses.replace(each, role=Role.GPU_HOST) if each.name > "w3" else each for each in place.all_machines()
    ]
    monkeypatch.setattr(place, "all_machines", lambda: entries)
    results = {each.machine: each for each in run(place, without_cluster=True).machines}
    assert results["w7"].outcome is RepairOutcome.REPAIRED
    assert {results[name].decision for name in ("w0", "w1", "w2")} == {Decision.REFUSE}


def test_only_the_pool_of_a_repaired_machine_is_scanned_too() -> None:
    """A repair of one machine scans its own pool and no other."""
    place = fleet(20, ["w0"])
    for name, node in place.api.nodes.items():
        node["metadata"]["labels"]["gpunodes.dev/pool"] = "a" if name in {"w0", "w1", "w2", "w3"} else "b"
    assert run_on(place, "w0", dry_run=True).decision is Decision.REPAIR
    assert place.scans == 1 + 1 + 3, "itself twice, each other machine of its pool once"


def sick_again_after_two_repairs() -> Fleet:
    """A fleet whose machine w1 was repaired twice."""
    place = fleet(5, ["w1"])
    for _ in range(2):
        place.machines["w1"].sick = True
        assert outcomes(run(place))["w1"] is RepairOutcome.REPAIRED
        time.sleep(1.1)  # a node remembers its repairs by the second
    place.machines["w1"].sick = True
    return place


def test_the_loop_guard_stops_the_third_repair() -> None:
    place = sick_again_after_two_repairs()
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


@pytest.mark.parametrize("made_again", [False, True])
def test_a_machine_that_another_user_cleared_is_repaired_again(
    made_again: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer's own history says that it gave the machine up, and counts its repairs; only the node is shared."""
    place = sick_again_after_two_repairs()
    assert outcomes(run(place))["w1"] is RepairOutcome.NEEDS_REPAIR
    assert "marked" in {each.machine: each.why for each in run(place).machines}["w1"]
    (tmp_path / "ann").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "ann"))
        if made_again:
            boot = place.machines["w1"].boot_id
            place.api.add_node("w1")
            place.api.nodes["w1"]["status"]["nodeInfo"]["bootID"] = boot
        else:
            power.clear(place, place.all_machines()[1], without_cluster=False)
    before = history.path().read_text()
    plan = {each.machine: each for each in run(place, dry_run=True).machines}["w1"]
    assert (plan.decision, history.path().read_text()) == (Decision.REPAIR, before)
    assert outcomes(run(place))["w1"] is RepairOutcome.REPAIRED
    assert [entry.kind for entry in history.read("w1")].count(history.EntryKind.CLEARED) == 1
    assert history.summaries("test")["w1"].needs_repair == ""
    time.sleep(1.1)  # a node remembers its repairs by the second
    place.machines["w1"].sick = True
    assert outcomes(run(place))["w1"] is RepairOutcome.REPAIRED, "the guard counts from then on"


def test_without_a_cluster_the_history_alone_says_that_a_machine_was_given_up() -> None:
    place = fleet(2, ["w1"], cures=frozenset())
    assert outcomes(run(place, without_cluster=True))["w1"] is RepairOutcome.NEEDS_REPAIR
    found = {each.machine: each for each in run(place, without_cluster=True).machines}["w1"]
    assert (found.decision, "marked" in found.why) == (Decision.NEEDS_REPAIR, True)


def test_the_loop_guard_counts_repairs_of_controllers_whose_clocks_are_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair is dated by the control plane's clock, with which the guard compares it."""
    now = time.time
    monkeypatch.setattr(repair_fleet, "time", SimpleNamespace(time=lambda: now() + 3 * 86400))
    place = sick_again_after_two_repairs()
    assert outcomes(run(place))["w1"] is RepairOutcome.NEEDS_REPAIR
    assert place.machines["w1"].done == ["reboot", "reboot"]
    assert all(entry.seconds < 60 for entry in history.read("w1"))


@pytest.mark.parametrize("by", [resume, run])
def test_a_repair_that_another_controller_resumes_counts_once(
    by: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start is in the record and in the annotation of the node, and then also in the history of the second one."""
    place = fleet(5, ["w1"])

    def dies(*_: Any, **__: Any) -> None:
        raise GpunodesError("the lock is lost")

    with monkeypatch.context() as patch:
        patch.setattr("gpunodes.operations.drain.drain", dies)
        assert outcomes(run(place))["w1"] is RepairOutcome.NOT_REPAIRED
    time.sleep(1.1)
    (tmp_path / "second").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "second"))
    assert outcomes(by(place))["w1"] is RepairOutcome.REPAIRED
    time.sleep(1.1)  # a node remembers its repairs by the second
    place.machines["w1"].sick = True
    assert outcomes(run(place))["w1"] is RepairOutcome.REPAIRED, "one repair of two"
    place.machines["w1"].sick = True
    assert outcomes(run(place))["w1"] is RepairOutcome.NEEDS_REPAIR
    begun, *_ = history.read("w1")
    assert (begun.kind, begun.what, begun.detail[:7]) == (history.EntryKind.VERDICT, "reboot", "reboot:")


def test_without_a_cluster_only_the_machine_is_changed() -> None:
    place = fleet(5, ["w1"])
    place.api.down = True
    with pytest.raises(Exception, match="does not respond"):
        run(place)
    assert outcomes(run(place, without_cluster=True))["w1"] is RepairOutcome.REPAIRED
    assert records.read("test") == {}


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


def test_without_a_group_control_plane_no_control_plane_is_repaired() -> None:
    """Its inventory may have it as a worker: nothing could exclude other commands while the API stops."""
    place = fleet(3, ["w1"])
    place.api.nodes["w1"]["metadata"]["labels"]["node-role.kubernetes.io/control-plane"] = ""
    request = RepairRequest("repair", RepairLimits(by_hand=True), named=frozenset({"w1"}))
    (found,) = commands.run(place, [place.all_machines()[1]], request, lambda *_: None).machines
    assert found.decision is Decision.REFUSE
    assert "its node is a control plane" in found.why
    assert place.machines["w1"].done == []


def test_no_control_plane_is_repaired_while_the_etcd_of_another_one_is_away() -> None:
    """Its kubelet is ready, so its node is: with one more away the cluster has no majority."""
    place = fleet(4)
    repair_fleet.control_planes(place, "w0", "w1", "w2")
    request = RepairRequest("repair", RepairLimits(by_hand=True), named=frozenset({"w0"}), dry_run=True)
    selected = [place.all_machines()[0]]
    (found,) = commands.run(place, selected, request, lambda *_: None).machines
    assert found.decision is Decision.REPAIR
    ready = place.api.pods["etcd-w1"]
    for lacking in (False, True):
        ready["status"]["conditions"][0]["status"] = "False"
        if lacking:
            del place.api.pods["etcd-w1"]
        (found,) = commands.run(place, selected, request, lambda *_: None).machines
        assert found.decision is Decision.WAIT
        assert found.why.startswith("w1 of the control plane is unavailable")
