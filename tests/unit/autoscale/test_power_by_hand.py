"""Machines that someone switched beside the autoscaler: noticed, not fought, and never called what they are not."""

from __future__ import annotations

import dataclasses

import pytest
from gpunodes.autoscale import decisions, kept_off, nodes
from gpunodes.autoscale.kept_off import KeptOff
from gpunodes.autoscale.server import NotPossible, PowerServer
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.repair.maintenance import Maintenance

from tests.power_fleet import MemoryMachines, Site, parsed

POOLS = {"h100": (0, 2, 50), "t4": (0, 1, 10)}
BY = KeptOff("root@ctl", 1_800_000_000.0)
NO_WAY_BACK = "switched off by root@ctl with `gpunodes power`: it stays off until it is switched on"


@pytest.fixture
def site() -> Site:
    return Site(parsed({"w1": "h100", "w2": "h100", "w3": "t4"}, POOLS))


def looks(site: Site) -> None:
    """It sees the node, sees that its GPUs are proven, and that it is in service."""
    for _ in range(3):
        site.look()


def asks(site: Site) -> None:
    """Let the time pass after which a BMC is asked again."""
    site.server._questions._asked.clear()


def answered(site: Site) -> None:
    """Let the server ask each BMC that it asks about now once, and see the answers."""
    asks(site)
    site.look()
    site.until(lambda: not site.server._questions._open)
    site.look()


def in_service(site: Site, name: str = "w3") -> None:
    site.server.increase(site.plan.machines[name].pool, 1)
    site.boots(name, labels={"gpunodes.dev/pool": site.plan.machines[name].pool})
    looks(site)
    assert site.phases()[name] is Phase.ON


def not_ready(site: Site, name: str = "w3") -> None:
    site.store.objects[name]["status"]["conditions"][0]["status"] = "Unknown"


def warnings(site: Site) -> list[tuple[str, str]]:
    return [(name, reason) for name, reason, kind in site.store.events if kind == "Warning"]


# Off, by `gpunodes power NAME off`


def test_a_machine_that_is_off_and_reserved_is_not_switched_on(site: Site) -> None:
    site.store.keep_off("w3", BY)
    # The server has not seen it yet: it reads it again while it holds the machine's lock.
    site.server.increase("t4", 1)
    site.settle({"w3": Phase.BY_HAND})
    with pytest.raises(NotPossible, match="0 machines"):
        site.server.increase("t4", 1)
    assert not site.machines.orders
    site.look()
    assert site.store.states()["w3"].reason == NO_WAY_BACK
    site.time += 40 * 86400
    site.look()
    assert site.phases()["w3"] is Phase.BY_HAND, "not even after 30 days"
    # `gpunodes power w3 on`, but its BMC refused: it is off, and the autoscaler's again.
    site.store.keep_off("w3", None)
    site.look()
    assert site.phases()["w3"] is Phase.LEFT_ALONE
    asks(site)
    site.looks_until(site.server, lambda: site.phases()["w3"] is Phase.STARTING)
    assert "off for 30 days" in site.store.states()["w3"].reason


def test_a_machine_that_a_user_switches_off_while_it_starts_is_not_switched_on_again(site: Site) -> None:
    """It counted as failed, and was switched on half an hour later."""
    site.server.increase("t4", 1)
    site.until(lambda: site.machines.on == {"w3"})
    site.machines.on.clear()
    site.store.keep_off("w3", BY)
    site.look()
    found = site.store.states()["w3"]
    assert (found.phase, found.reason, found.error) == (Phase.BY_HAND, NO_WAY_BACK, "")
    assert site.server.size("t4") == decisions.Size(0, 0, 0), "the other pool is used"
    site.time += decisions.RETRY_S + 200
    site.look()
    assert site.machines.orders == [("w3", "on")]


def test_the_record_ends_when_the_machine_is_on_again(site: Site) -> None:
    in_service(site)
    site.store.keep_off("w3", dataclasses.replace(BY, boot_id="boot-w3"))
    site.look()
    assert site.phases()["w3"] is Phase.BY_HAND, "its node still counts as ready"
    not_ready(site)
    site.look()
    assert site.phases()["w3"] is Phase.BY_HAND
    # By its button.
    site.boots("w3")
    site.store.objects["w3"]["status"]["nodeInfo"]["bootID"] = "the next boot"
    looks(site)
    assert site.phases()["w3"] is Phase.ON
    assert site.store.off == {}


def test_a_machine_that_is_switched_on_again_is_off_on_purpose_no_longer_though_its_node_is_not_ready(
    site: Site,
) -> None:
    """It stayed by-hand: no repair touched the machine, which was on and broken."""
    in_service(site)
    not_ready(site)
    site.machines.on.clear()
    site.store.keep_off("w3", dataclasses.replace(BY, boot_id="boot-w3"))
    site.look()
    assert "w3" in site.store.switched_off()
    answered(site)
    assert site.phases()["w3"] is Phase.BY_HAND, "it is reserved: its BMC decides nothing"
    # `gpunodes power w3 on`
    site.machines.on = {"w3"}
    site.store.keep_off("w3", None)
    site.look()
    assert site.phases()["w3"] is Phase.LEFT_ALONE
    assert "w3" not in site.store.switched_off()
    assert site.server.size("t4") == decisions.Size(0, 0, 0)


def test_a_machine_that_lost_its_power_is_off_on_purpose_until_its_bmc_says_that_it_is_on(site: Site) -> None:
    in_service(site)
    not_ready(site)
    site.machines.on.clear()
    site.look()
    for _ in range(2):
        site.time += 61
        site.asks_until(lambda: site.phases()["w3"] is Phase.BY_HAND)
        answered(site)
        assert "w3" in site.store.switched_off(), "it is still off"
        site.machines.on = {"w3"}
        site.asks_until(lambda: site.phases()["w3"] is Phase.LEFT_ALONE)
        assert site.store.states()["w3"].reason == decisions.SWITCHED_ON
        assert "w3" not in site.store.switched_off()
        # Its power fails once more before its node is ready.
        site.machines.on.clear()
        site.look()
    site.time += 61
    site.asks_until(lambda: site.phases()["w3"] is Phase.BY_HAND)
    site.store.objects["w3"]["status"]["conditions"][0]["status"] = "True"
    site.look()
    assert site.phases()["w3"] is Phase.ON


def test_a_machine_that_is_off_for_seconds_was_not_switched_off_by_someone(site: Site) -> None:
    """`gpunodes power w3 cycle`: the BMC was asked in these seconds."""
    in_service(site)
    not_ready(site)
    site.look()
    site.time += 61
    for is_on in (set(), {"w3"}, set()):
        site.machines.on = is_on
        answered(site)
        assert site.phases()["w3"] is Phase.ON
    answered(site)
    assert site.phases()["w3"] is Phase.BY_HAND


@pytest.mark.parametrize(
    ("mark", "phase"),
    [
        ({"gpunodes.dev/cordoned-by": "r1"}, Phase.ON),
        ({"gpunodes.dev/rollout": "r1"}, Phase.ON),
        ({"gpunodes.dev/cordoned-by": "r1", "gpunodes.dev/needs-repair": "GPU 3"}, Phase.BY_HAND),
    ],
)
def test_a_machine_that_a_repair_leaves_off_was_not_switched_off_by_someone(
    site: Site, mark: dict[str, str], phase: Phase
) -> None:
    """It was off on purpose then, and the next repair left it alone."""
    in_service(site)
    not_ready(site)
    site.store.objects["w3"]["metadata"]["annotations"] |= mark
    site.store.objects["w3"]["spec"]["unschedulable"] = True
    site.look()
    site.time += 61
    site.machines.on = set()
    for _ in range(2):
        answered(site)
    assert site.phases()["w3"] is phase


def test_a_machine_found_off_while_it_starts_is_not_said_to_be_broken(site: Site) -> None:
    """Someone switched it off at its BMC; nothing records that."""
    site.server.increase("t4", 1)
    site.until(lambda: ("w3", "SwitchedOn", "Normal") in site.store.events)
    site.machines.on.clear()
    site.server.delete("t4", ["gpunodes://w3"])
    site.settle({"w3": Phase.BY_HAND})
    assert site.store.states()["w3"].reason == decisions.SWITCHED_OFF
    assert not warnings(site)


def test_a_machine_that_never_came_on_is_broken(site: Site) -> None:
    site.server.increase("t4", 1)
    site.until(lambda: ("w3", "SwitchedOn", "Normal") in site.store.events)
    site.server.decrease("t4", 1)
    site.settle({"w3": Phase.OFF})
    site.machines.refuses = {"w3"}
    site.server.increase("t4", 1)
    site.until(lambda: site.store.states()["w3"].error)
    site.machines.refuses = set()
    site.server.delete("t4", ["gpunodes://w3"])
    site.settle({"w3": Phase.FAILED})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"by": 1, "since": 1, "boot_id": ""}', "[" * 100_000, "x" * 2000])
def test_a_record_of_another_form_is_none(text: str) -> None:
    assert kept_off.parse({"w1": text, "w2": BY.text()}) == {"w2": BY}
    assert kept_off.parse(text) == {}


# Without a BMC


@pytest.fixture
def woken(site: Site) -> Site:
    """The machine w3 has no BMC: it is off if nothing of it responds."""
    bmc = {"gpunodes_bmc_type": "wol", "gpunodes_bmc_address": ""}
    machines = {**site.plan.machines, "w3": dataclasses.replace(site.plan.machines["w3"], bmc=bmc)}
    site.plan = dataclasses.replace(site.plan, machines=machines)
    site.machines = MemoryMachines(set())
    site.server = site.new_server()
    return site


def test_a_kernel_that_has_stopped_is_not_a_machine_that_someone_switched_off(woken: Site) -> None:
    in_service(woken)
    not_ready(woken)
    woken.machines.on.clear()
    woken.look()
    woken.time += 61
    woken.looks_until(woken.server, lambda: woken.store.states()["w3"].error)
    found = woken.store.states()["w3"]
    assert (found.phase, found.error) == (Phase.ON, decisions.OFF_OR_HANGS)
    woken.store.objects["w3"]["status"]["conditions"][0]["status"] = "True"
    woken.look()
    assert woken.store.states()["w3"].error == ""


def test_a_machine_without_a_bmc_that_a_user_switched_off_is_called_so(woken: Site) -> None:
    in_service(woken)
    not_ready(woken)
    woken.machines.on.clear()
    woken.store.keep_off("w3", dataclasses.replace(BY, boot_id="boot-w3"))
    woken.look()
    found = woken.store.states()["w3"]
    assert (found.phase, found.reason, found.error) == (Phase.BY_HAND, NO_WAY_BACK, "")


# On, without the autoscaler


def test_gpus_of_a_machine_that_someone_switched_on_fail_their_proof_once_in_a_while(site: Site) -> None:
    """It was called on, without an Event, and a pod after the other failed there."""
    site.store.broken = {"w3"}
    made, create = [], site.store.create_pod

    def counted(path: str, pod: dict[str, object]) -> None:
        made.append(pod)
        create(path, pod)

    site.store.create_pod = counted  # type: ignore[method-assign]  # a spy
    site.machines.on.add("w3")
    site.boots("w3")
    for _ in range(9):
        site.look()
    found = site.store.states()["w3"]
    assert found.phase is Phase.ON
    assert found.error.startswith("a pod that requests its 2 nvidia.com/gpu fails")
    assert (len(made), warnings(site)) == (1, [("w3", "NotProven")])
    assert site.store.seen_nodes()["w3"].is_starting
    site.time += 601
    looks(site)
    assert (len(made), warnings(site)) == (2, [("w3", "NotProven")])
    # Another boot has another proof, at once.
    site.store.broken = set()
    site.store.objects["w3"]["status"]["nodeInfo"]["bootID"] = "the next boot"
    looks(site)
    site.look()
    found = site.store.states()["w3"]
    assert (found.phase, found.error) == (Phase.ON, "")
    assert not site.store.seen_nodes()["w3"].is_starting


def test_a_machine_that_someone_switched_on_and_that_does_not_serve_is_an_error_and_takes_no_place(site: Site) -> None:
    """It was on without an error, met the min of its pool, and no pod could use it."""
    site.machines.on.add("w3")
    site.boots("w3", gpus=1)
    looks(site)
    assert site.server.size("t4") == decisions.Size(0, 1, 1), "it may come to serve"
    site.time += 101
    looks(site)
    found = site.store.states()["w3"]
    wanted = "its node was not in service within 100 s: it offers 1 of 2 nvidia.com/gpu"
    assert (found.phase, found.error) == (Phase.ON, wanted)
    assert warnings(site) == [("w3", "NotInService")]
    assert site.server.size("t4") == decisions.Size(0, 0, 0)
    assert site.server.pool_of("gpunodes://w3", "w3") == ""
    # Its GPUs are back.
    site.store.objects["w3"]["status"]["allocatable"]["nvidia.com/gpu"] = "2"
    looks(site)
    site.look()
    assert site.store.states()["w3"].error == ""
    assert site.server.size("t4") == decisions.Size(0, 1, 1)


def test_nothing_is_remembered_without_an_autoscaler_of_a_machine_that_is_left_alone() -> None:
    assert decisions.without_autoscaler(MachineState(Phase.LEFT_ALONE, 1.0), None, 2.0) is None


@pytest.mark.parametrize("why", ["", "maintenance", "cordon"])
def test_a_machine_that_a_user_switched_on_is_as_any_other_unless_it_is_held(site: Site, why: str) -> None:
    site.machines.on.add("w3")
    site.boots("w3", labels={"gpunodes.dev/pool": "t4"})
    looks(site)
    if why == "maintenance":
        site.store.objects["w3"]["metadata"]["annotations"]["gpunodes.dev/maintenance"] = Maintenance("demo").text()
    site.store.objects["w3"]["spec"]["unschedulable"] = why == "cordon"
    site.look()
    assert site.phases()["w3"] is Phase.ON
    assert (nodes.DISABLED in site.store.objects["w3"]["metadata"]["annotations"]) == bool(why)
    if why:
        with pytest.raises(NotPossible, match="w3 stays on"):
            site.server.delete("t4", ["gpunodes://w3"])
        return
    site.server.delete("t4", ["gpunodes://w3"])
    site.settle({"w3": Phase.OFF})


# Machines whose BMC does not say whether they are on


def test_a_machine_whose_bmc_does_not_answer_is_known_with_the_cause() -> None:
    """It had no state: `autoscale up` waited for one until its time was over, and knew no cause."""
    site = Site(parsed({"w1": "h100", "w3": "t4"}, POOLS))
    site.store.texts.clear()
    site.machines.refuses = {"w3"}
    again = site.new_server()
    found = site.store.states()["w3"]
    assert (found.phase, found.reason) == (Phase.LEFT_ALONE, decisions.NOT_KNOWN)
    assert found.error.startswith("the BMC of w3 refuses request")
    assert again.size("t4") == decisions.Size(0, 0, 0), "it is not used"
    # It is on, and has no node.
    site.machines.refuses, site.machines.on = set(), {"w3"}
    assert answer_of(site, again) == (Phase.LEFT_ALONE, decisions.ON_WITHOUT_NODE, "")
    # It is off.
    site.machines.on = set()
    assert answer_of(site, again) == (Phase.OFF, decisions.FOUND_OFF, "")
    assert again.size("t4").most == 1


def answer_of(site: Site, server: PowerServer, name: str = "w3") -> tuple[Phase, str, str]:
    """The state of a machine when its BMC has been asked again."""
    before = site.store.texts[name]
    server._questions._asked.clear()
    site.looks_until(server, lambda: site.store.texts[name] != before)
    found = site.store.states()[name]
    return found.phase, found.reason, found.error
