"""The plan of the power server: from settings, machines and nodes to the document that the server reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from gpunodes import settings
from gpunodes.autoscale import plan
from gpunodes.errors import WrongInput
from gpunodes.identity.model import MachineIdentity
from gpunodes.planner import node_templates
from gpunodes.planner.autoscale import ScaledMachine, document, problems, role_pools

TEMPLATE = {"labels": {"gpunodes.dev/pool": "h100"}, "taints": [], "capacity": {"nvidia.com/gpu": "8"}}


def machine(name: str, template: Any = TEMPLATE, **given: Any) -> ScaledMachine:
    found = settings.resolve({"gpunodes_bmc_type": "redfish", "gpunodes_bmc_address": "b", **given})
    return ScaledMachine(
        name, "h100", found, MachineIdentity(name, system_uuid="u"), f"{name}.node", "127.0.0.1", template
    )


def cluster(**given: Any) -> dict[str, Any]:
    return settings.resolve({"gpunodes_pools": {"h100": {"max": 2, "priority": 5}, "cpu": {}}, **given})


def test_the_document_is_one_that_the_server_reads() -> None:
    found = plan.parse(document(cluster(), [machine("w1"), machine("w2", None)], {}))
    assert found.of_pool == {"h100": ("w1.node", "w2.node")}
    assert found.machines["w2.node"].capacity == {"nvidia.com/gpu": "8"}, "as another machine of its pool"
    assert found.machines["w1.node"].identity.system_uuid == "u"
    assert found.boot_s == 1800.0


def test_the_document_has_no_password() -> None:
    found = document(cluster(), [machine("w1", gpunodes_bmc_password="hunter2")], {})
    assert "hunter2" not in str(found)
    assert "password" not in str(found)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (True, "true"),
        ("", "true"),
        ("false", "false"),
        (False, "false"),
        ("/etc/ca.pem", "/etc/ca.pem"),
    ],
)
def test_the_text_of_a_certificate_authority_is_there_once(given: object, wanted: str) -> None:
    cas = {"/etc/ca.pem": "-----BEGIN CERTIFICATE-----"}
    found = document(cluster(), [machine("w1", gpunodes_bmc_verify=given), machine("w2")], cas)
    assert found["authorities"] == (cas if wanted in cas else {})
    assert found["machines"]["w1.node"]["bmc"]["gpunodes_bmc_verify"] == wanted


@pytest.mark.parametrize(
    ("changed", "own_image", "why"),
    [
        ({"node": ""}, False, "join it first"),
        ({"settings": settings.resolve({})}, False, "it has no BMC"),
        (
            {"settings": settings.resolve({"gpunodes_bmc_type": "command", "gpunodes_bmc_command": "x"})},
            False,
            "gpunodes_power_image",
        ),
        ({"settings": settings.resolve({"gpunodes_bmc_type": "command", "gpunodes_bmc_command": "x"})}, True, ""),
        ({"settings": settings.resolve({"gpunodes_bmc_type": "wol"})}, True, "set gpunodes_bmc_mac"),
        (
            {"settings": settings.resolve({"gpunodes_bmc_type": "wol", "gpunodes_bmc_mac": "00:25:90:00:00:07"})},
            False,
            "",
        ),
        ({"labels": {"gpunodes.dev/sharing": "mig-3g.40gb-1-1g.10gb-4"}}, False, "use one"),
        ({"labels": {"gpunodes.dev/sharing": "mig-1g.10gb-7"}}, False, ""),
        ({"labels": {"gpunodes.dev/sharing": "time-slicing-4"}}, False, ""),
        ({}, False, ""),
    ],
)
def test_machines_that_cannot_be_switched_are_named(changed: dict[str, Any], own_image: bool, why: str) -> None:
    found = list(problems([dataclasses.replace(machine("w1"), **changed)], own_image=own_image))
    assert bool(found) == bool(why)
    assert not why or why in found[0][1]


def test_a_pool_without_machines_and_a_node_twice_are_refused() -> None:
    with pytest.raises(WrongInput, match="the pool h100 of gpunodes_pools has no machine"):
        document(cluster(), [], {})
    twice = dataclasses.replace(machine("w2"), node="w1.node")
    with pytest.raises(WrongInput, match="another machine has the same node"):
        document(cluster(), [machine("w1"), twice], {})


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(version=2),
        lambda found: found["pools"]["h100"].update(min=3),
        lambda found: found["machines"]["w1.node"].update(pool="nothing"),
        lambda found: found["machines"].update({"../etc": found["machines"]["w1.node"]}),
        lambda found: found["machines"]["w1.node"]["bmc"].update(other="x"),
        lambda found: found.pop("pools"),
        lambda found: found.update(boot_s=float("nan")),
    ],
)
def test_any_other_document_is_refused(change: Any) -> None:
    found = document(cluster(), [machine("w1")], {})
    change(found)
    with pytest.raises(WrongInput, match="the plan of the power server is invalid"):
        plan.parse(found)


def test_a_spare_pod_fits_on_the_smallest_machine_of_its_pool() -> None:
    given = cluster(gpunodes_pools={"h100": {"max": 2, "spare": 1}})
    taint = {"key": "team", "value": "a", "effect": "NoSchedule"}
    small = {**TEMPLATE, "capacity": {"nvidia.com/gpu": "4"}, "taints": [taint]}
    large = {**TEMPLATE, "taints": [taint]}
    off = {**TEMPLATE, "capacity": {"nvidia.com/gpu": "0"}, "taints": [taint]}
    machines = [machine("w0", off), machine("w1", small), machine("w2", large)]
    found = role_pools(given, document(given, machines, {}))
    assert found == {"h100": {"priority": 0, "spare": 1, "gpus": 4, "taints": [taint]}}


def test_no_single_machine_decides_what_a_new_node_of_its_pool_is() -> None:
    taint = {"key": "team", "value": "a", "effect": "NoSchedule"}
    odd = {"key": "own", "value": "", "effect": "NoSchedule"}
    labels = {"gpunodes.dev/pool": "h100", "rack": "r1"}
    good = {"labels": labels, "taints": [taint], "capacity": {"cpu": "7500m", "memory": "60Gi", "nvidia.com/gpu": "8"}}
    given = {"labels": {"gpunodes.dev/pool": "h100", "tier": "1"}, "taints": [{"key": "gpu", "effect": "NoExecute"}]}
    attacks: list[dict[str, Any]] = [
        {"labels": {**labels, "app": "x"}, "taints": [odd, taint], "capacity": {"own/x": "9", "nvidia.com/gpu": "99"}},
        {"labels": {"rack": "r1", "tier": "9"}, "taints": [taint], "capacity": {"nvidia.com/gpu": "0", "cpu": "many"}},
        {**good, "capacity": {}},
        {**good, "capacity": {"cpu": "1m", "memory": "1", "nvidia.com/gpu": "1"}},
        # What it takes away, or changes, decided that pods that select it started no machine of the pool.
        {**good, "labels": {}, "taints": []},
        {**good, "labels": {**labels, "rack": "r9"}, "taints": [{**taint, "value": "b"}]},
        {**good, "taints": [odd, odd]},
    ]
    for attack in attacks:
        found = node_templates.template([attack, good, good], given)
        assert found["labels"] == {"gpunodes.dev/pool": "h100", "tier": "1", "rack": "r1"}
        assert found["taints"] == [{"key": "gpu", "value": "", "effect": "NoExecute"}, taint]
        assert found["capacity"] == good["capacity"]


def test_of_two_nodes_the_present_plan_decides() -> None:
    taint = {"key": "team", "value": "a", "effect": "NoSchedule"}
    own = {"key": "own", "value": "", "effect": "NoSchedule"}
    repaired = {"gpunodes.dev/needs-repair": "x"}
    good = {"labels": {"rack": "r1", "arch": "amd64"}, "taints": [taint], "capacity": {"nvidia.com/gpu": "8"}}
    odd = {"labels": {"arch": "arm64", "app": "x", **repaired}, "taints": [own], "capacity": {"nvidia.com/gpu": "8"}}
    given: dict[str, Any] = {"labels": {"tier": "1"}, "taints": []}
    before = node_templates.template([good], given)
    for seen in ([good, odd], [odd, good]):
        found = node_templates.template(seen, given, {**before, "labels": {**before["labels"], **repaired}})
        assert found["labels"] == {"rack": "r1", "arch": "amd64", "tier": "1"}
        assert found["taints"] == [taint]
        alone = node_templates.template(seen, given)
        assert (alone["labels"], alone["taints"]) == ({"tier": "1"}, []), "without a plan neither node decides"


def test_a_new_plan_keeps_what_one_of_two_nodes_took_away() -> None:
    shape = {"labels": {"product": "h100"}, "taints": [], "capacity": {"nvidia.com/gpu": "8"}}
    machines = [machine("w1", shape), machine("w2", {**shape, "labels": {}})]
    earlier = {"h100": {"labels": {"product": "h100"}, "taints": [], "capacity": {}}}
    found = document(cluster(), machines, {}, earlier=earlier)["pools"]["h100"]["template"]
    assert found["labels"]["product"] == "h100"


def test_the_settings_of_all_machines_are_in_the_template_of_their_pool() -> None:
    taint = {"key": "team", "effect": "NoSchedule"}
    empty = {"labels": {}, "taints": [], "capacity": {"nvidia.com/gpu": "0"}}
    machines = [
        dataclasses.replace(machine(name, empty, gpunodes_node_taints=[taint]), labels={"tier": "1", "own": name})
        for name in ("w1", "w2")
    ]
    pool = plan.parse(document(cluster(), machines, {})).pools["h100"]
    assert pool.given.labels == pool.template.labels == {"tier": "1"}
    assert pool.given.taints == pool.template.taints == [{"key": "team", "value": "", "effect": "NoSchedule"}]
    assert pool.template.capacity == {}


def test_the_plan_of_an_earlier_release_is_read() -> None:
    found = document(cluster(), [machine("w1")], {})
    del found["pools"]["h100"]["given"]
    assert plan.parse(found).pools["h100"].given.labels == {}
