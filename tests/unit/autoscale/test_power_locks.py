"""Machines whose lock another command holds: that is no failure of theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gpunodes.autoscale import nodes
from gpunodes.autoscale.nodes import SeenNode
from gpunodes.autoscale.state import Phase
from gpunodes.engine.cluster.errors import NoResponse, Refused

from tests.power_fleet import MemoryMachines, Site, parsed

USER = "root@ctl/power on/boot/1/2/3"


@pytest.fixture
def site() -> Site:
    return Site(parsed({"w1": "h100", "w2": "h100", "w3": "t4"}, {"h100": (0, 2, 50), "t4": (0, 1, 10)}))


def looks(site: Site) -> None:
    """It sees the node, sees that its GPUs are proven, and that it is in service."""
    for _ in range(3):
        site.look()


def ends(site: Site) -> None:
    """Wait until no order is carried out."""
    site.until(lambda: not site.server._orders._busy)


def warnings(site: Site) -> list[tuple[str, str]]:
    return [(name, reason) for name, reason, kind in site.store.events if kind == "Warning"]


def test_another_machine_starts_while_one_is_locked(site: Site) -> None:
    used = site.store.states()["w1"].used
    site.time += 10
    site.machines.locked = {"w1": USER}
    site.server.increase("h100", 1)
    site.settle({"w1": Phase.OFF})
    found = site.store.states()["w1"]
    assert found.reason.startswith("not now: w1 is locked by `gpunodes power on` of root@ctl")
    assert (found.error, found.used) == ("", used)
    assert site.server.size("h100").target == 0
    assert not site.server.instances("h100"), "the autoscaler takes no other pool because of it"
    site.server.increase("h100", 1)
    site.settle({"w2": Phase.STARTING})
    assert site.server.size("h100").most == 1
    site.time += 61
    site.machines.locked = {}
    site.server.increase("h100", 1)
    site.settle({"w1": Phase.STARTING})
    assert not warnings(site)


def test_a_machine_that_a_user_switches_on_meanwhile_serves_and_is_never_switched_off(site: Site) -> None:
    """`gpunodes power w3 on --wait` holds the lock for the whole boot."""
    site.machines.locked = {"w3": USER}
    site.machines.on.add("w3")
    site.server.increase("t4", 1)
    site.settle({"w3": Phase.LEFT_ALONE})
    assert "someone else switches it on" in site.store.states()["w3"].reason
    site.time += 200
    site.look()
    site.machines.locked = {}
    site.boots("w3", labels={"gpunodes.dev/pool": "t4"})
    looks(site)
    assert site.phases()["w3"] is Phase.ON
    assert not site.machines.orders
    assert not warnings(site)


def test_a_server_killed_during_a_start_leaves_a_lock_that_the_next_one_waits_for(site: Site) -> None:
    site.server.increase("t4", 1)
    site.until(lambda: "w3" in site.machines.on)
    # The Lease of the dead one counts for a minute.
    site.machines = MemoryMachines({"w3"})
    site.machines.locked = {"w3": "root@control-1/the power server/boot/1/2/3"}
    site.server = site.new_server()
    for _ in range(3):
        ends(site)
        site.look()
    found = site.store.states()["w3"]
    assert (found.phase, found.error) == (Phase.STARTING, "")
    site.boots("w3", labels={"gpunodes.dev/pool": "t4"})
    looks(site)
    assert site.phases()["w3"] is Phase.ON
    site.machines.locked = {}
    looks(site)
    ends(site)
    assert ("w3", "off") not in site.machines.orders
    assert not warnings(site)


def test_a_server_killed_before_a_start_began_begins_it_when_the_lock_is_free(site: Site) -> None:
    site.server.increase("t4", 1)
    ends(site)
    site.machines = MemoryMachines(set())
    site.machines.locked = {"w3": "root@control-1/the power server/boot/1/2/3"}
    site.server = site.new_server()
    ends(site)
    site.machines.locked = {}
    site.looks_until(site.server, lambda: site.machines.orders == [("w3", "on")])


def test_work_that_excludes_all_others_fails_no_machine(site: Site) -> None:
    """A command on a control plane holds the locks of all machines."""
    site.machines.locked = dict.fromkeys(("w1", "w2", "w3"), "root@ctl/upgrade/boot/1/2/3")
    for pool, machines in (("h100", 2), ("t4", 1)):
        for _ in range(machines):
            site.server.increase(pool, 1)
            ends(site)
        assert site.server.size(pool).most == 0
    assert set(site.phases().values()) == {Phase.OFF}
    site.machines.locked = {}
    site.time += 61
    assert site.server.size("h100").most == 2
    assert not warnings(site)


def test_a_machine_that_is_to_be_switched_off_waits_for_its_lock(site: Site) -> None:
    site.server.increase("t4", 1)
    site.boots("w3", labels={"gpunodes.dev/pool": "t4"})
    looks(site)
    site.machines.locked = {"w3": USER}
    site.server.delete("t4", ["gpunodes://w3"])
    site.until(lambda: site.store.states()["w3"].error)
    ends(site)
    site.look()
    ends(site)
    assert site.phases()["w3"] is Phase.STOPPING
    site.machines.locked = {}
    site.looks_until(site.server, lambda: site.phases()["w3"] is Phase.OFF)
    assert not warnings(site)


def test_a_machine_that_was_given_up_and_that_a_user_brings_into_service_stays_on(site: Site) -> None:
    site.server.increase("t4", 1)
    site.until(lambda: "w3" in site.machines.on)
    site.machines.locked = {"w3": USER}
    site.server.delete("t4", ["gpunodes://w3"])
    site.until(lambda: site.store.states()["w3"].error.startswith("w3 is locked"))
    site.boots("w3", labels={"gpunodes.dev/pool": "t4"})
    site.machines.locked = {}
    site.looks_until(site.server, lambda: site.phases()["w3"] is Phase.ON)
    assert site.machines.orders == [("w3", "on")]
    assert nodes.STOPPING not in [each["key"] for each in site.store.objects["w3"]["spec"]["taints"]]


@pytest.mark.parametrize("holder", ["root@ctl/upgrade/boot/1/2/3", "root@control-1/the power server/boot/1/2/3"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_start_that_is_given_up_with_a_ready_node_fails_though_its_lock_was_held(
    site: Site, holder: str, gpus: int
) -> None:
    """It was called on, without an error, and kept a place in its pool."""
    site.store.broken = {"w3"}
    site.server.increase("t4", 1)
    site.boots("w3", labels={"gpunodes.dev/pool": "t4"}, gpus=gpus)
    looks(site)
    site.machines.locked = {"w3": holder}
    site.time += 121
    site.look()
    site.until(lambda: site.store.states()["w3"].error.startswith("w3 is locked"))
    site.machines.locked = {}
    site.looks_until(site.server, lambda: site.phases()["w3"] is Phase.FAILED)
    wanted = "it offers 1 of 2 nvidia.com/gpu" if gpus == 1 else "a pod that requests its 2 nvidia.com/gpu fails"
    assert wanted in site.store.states()["w3"].error
    assert site.machines.orders == [("w3", "on"), ("w3", "off")]


def test_a_start_that_is_given_up_and_complete_when_its_lock_is_free_stays_on(site: Site) -> None:
    """`gpunodes power w3 on --wait` has just said that it has all its GPUs."""
    site.server.increase("t4", 1)
    site.boots("w3", labels={"gpunodes.dev/pool": "t4"}, gpus=1)
    looks(site)
    site.machines.locked = {"w3": USER}
    site.time += 121
    site.look()
    site.until(lambda: site.store.states()["w3"].error.startswith("w3 is locked"))
    site.store.objects["w3"]["status"]["allocatable"]["nvidia.com/gpu"] = "2"
    site.machines.locked = {}
    site.looks_until(site.server, lambda: site.phases()["w3"] is Phase.ON)
    assert site.machines.orders == [("w3", "on")]


@pytest.mark.parametrize("error", [NoResponse("the API does not respond"), Refused(500, "etcd is away")])
def test_an_api_that_does_not_respond_is_no_failure_of_a_machine(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    switch_on, tries = site.machines.switch_on, []

    def away(name: str, before: Callable[[], None], *, again: bool) -> None:
        tries.append(name)
        if len(tries) == 1:
            raise error
        switch_on(name, before, again=again)

    monkeypatch.setattr(site.machines, "switch_on", away)
    site.server.increase("t4", 1)
    ends(site)
    site.looks_until(site.server, lambda: site.machines.orders == [("w3", "on")])
    assert site.store.states()["w3"].error == ""


@pytest.mark.parametrize("error", [NoResponse("the API does not respond"), Refused(500, "etcd is away")])
def test_a_machine_that_is_given_up_goes_off_though_the_api_was_away(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """No other command brought it into service, though its node is ready."""
    switch_off, tries = site.machines.switch_off, []

    def away(name: str, before: Callable[[], None], then: Callable[[], None]) -> None:
        tries.append(name)
        if len(tries) == 1:
            raise error
        switch_off(name, before, then)

    monkeypatch.setattr(site.machines, "switch_off", away)
    site.server.increase("t4", 1)
    site.boots("w3", labels={"gpunodes.dev/pool": "t4"})
    site.server.delete("t4", ["gpunodes://w3"])
    site.looks_until(site.server, lambda: site.phases()["w3"] is Phase.FAILED)
    assert site.machines.orders == [("w3", "on"), ("w3", "off")]


def test_a_machine_that_this_server_switched_off_is_not_called_a_user_s(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went off, and the server did not see the end of it: the order is repeated, and the boot has failed."""
    delete_node, tries = site.store.delete_node, []

    def away(name: str, may_go: Callable[[SeenNode], bool]) -> None:
        tries.append(name)
        if len(tries) == 1:
            raise NoResponse("the API does not respond")
        delete_node(name, may_go)

    monkeypatch.setattr(site.store, "delete_node", away)
    site.server.increase("t4", 1)
    site.until(lambda: ("w3", "SwitchedOn", "Normal") in site.store.events)
    site.server.delete("t4", ["gpunodes://w3"])
    site.looks_until(site.server, lambda: site.phases()["w3"] is Phase.FAILED)
    assert tries == ["w3", "w3"]
