"""Machines that were off for so long that the certificate of their kubelet ended."""

from __future__ import annotations

import pytest
from gpunodes.autoscale import state
from gpunodes.autoscale.state import Kubelet, Phase

from tests.power_fleet import Site, node_object, parsed


@pytest.fixture
def site() -> Site:
    return Site(parsed({"w1": "h100", "w3": "t4"}, {"h100": (0, 1, 50), "t4": (0, 1, 10)}))


def looks(site: Site) -> None:
    """It sees the node, sees that its GPUs are proven, and that it is in service."""
    for _ in range(3):
        site.look()


def in_service(site: Site, name: str) -> None:
    """Switch a machine on, let it boot, and bring it into service."""
    site.server.increase(site.plan.machines[name].pool, 1)
    site.settle({name: Phase.STARTING})
    site.boots(name)
    looks(site)
    assert site.phases()[name] is Phase.ON


def give_up(site: Site, name: str, kubelet: Kubelet) -> None:
    """Switch a machine on; its node never registers."""
    site.machines.kubelets[name] = kubelet
    site.server.increase(site.plan.machines[name].pool, 1)
    site.until(lambda: name in site.machines.on)
    site.time += 200
    site.looks_until(site.server, lambda: site.phases()[name] is Phase.FAILED)


def served_long_ago(site: Site, name: str, days: float) -> None:
    """A machine that was in service once, and switched off so many days ago."""
    in_service(site, name)
    site.server.delete(site.plan.machines[name].pool, [f"gpunodes://{name}"])
    site.settle({name: Phase.OFF})
    site.time += days * 86400


def test_a_machine_whose_certificate_has_ended_is_told_apart_and_needs_a_join(site: Site) -> None:
    served_long_ago(site, "w3", 400)
    give_up(site, "w3", Kubelet.DOWN)
    site.until(lambda: ("w3", "NeedsJoin", "Warning") in site.store.events)
    found = site.store.states()["w3"]
    assert found.needs_join
    assert found.error == (
        "its kubelet does not run after 400 days out of service; its certificate has probably ended: "
        "`gpunodes power w3 on`, then `gpunodes join w3`"
    )
    site.time += 40 * 86400
    site.look()
    assert site.server.size("t4").most == 0, "no capacity, however long ago"
    orders = [order for name, order in site.machines.orders if name == "w3"]
    assert orders == ["on", "off", "on", "off"], "it is not tried again, not even after 30 days"
    server = site.new_server()
    assert server.size("t4").most == 0, "the next server knows it"
    # The user switches it on and joins it.
    site.machines.on.add("w3")
    site.store.objects["w3"] = node_object("w3", starting=True, labels={"gpunodes.dev/pool": "t4"})
    for _ in range(3):
        server.look()
    found = site.store.states()["w3"]
    assert (found.phase, found.needs_join, found.error) == (Phase.ON, False, "")
    assert server.size("t4").most == 1


@pytest.mark.parametrize(
    ("days", "kubelet", "wanted"),
    [
        (400, Kubelet.SILENT, "its system did not respond"),
        (400, Kubelet.RUNS, "its kubelet runs, but registers no node"),
        (20, Kubelet.DOWN, "its system responds, its kubelet does not run"),
    ],
)
def test_another_boot_that_never_registers_is_tried_again(
    site: Site, days: float, kubelet: Kubelet, wanted: str
) -> None:
    served_long_ago(site, "w3", days)
    give_up(site, "w3", kubelet)
    found = site.store.states()["w3"]
    assert not found.needs_join
    assert found.error.endswith(wanted)
    assert site.server.size("t4").most == 0
    site.time += 1900
    assert site.server.size("t4").most == 1


def test_why_a_boot_failed_is_written_once_however_often_the_order_is_repeated(site: Site) -> None:
    served_long_ago(site, "w3", 20)
    site.server.increase("t4", 1)
    site.until(lambda: "w3" in site.machines.on)
    site.machines.kubelets["w3"] = Kubelet.DOWN
    site.machines.refuses = {"w3"}
    site.server.delete("t4", ["gpunodes://w3"])
    site.until(lambda: "refuses" in site.store.states()["w3"].error)
    site.machines.refuses = set()
    server = site.new_server()
    site.looks_until(server, lambda: site.phases()["w3"] is Phase.FAILED)
    assert site.store.states()["w3"].reason.count("its kubelet does not run") == 1


def test_a_failed_start_does_not_count_as_service(site: Site) -> None:
    """The last boot that failed is no proof of a valid certificate."""
    served_long_ago(site, "w3", 400)
    give_up(site, "w3", Kubelet.SILENT)
    site.time += 1900
    give_up(site, "w3", Kubelet.DOWN)
    assert site.store.states()["w3"].needs_join


def test_states_of_an_earlier_release_are_read() -> None:
    old = '{"phase": "off", "since": 1, "reason": "", "error": "", "used": 7, "saved": null}'
    found = state.parse(old)
    assert found
    assert (found.served, found.needs_join) == (7.0, False)
    again = state.parse(found.text())
    assert again == found
