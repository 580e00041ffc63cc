"""The power server over a cluster and machines in memory: the life of a machine, and every way it goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from gpunodes.autoscale import decisions, nodes, plan, proof, state
from gpunodes.autoscale.server import NotPossible
from gpunodes.autoscale.state import MachineState, Phase, parse
from gpunodes.autoscale.store import Overtaken, Store
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.cluster.pods import Pod
from gpunodes.engine.power import PowerState, Trouble

from tests.power_fleet import (
    CAPACITY,
    GPU,
    POOLS,
    THREE,
    MemoryMachines,
    Site,
    document,
    in_service,
    looks,
    machine_id,
    node_object,
    parsed,
    uuid,
)


@pytest.fixture
def site() -> Site:
    return Site(parsed(THREE, POOLS))


def test_machines_are_found_off_and_on() -> None:
    site = Site(parsed(THREE, POOLS), on={"w1"})
    assert site.phases() == {"w1": Phase.ON, "w2": Phase.OFF, "w3": Phase.OFF}
    assert site.server.size("h100").target == 1
    assert site.server.instances("h100")[0][0] == "w1"


def test_a_machine_that_is_on_without_a_node_is_left_alone() -> None:
    site = Site(parsed(THREE, POOLS))
    site.machines.on.add("w3")
    site.server.increase("t4", 1)
    site.settle({"w3": Phase.LEFT_ALONE})
    assert not site.machines.orders
    assert site.server.size("t4").most == 0
    with pytest.raises(NotPossible, match="0 machines"):
        site.server.increase("t4", 1)
    # Someone switched it off, as its reason proposes.
    site.machines.on.discard("w3")
    site.server._questions._asked.clear()
    site.looks_until(site.server, lambda: site.phases()["w3"] is Phase.OFF)
    assert site.server.size("t4").most == 1


def test_a_machine_boots_and_serves_when_it_offers_all_its_gpus(site: Site) -> None:
    site.server.increase("h100", 1)
    site.settle({"w1": Phase.STARTING})
    assert site.server.size("h100").target == 1
    site.boots("w1", gpus=0)
    site.look()
    assert site.store.seen_nodes()["w1"].is_starting, "it offers no GPUs yet"
    site.store.objects["w1"]["status"]["allocatable"][GPU] = "2"
    looks(site)
    assert not site.store.seen_nodes()["w1"].is_starting
    site.look()
    assert site.phases()["w1"] is Phase.ON
    assert ("w1", "InService", "Normal") in site.store.events


def test_the_order_is_written_before_it_is_given(site: Site) -> None:
    seen = []
    switch_on = site.machines.switch_on

    def spied(name: str, before: Callable[[], None], *, again: bool) -> None:
        seen.append(dict(site.store.writes[-1]))
        switch_on(name, before, again=again)

    site.machines.switch_on = spied  # type: ignore[method-assign]  # a spy
    in_service(site, "w3")
    assert seen == [{"w3": "starting"}]


def test_an_idle_machine_is_switched_off_and_its_node_deleted(site: Site) -> None:
    in_service(site, "w1")
    site.server.delete("h100", ["gpunodes://w1"])
    site.settle({"w1": Phase.OFF})
    assert site.machines.orders == [("w1", "on"), ("w1", "off")]
    assert "w1" not in site.store.objects
    assert site.server.size("h100").target == 0


def test_a_node_that_goes_while_the_cluster_is_read_was_not_switched_on_by_someone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_service(site, "w1")
    site.machines.gate.clear()
    site.server.delete("h100", ["gpunodes://w1"])
    read = site.store.seen_nodes

    def late() -> dict[str, nodes.SeenNode]:
        found = read()
        monkeypatch.undo()
        site.machines.gate.set()
        site.until(lambda: site.server._states["w1"].phase is Phase.OFF)
        return found

    site.until(lambda: any(each["key"] == nodes.STOPPING for each in site.store.objects["w1"]["spec"]["taints"]))
    monkeypatch.setattr(site.store, "seen_nodes", late)
    site.look()
    assert site.phases()["w1"] is Phase.OFF
    assert "someone" not in site.server._states["w1"].reason


def test_a_node_gets_back_what_it_had(site: Site) -> None:
    in_service(site, "w1")
    mine = site.store.objects["w1"]
    mine["metadata"]["labels"]["rack"] = "r7"
    mine["metadata"]["annotations"] |= {
        "gpunodes.dev/repairs": "2026-11-01T00:00:00Z",
        "node.alpha.kubernetes.io/ttl": "0",
    }
    mine["spec"]["taints"].append({"key": "team", "value": "a", "effect": "NoSchedule"})
    site.look()
    mine["spec"]["taints"].append({"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"})
    site.server.delete("h100", ["gpunodes://w1"])
    site.settle({"w1": Phase.OFF})
    site.time += 60
    site.server.increase("h100", 2)
    site.settle({"w1": Phase.STARTING})
    site.boots("w1")
    site.look()
    found = site.store.objects["w1"]
    assert found["metadata"]["labels"]["rack"] == "r7"
    assert found["metadata"]["annotations"]["gpunodes.dev/repairs"] == "2026-11-01T00:00:00Z"
    assert "node.alpha.kubernetes.io/ttl" not in found["metadata"]["annotations"]
    assert {taint["key"] for taint in found["spec"]["taints"]} >= {"team"}
    site.look()
    assert {taint["key"] for taint in found["spec"]["taints"]} == {"team"}


def test_pods_get_a_node_when_one_has_used_all_its_gpus(site: Site) -> None:
    site.store.slow = True
    site.server.increase("t4", 1)
    site.boots("w3")
    looks(site)
    assert site.phases()["w3"] is Phase.STARTING
    assert site.store.seen_nodes()["w3"].is_starting
    [pod] = site.store.proofs.values()
    assert pod["spec"]["nodeName"] == "w3"
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {GPU: "2"}
    pod["status"]["phase"] = "Succeeded"
    looks(site)
    assert site.phases()["w3"] is Phase.ON
    assert not site.store.proofs
    assert site.store.objects["w3"]["metadata"]["annotations"]["gpunodes.dev/gpu-boot"] == "boot-w3"


def test_a_pod_that_another_node_made_proves_nothing(site: Site) -> None:
    """A kubelet may make a mirror pod with any name, and report that it succeeded."""
    site.store.slow = True
    site.server.increase("t4", 1)
    site.boots("w3")
    looks(site)
    [(path, pod)] = site.store.proofs.items()
    site.store.proofs[path] = {**pod, "spec": {**pod["spec"], "nodeName": "w1"}, "status": {"phase": "Succeeded"}}
    site.look()
    assert site.phases()["w3"] is Phase.STARTING
    site.until(lambda: site.store.proofs.get(path, {}).get("spec", {}).get("nodeName") != "w1")
    looks(site)
    assert site.store.proofs[path]["spec"]["nodeName"] == "w3"
    assert site.phases()["w3"] is Phase.STARTING


@pytest.mark.parametrize("broken", ["exit code", "fewer GPUs"])
def test_a_node_whose_gpus_do_not_work_is_an_error_and_no_pod_gets_it(
    site: Site, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "exit code":
        site.store.broken = {"w3"}
    else:
        monkeypatch.setattr(site.store, "log", lambda path: "GPU 0: H100 (UUID: GPU-0)")
    site.server.increase("t4", 1)
    site.boots("w3")
    looks(site)
    assert site.store.seen_nodes()["w3"].is_starting
    [(name, found)] = site.server.instances("t4")
    assert name == "w3"
    assert found.error.startswith("a pod that requests its 2 nvidia.com/gpu fails")
    site.server.delete("t4", ["gpunodes://w3"])
    site.settle({"w3": Phase.FAILED})


def test_a_kubelet_that_keeps_a_proof_waiting_delays_no_other_machine(site: Site) -> None:
    hangs, log = threading.Event(), site.store.log

    def slow_log(path: str) -> str:
        if site.store.proofs[path]["spec"]["nodeName"] == "w1":
            assert hangs.wait(10)
        return log(path)

    site.store.log = slow_log  # type: ignore[method-assign]  # a kubelet that drips
    for pool in ("h100", "t4"):
        site.server.increase(pool, 1)
    site.boots("w1")
    site.boots("w3")
    started = time.monotonic()
    site.looks_until(site.server, lambda: site.phases()["w3"] is Phase.ON)
    assert time.monotonic() - started < 5
    assert site.phases()["w1"] is Phase.STARTING
    hangs.set()
    site.looks_until(site.server, lambda: site.phases()["w1"] is Phase.ON)


@pytest.mark.parametrize("change", ["another boot", "given up"])
def test_a_proof_that_ends_late_brings_nothing_else_into_service(site: Site, change: str) -> None:
    waits, log = threading.Event(), site.store.log

    def late_log(path: str) -> str:
        text = log(path)
        assert waits.wait(10)
        return text

    site.store.log = late_log  # type: ignore[method-assign]  # a kubelet that drips
    site.server.increase("t4", 1)
    site.boots("w3")
    site.server.look()
    site.until(lambda: site.store.proofs)
    site.server.look()
    if change == "another boot":
        site.store.objects["w3"]["status"]["nodeInfo"]["bootID"] = "other"
    else:
        site.machines.gate.clear()
        site.server.delete("t4", ["gpunodes://w3"])
    waits.set()
    site.until(lambda: not site.server._proofs._busy)
    assert site.store.seen_nodes()["w3"].is_starting
    site.machines.gate.set()


def test_a_log_is_requested_once() -> None:
    class Unresponsive:
        calls = 0

        def request(self, *_: object) -> Response:
            self.calls += 1
            return Response(0, None, "timed out", 1.0)

    session = Unresponsive()
    with pytest.raises(NoResponse):
        Store(session).log("/api/v1/namespaces/gpunodes-proof/pods/a")  # type: ignore[arg-type]  # a stand-in
    assert session.calls == 1


def test_a_pod_that_proves_gpus_keeps_no_machine_on(site: Site) -> None:
    site.server.increase("t4", 1)
    site.boots("w3", gpus=0)
    proof = Pod("gpunodes-proof", "p", "1", "", mirror=False, finished=False, ending=False)
    site.store.pods["w3"] = [proof]
    site.time += 121
    site.look()
    site.settle({"w3": Phase.FAILED})


def test_shares_of_gpus_are_proven_one_by_one() -> None:
    labels = {"nvidia.com/gpu.count": "2"}
    for gpus, wanted in ((2, "2"), (8, "1")):
        node = nodes.seen(node_object("w1", gpus=gpus, labels=labels), "p")
        assert node
        found = proof.pod(node, "image")["spec"]["containers"][0]["resources"]["limits"]
        assert found == {GPU: wanted if node.node.labelled else str(gpus)}


def test_fewer_gpus_than_before_are_not_in_service(site: Site) -> None:
    in_service(site, "w3")
    site.server.delete("t4", ["gpunodes://w3"])
    site.settle({"w3": Phase.OFF})
    site.server.increase("t4", 1)
    site.boots("w3", gpus=1)
    site.look()
    assert site.phases()["w3"] is Phase.STARTING
    assert site.store.seen_nodes()["w3"].is_starting
    site.time += 121
    site.look()
    site.settle({"w3": Phase.FAILED})
    assert (
        site.store.states()["w3"].error == "its node was not in service within 100 s: it offers 1 of 2 nvidia.com/gpu"
    )


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_node_waits_for_its_network_add_on(gpus: int) -> None:
    """Its kubelet is ready before: the files of the add-on are those of the last boot."""
    planned = {**document(THREE, POOLS), "network": True}
    planned["machines"]["w3"]["capacity"] = {**CAPACITY, GPU: str(gpus)}
    site = Site(plan.parse(planned))
    site.server.increase("t4", 1)
    site.boots("w3", gpus=gpus)
    looks(site)
    assert site.phases()["w3"] is Phase.STARTING
    assert site.store.seen_nodes()["w3"].is_starting
    assert not site.store.proofs, "its sandbox would fail"
    site.store.objects["w3"]["status"]["conditions"].append({"type": "NetworkUnavailable", "status": "False"})
    looks(site)
    assert site.phases()["w3"] is Phase.ON
    assert not site.store.seen_nodes()["w3"].is_starting


def test_a_bmc_that_refuses_is_reported_and_another_machine_taken(site: Site) -> None:
    site.machines.refuses = {"w1"}
    site.server.increase("h100", 1)
    site.until(lambda: site.store.states()["w1"].error)
    [(name, found)] = site.server.instances("h100")
    assert (name, found.phase) == ("w1", Phase.STARTING)
    assert "refuses" in found.error
    site.machines.refuses = set()
    site.server.delete("h100", ["gpunodes://w1"])
    site.settle({"w1": Phase.FAILED})
    assert site.server.size("h100") == type(site.server.size("h100"))(0, 1, 0), "one machine of two is usable"
    site.server.increase("h100", 1)
    site.settle({"w2": Phase.STARTING})
    site.time += 1801
    assert site.server.size("h100").most == 2


def warnings(site: Site) -> list[tuple[str, str]]:
    return [(name, reason) for name, reason, kind in site.store.events if kind == "Warning"]


def again(site: Site) -> None:
    """Let the time pass after which an order that failed is repeated, and wait for the end of that one."""
    # An order that is carried out meanwhile would end after the time that is let pass.
    site.until(lambda: not site.server._orders._busy)
    failed = len(site.machines.refused)
    site.server._orders._ended.clear()
    site.looks_until(site.server, lambda: len(site.machines.refused) > failed)
    site.until(lambda: not site.server._orders._busy)


def test_a_bmc_that_refuses_is_one_event_and_frees_its_place_at_once(site: Site) -> None:
    site.machines.refuses = {"w3"}
    site.server.increase("t4", 1)
    site.until(lambda: site.store.states()["w3"].error)
    site.until(lambda: warnings(site))
    assert site.server.size("t4").target == 1, "the autoscaler reads why in its instance"
    site.server.delete("t4", ["gpunodes://w3"])
    for _ in range(3):
        again(site)
    assert site.phases()["w3"] is Phase.GIVING_UP, "it may be on"
    assert site.server.size("t4") == decisions.Size(0, 0, 0), "the other pool is used at once"
    assert not site.server.instances("t4")
    site.server = site.new_server()
    again(site)
    assert warnings(site) == [("w3", "NotSwitchedOn")]


def test_a_machine_that_its_bmc_does_not_switch_off_is_in_no_pool(site: Site) -> None:
    """Its node was in the pool, and not in the pool's size: one pod had two machines switched on."""
    site.server.increase("h100", 1)
    site.boots("w1", gpus=1)
    site.look()
    assert site.server.pool_of("gpunodes://w1", "w1") == "h100"
    site.machines.refuses = {"w1"}
    site.time += 121
    site.look()
    site.settle({"w1": Phase.GIVING_UP})
    assert (site.server.size("h100").target, site.server.pool_of("gpunodes://w1", "w1")) == (0, "")
    assert not site.server.instances("h100")


def test_another_error_of_a_bmc_is_another_event(site: Site) -> None:
    in_service(site, "w3")
    site.machines.refuses = {"w3"}
    site.server.delete("t4", ["gpunodes://w3"])
    site.until(lambda: warnings(site))
    for trouble in (Trouble.LOGIN, Trouble.LOGIN, Trouble.REFUSED):
        site.machines.trouble = trouble
        again(site)
    assert warnings(site) == [("w3", "NotSwitchedOff")] * 3, "refused, no login, refused"
    site.machines.refuses = set()
    site.server._orders._ended.clear()
    site.looks_until(site.server, lambda: site.phases()["w3"] is Phase.OFF)
    assert ("w3", "SwitchedOff", "Normal") in site.store.events


def test_a_bmc_that_refuses_is_left_alone_for_a_time_from_when_it_was_given_up(site: Site) -> None:
    site.machines.refuses = {"w3"}
    site.server.increase("t4", 1)
    site.until(lambda: site.store.states()["w3"].error)
    site.server.delete("t4", ["gpunodes://w3"])
    given_up = site.time
    site.time += decisions.RETRY_S + 60
    again(site)
    assert site.server.size("t4").most == 0, "its BMC does not show yet that it is off"
    site.machines.refuses = set()
    site.server._orders._ended.clear()
    site.looks_until(site.server, lambda: site.phases()["w3"] is Phase.FAILED)
    assert site.store.states()["w3"].since == given_up
    assert site.server.size("t4").most == 1, "the time is over since it was given up"


def test_an_order_that_comes_while_the_last_one_ends_is_carried_out(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine counted as starting and got no order until its start was given up."""
    in_service(site, "w3")
    writes, event = threading.Event(), site.store.event

    def slow(node: str, reason: str, message: str, *, warning: bool) -> None:
        assert reason != "SwitchedOff" or writes.wait(10)
        event(node, reason, message, warning=warning)

    monkeypatch.setattr(site.store, "event", slow)
    site.server.delete("t4", ["gpunodes://w3"])
    site.settle({"w3": Phase.OFF})
    site.server.increase("t4", 1)
    writes.set()
    site.until(lambda: site.machines.orders == [("w3", "on"), ("w3", "off"), ("w3", "on")])


@pytest.mark.parametrize("given_up_by", ["autoscaler", "power server"])
def test_a_boot_that_never_registers_is_given_up_and_switched_off(site: Site, given_up_by: str) -> None:
    site.server.increase("t4", 1)
    site.until(lambda: "w3" in site.machines.on)
    if given_up_by == "autoscaler":
        site.server.delete("t4", ["gpunodes://w3"])
    else:
        site.time += 119
        site.look()
        assert site.phases()["w3"] is Phase.STARTING
        site.time += 2
        site.look()
    site.settle({"w3": Phase.FAILED})
    assert "w3" not in site.machines.on
    assert "within 100 s" in site.store.states()["w3"].error
    assert ("w3", "SwitchedOff", "Warning") in site.store.events


def test_a_killed_server_goes_on_where_it_was(site: Site) -> None:
    in_service(site, "w1")
    site.machines.gate.clear()
    site.server.delete("h100", ["gpunodes://w1"])
    site.server.increase("t4", 1)
    site.settle({"w1": Phase.STOPPING, "w3": Phase.STARTING})
    # The first server never comes to its order; the second one reads both from the store.
    killed, site.machines = site.machines, MemoryMachines({"w1", "w3"})
    site.server = site.new_server()
    site.settle({"w1": Phase.OFF})
    site.until(lambda: sorted(site.machines.orders) == [("w1", "off"), ("w3", "on")])
    killed.gate.set()
    site.boots("w3", labels={"gpunodes.dev/pool": "t4"})
    looks(site)
    assert site.phases()["w3"] is Phase.ON


def test_a_second_server_ends_the_first(site: Site) -> None:
    site.store.version += 1
    with pytest.raises(Overtaken):
        site.server.increase("h100", 1)
    assert site.server.overtaken
    assert not site.machines.orders


@pytest.mark.parametrize(
    ("annotations", "why"),
    [
        ({"gpunodes.dev/maintenance": '{"reason": "new disk", "by": "a@b"}'}, "new disk"),
        ({"gpunodes.dev/needs-repair": "GPU 3"}, "needs repair"),
        ({"gpunodes.dev/rollout": "r1"}, "roll-out"),
    ],
)
def test_a_node_that_others_hold_stays_on(site: Site, annotations: dict[str, str], why: str) -> None:
    in_service(site, "w1")
    site.store.objects["w1"]["metadata"]["annotations"] |= annotations
    site.look()
    assert site.store.objects["w1"]["metadata"]["annotations"][nodes.DISABLED] == "true"
    with pytest.raises(NotPossible, match=why):
        site.server.delete("h100", ["gpunodes://w1"])
    for key in annotations:
        del site.store.objects["w1"]["metadata"]["annotations"][key]
    site.look()
    assert nodes.DISABLED not in site.store.objects["w1"]["metadata"]["annotations"]


def test_a_node_that_needs_repair_takes_no_place_in_its_pool() -> None:
    """The pool has one place: the machine with the unhealthy GPU kept it, and the other one never started."""
    site = Site(parsed({"w1": "h100", "w2": "h100"}, {"h100": (1, 1, 50)}))
    in_service(site, "w1")
    site.store.objects["w1"]["metadata"]["annotations"]["gpunodes.dev/needs-repair"] = "GPU 3"
    site.look()
    assert site.server.size("h100") == decisions.Size(1, 1, 0), "also its min is not met by it"
    assert not site.server.instances("h100")
    assert site.server.pool_of("gpunodes://w1", "w1") == "", "the autoscaler would wait for one node less"
    site.server.increase("h100", 1)
    site.settle({"w2": Phase.STARTING})
    site.boots("w2")
    looks(site)
    assert site.server.size("h100") == decisions.Size(1, 1, 1)
    del site.store.objects["w1"]["metadata"]["annotations"]["gpunodes.dev/needs-repair"]
    site.look()
    assert site.server.size("h100") == decisions.Size(1, 2, 2)
    assert site.server.pool_of("gpunodes://w1", "w1") == "h100"


def test_a_machine_that_someone_switched_off_takes_no_place_in_its_pool() -> None:
    site = Site(parsed({"w1": "h100", "w2": "h100"}, {"h100": (1, 1, 50)}), on={"w1"})
    site.machines.on.discard("w1")
    site.store.objects["w1"]["status"]["conditions"][0]["status"] = "Unknown"
    site.look()
    site.time += 61
    site.asks_until(lambda: site.phases()["w1"] is Phase.BY_HAND)
    assert site.server.size("h100") == decisions.Size(1, 1, 0)
    assert site.server.pool_of("gpunodes://w1", "w1") == ""
    site.server.increase("h100", 1)
    site.settle({"w2": Phase.STARTING})


def test_a_machine_in_maintenance_counts_and_leaves_places_to_others() -> None:
    """The limit of the pool was that of the machines that nobody holds: the second place was never taken."""
    site = Site(parsed({"w1": "h100", "w2": "h100"}, {"h100": (0, 2, 50)}), on={"w1"})
    note = {"gpunodes.dev/maintenance": '{"reason": "new disk", "by": "a@b"}'}
    site.store.objects["w1"]["metadata"]["annotations"] |= note
    site.look()
    assert site.server.size("h100") == decisions.Size(0, 2, 1)


def test_an_annotation_of_a_user_stays(site: Site) -> None:
    in_service(site, "w1", annotations={nodes.DISABLED: "true"})
    site.look()
    assert site.store.objects["w1"]["metadata"]["annotations"][nodes.DISABLED] == "true"


def test_a_machine_that_someone_switched_off_stays_off_until_it_is_on(site: Site) -> None:
    in_service(site, "w1")
    site.machines.on.discard("w1")
    site.store.objects["w1"]["status"]["conditions"][0]["status"] = "Unknown"
    site.look()
    assert site.phases()["w1"] is Phase.ON, "it may be a network that is slow"
    site.time += 61
    site.asks_until(lambda: site.phases()["w1"] is Phase.BY_HAND)
    with pytest.raises(NotPossible, match="found off, and not by the autoscaler"):
        site.server.delete("h100", ["gpunodes://w1"])
    site.store.objects["w1"]["status"]["conditions"][0]["status"] = "True"
    site.look()
    assert site.phases()["w1"] is Phase.ON


def test_a_machine_that_someone_switched_on_serves(site: Site) -> None:
    site.machines.on.add("w2")
    site.boots("w2")
    looks(site)
    assert site.phases()["w2"] is Phase.ON
    assert "someone else" in site.store.states()["w2"].reason
    assert not site.store.seen_nodes()["w2"].is_starting


def test_the_least_recently_used_starts_first_and_each_within_30_days(site: Site) -> None:
    in_service(site, "w1")
    site.time += 100
    site.server.delete("h100", ["gpunodes://w1"])
    site.settle({"w1": Phase.OFF})
    site.server.increase("h100", 1)
    site.settle({"w2": Phase.STARTING})
    site.boots("w2")
    looks(site)
    site.time += 31 * 86400
    site.look()
    assert site.phases()["w1"] is Phase.STARTING, "it was off for 31 days"
    assert site.phases()["w3"] is Phase.STARTING
    assert "certificate" in site.store.states()["w1"].reason


@pytest.mark.parametrize(
    "more",
    [
        {"provider": "gpunodes://w2"},
        {"provider": ""},
        {"uuid": uuid("w9")},
        {"uuid": "", "machine_id": machine_id("w9")},
        {"machine_id": machine_id("w9")},
    ],
)
def test_a_node_of_another_machine_is_left_alone(site: Site, more: dict[str, Any]) -> None:
    site.store.objects["w1"] = node_object("w1", starting=True, **more)
    site.look()
    assert site.phases()["w1"] is Phase.OFF
    assert site.store.seen_nodes()["w1"].is_starting
    assert site.server.size("h100") == decisions.Size(0, 1, 0)
    assert site.server.pool_of("gpunodes://w1", "w1") == ""
    with pytest.raises(NotPossible, match="w1 stays as it is: its node is of another machine"):
        site.server.delete("h100", ["gpunodes://w1"])
    site.server.increase("h100", 1)
    site.settle({"w1": Phase.OFF, "w2": Phase.STARTING})
    # Its node has gone.
    del site.store.objects["w1"]
    site.look()
    assert site.server.size("h100").most == 2


def test_a_machine_in_service_that_was_reinstalled_is_in_no_pool_until_the_plan_knows_it() -> None:
    """The autoscaler drained its node, and had one machine too few switched on for pods."""
    site = Site(parsed(THREE, POOLS), on={"w1"})
    site.store.objects["w1"] = node_object("w1", machine_id=machine_id("w9"))
    site.look()
    assert site.store.states()["w1"].reason == decisions.FOREIGN
    assert (site.server.size("h100").target, site.server.pool_of("gpunodes://w1", "w1")) == (0, "")
    given = document(THREE, POOLS)
    given["machines"]["w1"]["identity"]["machine_id"] = machine_id("w9")
    site.server.replan(plan.parse(given))
    site.look()
    assert (site.server.size("h100").target, site.server.pool_of("gpunodes://w1", "w1")) == (1, "h100")


def test_what_the_autoscaler_asks_wrongly_is_refused(site: Site) -> None:
    for ask in (
        lambda: site.server.size("v100"),
        lambda: site.server.increase("h100", 3),
        lambda: site.server.increase("h100", 0),
        lambda: site.server.increase("h100", -1),
        lambda: site.server.decrease("h100", -1),
        lambda: site.server.delete("h100", ["gpunodes://w3"]),
        lambda: site.server.delete("h100", ["aws://w1"]),
        lambda: site.server.decrease("h100", 1),
    ):
        with pytest.raises(NotPossible):
            ask()
    assert not site.machines.orders
    assert site.server.pool_of("gpunodes://w9") == ""


def test_a_start_that_is_needed_no_longer_is_undone(site: Site) -> None:
    site.server.increase("h100", 2)
    site.until(lambda: len(site.machines.on) == 2)
    site.server.decrease("h100", 1)
    site.settle({"w1": Phase.OFF})
    assert site.server.size("h100").target == 1


def test_a_machine_with_pods_is_not_switched_off(site: Site) -> None:
    """The autoscaler drained it; but one that starts anew takes its taints away, and pods may come back."""
    in_service(site, "w1")
    pods = [Pod("kube-system", "ds", "1", "DaemonSet", mirror=False, finished=False, ending=False)]
    job = Pod("team", "job-1", "2", "Job", mirror=False, finished=False, ending=False)
    site.store.pods["w1"] = [*pods, job]
    # The autoscaler lifts its own only when it starts anew: the node would stay, and take no pods.
    mine = [{"key": key, "effect": "NoSchedule"} for key in ("ToBeDeletedByClusterAutoscaler", "team")]
    site.store.objects["w1"]["spec"]["taints"] += mine
    site.server.delete("h100", ["gpunodes://w1"])
    site.until(lambda: "team/job-1" in site.store.states()["w1"].reason)
    assert site.phases()["w1"] is Phase.ON
    assert site.machines.orders == [("w1", "on")]
    assert [each["key"] for each in site.store.objects["w1"]["spec"]["taints"]] == ["team"]
    site.store.pods["w1"] = pods
    site.server.delete("h100", ["gpunodes://w1"])
    site.settle({"w1": Phase.OFF})


def test_what_a_user_does_meanwhile_keeps_it_on(site: Site) -> None:
    in_service(site, "w1")
    note = {"gpunodes.dev/maintenance": '{"reason": "new disk", "by": "a@b"}'}
    site.store.objects["w1"]["metadata"]["annotations"] |= note  # after the server's last look
    site.store.objects["w1"]["spec"]["taints"] = [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]
    site.server.delete("h100", ["gpunodes://w1"])
    site.until(lambda: "new disk" in site.store.states()["w1"].reason)
    assert not site.store.objects["w1"]["spec"]["taints"]
    assert site.phases()["w1"] is Phase.ON
    assert site.machines.orders == [("w1", "on")]


def test_a_machine_that_left_the_plan_is_forgotten(site: Site) -> None:
    site.plan = parsed({"w1": "h100"}, POOLS)
    site.server = site.new_server()
    assert set(site.store.texts) == {"w1"}


def test_an_order_of_a_machine_that_left_the_plan_stops_no_later_one(site: Site) -> None:
    """It waited for a free thread; the machine counted as busy ever after."""
    site.server._states.pop("w1", None)
    site.server._orders.give("w1")
    site.until(lambda: not site.server._orders._busy)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"phase": "on"}', '{"phase": 1e999}', "[" * 100_000])
def test_a_state_that_is_none_counts_as_unknown(text: str) -> None:
    assert state.parse(text) is None


def test_a_bmc_that_hangs_delays_no_other_machine(site: Site) -> None:
    in_service(site, "w3")
    hangs = threading.Event()

    def state(name: str) -> PowerState:
        if name == "w3":
            assert hangs.wait(10)
        return PowerState.OFF

    site.machines.state = state  # type: ignore[method-assign]  # a BMC that hangs
    server = site.server = site.new_server()
    site.store.objects["w3"]["status"]["conditions"][0]["status"] = "Unknown"
    site.look()
    site.time += 61
    site.look()
    server.increase("h100", 1)
    site.boots("w1")
    looks(site)
    assert site.phases() == {"w1": Phase.ON, "w2": Phase.OFF, "w3": Phase.ON}
    hangs.set()
    site.asks_until(lambda: site.phases()["w3"] is Phase.BY_HAND)


def test_a_node_that_writes_much_to_itself_fills_no_state(site: Site) -> None:
    """All states are in one ConfigMap, which has at most 1 MiB."""
    notes = {f"x/{number}": "y" * 1000 for number in range(1000)} | {"gpunodes.dev/repairs": "2026-11-01T00:00:00Z"}
    labels = {"nvidia.com/gpu.product": "H100", "gpunodes.dev/pool": "h100"}
    in_service(site, "w1", annotations={**notes, "gpunodes.dev/a": "z" * 200_000}, labels=labels)
    assert len(site.store.texts["w1"]) <= 32_000
    saved = site.store.states()["w1"].saved
    assert saved
    assert saved.annotations["gpunodes.dev/repairs"] == "2026-11-01T00:00:00Z"
    assert labels.items() <= saved.shape.labels.items()
    fitted = saved.fitted(300)
    assert "gpunodes.dev/repairs" in fitted.annotations
    assert labels.items() <= fitted.shape.labels.items()
    assert not [key for key in fitted.annotations if key.startswith("x/")]


def test_a_node_with_many_resources_and_taints_stops_no_other_machine() -> None:
    """Both were always kept whole: one node filled the ConfigMap of all states, and none could be written any more."""
    resources = {f"nvidia.com/mig-{number}g.10gb": "1" for number in range(5000)}
    resources |= {f"own.example/{number}": "1" for number in range(5000)}
    taints = [{"key": f"own.example/{number}", "value": "x" * 50, "effect": "NoSchedule"} for number in range(3000)]
    first, last = ({"key": key, "value": "", "effect": "NoSchedule"} for key in ("quarantine", "gpunodes.dev/x"))
    item = {
        "metadata": {"name": "w1"},
        "spec": {"providerID": "gpunodes://w1", "taints": [first, *taints, last]},
        "status": {"allocatable": {"cpu": "8", "memory": "1" * 100, GPU: "8", **resources}},
    }
    found = nodes.seen(item, "gpunodes.dev/pool")
    assert found
    text = MachineState(Phase.ON, 1.0, saved=found.saved(1000)).text()
    assert len(text) < 6000
    state = parse(text)
    assert state
    assert state.saved
    assert {"cpu": "8", GPU: "8"}.items() <= state.saved.shape.capacity.items()
    assert "memory" not in state.saved.shape.capacity
    assert [state.saved.shape.taints[0], state.saved.shape.taints[-1]] == [first, last]
    item["spec"] = {"providerID": "gpunodes://w1", "taints": [first, *taints[:3], last]}
    found = nodes.seen(item, "gpunodes.dev/pool")
    assert found
    assert found.saved(1000).shape.taints == [first, *taints[:3], last]


@pytest.mark.parametrize("machines", [1, 100, 1000])
def test_the_states_of_all_machines_fit_into_one_config_map(machines: int) -> None:
    planned = parsed({f"w{number}": "h100" for number in range(machines)}, {"h100": (0, machines, 0)})
    node = nodes.seen(
        node_object("w1", labels={f"feature.node.kubernetes.io/cpu-{number}": "true" for number in range(400)}), "p"
    )
    assert node
    text = '"\N{GREEK CAPITAL LETTER OMEGA}' * 300
    saved = node.saved(planned.state_bytes)
    each = state.MachineState(Phase.GIVING_UP, 1.8e9, text, text, 1.8e9, saved)
    assert machines * (len(each.text()) + len("worker-1234")) < 1_048_576
    assert state.parse(each.text()) is not None


def with_gpus(**gpus: int) -> Site:
    """A site whose plan knows these machines with so many GPUs."""
    given = document(THREE, POOLS)
    for name, count in gpus.items():
        given["machines"][name]["capacity"] = {**given["machines"][name]["capacity"], GPU: str(count)}
    return Site(plan.parse(given))


def test_templates_are_as_seen_before_as_planned() -> None:
    site = with_gpus(w3=4)
    assert site.server.template("t4").capacity[GPU] == "2"
    in_service(site, "w3", gpus=4, labels={"gpunodes.dev/pool": "t4", "rack": "r1"})
    found = site.server.template("t4")
    assert found.capacity[GPU] == "4"
    assert found.labels["rack"] == "r1"
    assert "kubernetes.io/hostname" not in found.labels


def test_a_pod_that_requests_another_resource_starts_a_machine_and_no_machine_waits_for_it() -> None:
    """Such a pod fitted on no node of a pool that was all off."""
    site = Site(parsed(THREE, POOLS), on={"w1", "w2", "w3"})
    pages = {"hugepages-2Mi": "64Gi", "hugepages-1Gi": "0"}
    for name, more in (("w1", {"rdma/ib": "4"}), ("w2", {"rdma/ib": "8"}), ("w3", {"rdma/ib": "8", **pages})):
        site.store.objects[name]["status"]["allocatable"] |= more
    looks(site)
    for pool, names in (("h100", ("w1", "w2")), ("t4", ("w3",))):
        site.server.delete(pool, [f"gpunodes://{name}" for name in names])
    site.settle(dict.fromkeys(THREE, Phase.OFF))
    site.server = site.new_server()
    found = site.server.template("t4").capacity
    assert found == {"cpu": "7500m", "memory": "60Gi", "pods": "110", GPU: "2", "rdma/ib": "8", "hugepages-2Mi": "64Gi"}
    assert site.server.template("h100").capacity["rdma/ib"] == "4"
    in_service(site, "w3")
    assert "rdma/ib" not in site.store.objects["w3"]["status"]["allocatable"]


def test_resources_that_no_device_plugin_writes_are_none() -> None:
    item = node_object("w1")
    item["status"]["allocatable"] |= {
        "nvidia.com/gpu.shared": "1k",
        "own.example/x": "many",
        "own.example/" + "y" * 80: "1",
    }
    found = nodes.seen(item, "p")
    assert found
    assert found.resources.keys() == {"cpu", "memory", "pods", GPU}


def test_other_resources_are_kept_before_labels_of_others() -> None:
    item = node_object("w1", labels={f"own.example/{number}": "x" for number in range(100)})
    item["status"]["allocatable"]["rdma/ib"] = "8"
    found = nodes.seen(item, "p")
    assert found
    saved = found.saved(1000)
    assert saved.shape.capacity["rdma/ib"] == "8"
    assert len(saved.shape.labels) < 100
    assert "rdma/ib" not in saved.fitted(0).shape.capacity


def test_a_template_is_what_all_machines_of_a_pool_have_in_common() -> None:
    site = with_gpus(w1=4, w2=8)
    in_service(site, "w1", gpus=4, labels={"rack": "r1", "app": "x"})
    in_service(site, "w2", gpus=8, labels={"rack": "r1"})
    found = site.server.template("h100")
    assert found.labels == {"gpunodes.dev/pool": "h100", "rack": "r1", **state.SYSTEM_LABELS}
    assert found.capacity[GPU] == "4"


@pytest.mark.parametrize(
    ("first", "second", "wanted"), [(None, None, "amd64"), ("arm64", "arm64", "arm64"), ("arm64", "amd64", None)]
)
def test_a_template_has_the_system_by_which_pods_select_nodes(
    site: Site, first: str | None, second: str | None, wanted: str | None
) -> None:
    """Pods with such a nodeSelector started nothing, and DaemonSets with it were not counted."""
    for name, text in (("w1", first), ("w2", second)):
        if text:
            in_service(site, name, labels={"kubernetes.io/arch": text, "kubernetes.io/os": "linux"})
    found = site.server.template("h100").labels
    assert found["kubernetes.io/os"] == "linux"
    assert found.get("kubernetes.io/arch") == wanted
    assert "kubernetes.io/hostname" not in found


@pytest.mark.parametrize("others", ["amd64", None])
def test_no_single_machine_decides_the_architecture_of_its_pool(others: str | None) -> None:
    """Pods that select another one than it reported started no machine of the pool."""
    names = ("w1", "w2", "w3")
    site = Site(parsed(dict.fromkeys(names, "h100"), {"h100": (0, 3, 50)}))
    for name in names:
        text = "arm64" if name == "w1" else others
        in_service(site, name, labels={"kubernetes.io/arch": text} if text else {})
    assert site.server.template("h100").labels["kubernetes.io/arch"] == "amd64"


def test_a_kubelet_that_is_too_old_for_the_control_plane_gets_no_pods(site: Site) -> None:
    site.store.api_server = "v1.40.0"
    site.server.increase("t4", 1)
    site.boots("w3", kubelet="v1.36.9-other")
    looks(site)
    assert site.store.seen_nodes()["w3"].is_starting
    assert not site.store.proofs
    found = site.store.states()["w3"]
    assert found.error.startswith("its kubelet is v1.36.9, more than 3 minors older than the control plane, v1.40.0")
    site.server.delete("t4", ["gpunodes://w3"])
    site.settle({"w3": Phase.FAILED})
    site.time += decisions.RETRY_S + 1
    site.look()
    assert site.server.size("t4").most == 0, "another boot would not change that"
    site.store.api_server = "v1.39.2"
    site.look()
    assert site.server.size("t4").most == 1


def test_the_version_of_a_kubelet_is_remembered(site: Site) -> None:
    in_service(site, "w3", kubelet="v1.35.1")
    assert site.store.states()["w3"].kubelet == "v1.35.1"


def test_a_plan_of_an_earlier_release_has_no_machine_id() -> None:
    planned = document(THREE, POOLS)
    del planned["machines"]["w1"]["identity"]["machine_id"]
    site = Site(plan.parse(planned))
    site.server.increase("h100", 1)
    site.settle({"w1": Phase.STARTING})
    site.boots("w1", machine_id=machine_id("w9"))
    looks(site)
    assert site.phases()["w1"] is Phase.ON
