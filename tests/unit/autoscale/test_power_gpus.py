"""Nodes that offer more GPUs than their machines are known to have: root on a node writes what it offers."""

from __future__ import annotations

import pytest
from gpunodes.autoscale import nodes, plan
from gpunodes.autoscale.nodes import MORE_GPUS, STARTING
from gpunodes.autoscale.server import NotPossible
from gpunodes.autoscale.state import Phase

from tests.power_fleet import CAPACITY, GPU, POOLS, THREE, Site, document, in_service, looks, node_object, parsed

BOASTS = "it offers 64 nvidia.com/gpu, and 2 are known: it gets no pods; if its machine has so many, run"


@pytest.fixture
def site() -> Site:
    return Site(parsed(THREE, POOLS))


def offers(site: Site, name: str, count: str, resource: str = GPU) -> None:
    site.store.objects[name]["status"]["allocatable"][resource] = count


def taints(site: Site, name: str) -> set[str]:
    return {each["key"] for each in site.store.objects[name]["spec"]["taints"]}


def told(site: Site) -> list[tuple[str, str]]:
    return [(name, reason) for name, reason, kind in site.store.events if kind == "Warning"]


@pytest.mark.parametrize(
    ("resource", "count", "error"),
    [
        (GPU, "64", BOASTS),
        (GPU, "1k", "it offers a number of GPUs that no device plugin writes"),
        ("nvidia.com/mig-1g.10gb", "7", "it offers 7 nvidia.com/mig-1g.10gb, and 0 are known"),
    ],
)
def test_a_node_in_service_that_offers_more_gets_no_pods_and_takes_no_place(
    site: Site, resource: str, count: str, error: str
) -> None:
    in_service(site, "w1")
    before = site.store.states()["w1"]
    offers(site, "w1", count, resource)
    looks(site)
    found = site.store.states()["w1"]
    assert found.phase is Phase.ON
    assert found.error.startswith(error)
    assert found.saved == before.saved, "what it had counts on"
    assert taints(site, "w1") == {MORE_GPUS}
    assert told(site) == [("w1", "MoreGpus")]
    # The autoscaler neither counts on it, nor switches it off: another machine serves.
    assert site.server.size("h100").target == 0
    assert site.server.pool_of("gpunodes://w1", "w1") == ""
    with pytest.raises(NotPossible, match=r"w1 stays on: it offers"):
        site.server.delete("h100", ["gpunodes://w1"])
    site.server.increase("h100", 1)
    site.settle({"w2": Phase.STARTING})


def test_a_node_that_offers_what_is_known_again_is_in_service(site: Site) -> None:
    in_service(site, "w1")
    offers(site, "w1", "64")
    looks(site)
    offers(site, "w1", "2")
    looks(site)
    assert site.store.states()["w1"].error == ""
    assert taints(site, "w1") == set()
    assert site.server.size("h100").target == 1
    assert nodes.DISABLED not in site.store.objects["w1"]["metadata"]["annotations"]


def test_a_node_that_starts_with_more_stays_out_of_service(site: Site) -> None:
    in_service(site, "w1", gpus=64)
    assert taints(site, "w1") == {STARTING, MORE_GPUS}
    assert not site.store.proofs, "a pod of a machine whose root lies proves nothing"
    assert site.store.states()["w1"].error.startswith(BOASTS)
    site.time += 1000
    looks(site)
    assert site.phases()["w1"] is Phase.ON, "another boot would change nothing"
    assert site.machines.orders == [("w1", "on")]


def test_a_node_that_registers_without_the_taint_of_starting_gets_no_pods_either(site: Site) -> None:
    """Root on a machine decides with which taints its kubelet registers it."""
    site.server.increase("h100", 1)
    site.settle({"w1": Phase.STARTING})
    site.boots("w1", gpus=64)
    site.store.objects["w1"]["spec"]["taints"] = []
    looks(site)
    assert taints(site, "w1") == {MORE_GPUS}
    assert site.store.states()["w1"].saved is None


def test_a_machine_that_got_gpus_serves_with_them_when_the_plan_has_them(site: Site) -> None:
    """`gpunodes autoscale up` writes into the plan what its node offers then."""
    in_service(site, "w1", gpus=4)
    seen = site.store.seen_nodes()["w1"].saved(site.plan.state_bytes).shape
    assert seen.capacity[GPU] == "4"
    assert not seen.taints
    given = document(THREE, POOLS)
    given["machines"]["w1"]["capacity"] = dict(seen.capacity)
    site.server.replan(plan.parse(given))
    looks(site)
    looks(site)
    found = site.store.states()["w1"]
    assert (found.phase, found.error) == (Phase.ON, "")
    assert found.saved
    assert found.saved.shape.capacity[GPU] == "4"
    assert taints(site, "w1") == set()


def test_a_machine_whose_gpus_are_unknown_may_have_those_of_its_pool() -> None:
    """Its device plugin did not run when the plan was written."""
    given = document(THREE, POOLS)
    none = {key: text for key, text in CAPACITY.items() if key != GPU}
    given["machines"]["w1"]["capacity"] = given["machines"]["w3"]["capacity"] = none
    site = Site(plan.parse(given))
    in_service(site, "w1", gpus=2)
    assert taints(site, "w1") == set()
    site.server.increase("t4", 1)
    site.settle({"w3": Phase.STARTING})
    site.boots("w3", gpus=2)
    looks(site)
    assert taints(site, "w3") == {STARTING, MORE_GPUS}, "no machine of its pool has GPUs"


def test_a_repaired_gpu_is_not_one_too_many(site: Site) -> None:
    """The plan may be of a day on which the device plugin left one out: what was in service is known, too."""
    in_service(site, "w1")
    given = document(THREE, POOLS)
    given["machines"]["w1"]["capacity"] = {**CAPACITY, GPU: "1"}
    site.server.replan(plan.parse(given))
    looks(site)
    assert taints(site, "w1") == set()


def test_the_taint_leaves_with_the_autoscaler() -> None:
    item = node_object("w1")
    item["spec"]["taints"] = [{"key": MORE_GPUS, "effect": "NoSchedule"}, {"key": "team", "effect": "NoSchedule"}]
    found = nodes.seen(item, "p")
    assert found
    patch = nodes.given_back(found)
    assert patch
    assert [each["key"] for each in patch["spec"]["taints"]] == ["team"]
