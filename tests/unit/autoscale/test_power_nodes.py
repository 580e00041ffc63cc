"""Which node is deleted with the machine that was switched off: its own, of whatever boot, and no other."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.autoscale import decisions, nodes, plan
from gpunodes.autoscale.state import Phase
from gpunodes.autoscale.store import Store

from tests.power_fleet import POOLS, THREE, Site, document, in_service, machine_id, node_object, uuid


def made(**bmc: str) -> Site:
    given = document(THREE, POOLS)
    given["machines"]["w3"]["bmc"] |= bmc
    return Site(plan.parse(given))


def begins_to_go(site: Site, *, gives_up: bool) -> None:
    """The server asks a machine to shut down, and waits; its node is in the boot ``boot-w3`` when it begins that."""
    if gives_up:
        site.server.increase("t4", 1)
        site.boots("w3", gpus=0)
    else:
        in_service(site, "w3")
    site.machines.gate.clear()
    site.time += 121 if gives_up else 0
    site.look()
    if not gives_up:
        site.server.delete("t4", ["gpunodes://w3"])
    # The last that it does before it asks the machine.
    site.until(lambda: any(each["key"] == nodes.STOPPING for each in site.store.objects["w3"]["spec"]["taints"]))


@pytest.mark.parametrize("gives_up", [True, False])
def test_a_machine_that_booted_once_more_before_it_went_off_loses_its_node(gives_up: bool) -> None:
    """The node stayed, not ready, with the next boot id: no machine of that name was ever started again."""
    site = made()
    begins_to_go(site, gives_up=gives_up)
    site.store.objects["w3"]["status"]["nodeInfo"]["bootID"] = "boot-w3-again"
    site.machines.gate.set()
    site.settle({"w3": Phase.FAILED if gives_up else Phase.OFF})
    assert "w3" not in site.store.objects
    site.time += decisions.RETRY_S
    site.look()
    assert site.server.size("t4").most == 1


@pytest.mark.parametrize(
    ("identity", "stays"),
    [
        ({"uuid": uuid("w9"), "machine_id": ""}, True),
        ({"machine_id": machine_id("w9")}, True),
        ({"uuid": "", "machine_id": ""}, True),
        ({"provider": "gpunodes://w9"}, True),
        ({}, False),
    ],
)
def test_a_node_that_another_machine_made_meanwhile_stays(identity: dict[str, Any], stays: bool) -> None:
    """In another boot only a UUID or a machine-id shows whose it is."""
    site = made()
    begins_to_go(site, gives_up=True)
    other = node_object("w3", **identity)
    other["status"]["nodeInfo"]["bootID"] = "boot-other"
    site.store.objects["w3"] = other
    site.machines.gate.set()
    site.settle({"w3": Phase.FAILED})
    assert ("w3" in site.store.objects) is stays


def test_a_node_of_another_machine_that_came_after_the_last_look_stays() -> None:
    """The machine had no node when it was given up: so any node of its name was deleted."""
    site = made()
    site.server.increase("t4", 1)
    site.until(lambda: "w3" in site.machines.on)
    site.machines.gate.clear()
    site.time += 121
    site.look()
    site.until(lambda: "w3" not in site.server._begun)
    site.store.objects["w3"] = node_object("w3", uuid=uuid("w9"))
    site.machines.gate.set()
    site.settle({"w3": Phase.FAILED})
    assert "w3" in site.store.objects


def test_without_a_bmc_a_node_in_another_boot_stays() -> None:
    """Its network does not show that it is off: it may have booted again, as by someone who was on site."""
    site = made(gpunodes_bmc_type="wol", gpunodes_bmc_mac="52:54:00:00:00:03")
    begins_to_go(site, gives_up=True)
    site.store.objects["w3"]["status"]["nodeInfo"]["bootID"] = "boot-w3-again"
    site.machines.gate.set()
    site.settle({"w3": Phase.FAILED})
    assert "w3" in site.store.objects


@pytest.mark.parametrize("goes", [True, False])
def test_the_node_that_was_judged_is_deleted(goes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that was made anew since it was read."""
    store, calls = Store(None), list[tuple[Any, ...]]()  # type: ignore[arg-type]  # it sends nothing
    item = node_object("w3")
    monkeypatch.setattr(store, "_find", lambda _: item)
    monkeypatch.setattr(store, "_call", lambda *call: calls.append(call))
    store.delete_node("w3", lambda found: goes and found.node.boot_id == "boot-w3")
    deleted = [("DELETE", "/api/v1/nodes/w3", {"preconditions": {"uid": item["metadata"]["uid"]}})]
    assert calls == (deleted if goes else [])
