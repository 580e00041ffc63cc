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
        ({"serves": True}, False, "it serves shared storage"),
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
    limits = {"limits": {"nvidia.com/gpu": 4}}
    found = role_pools(given, document(given, machines, {}), [])
    assert found == {"h100": {"priority": 0, "spare": 1, "taints": [taint], "resources": limits}}
    given = cluster(gpunodes_pools={"h100": {"max": 2}})
    found = role_pools(given, document(given, machines, {}), [])
    assert found == {"h100": {"priority": 0, "spare": 0, "taints": [taint]}}


def daemon(cpu: str = "", memory: str = "", **more: Any) -> dict[str, Any]:
    """A DaemonSet whose pods request so much."""
    requests = {name: text for name, text in (("cpu", cpu), ("memory", memory)) if text}
    containers = [{"name": "c", "resources": {"requests": requests}}, {"name": "without"}]
    return {"metadata": {"name": "d"}, "spec": {"template": {"spec": {"containers": containers, **more}}}}


def spare_requests(*daemons: dict[str, Any], **capacity: str) -> dict[str, str]:
    """What a spare pod requests on machines with 8 CPUs and 100 GiB, or ``capacity``."""
    given = cluster(gpunodes_pools={"h100": {"max": 2, "spare": 1}})
    labels = {"gpunodes.dev/pool": "h100"}
    own = {"labels": labels, "taints": [], "capacity": {"cpu": "8", "memory": "100Gi", **capacity}}
    large = {**own, "capacity": {"cpu": "64", "memory": "500Gi"}}
    plan_of = document(given, [machine("w1", large), machine("w2", own), machine("w3", None)], {})
    found = role_pools(given, plan_of, daemons)["h100"]["resources"]
    assert list(found) == ["requests"]
    requests: dict[str, str] = found["requests"]
    return requests


def test_without_gpus_a_spare_pod_fits_where_only_daemonsets_have_pods() -> None:
    """It requested nothing: it was on a machine that was in use, and none stayed free."""
    assert spare_requests() == {"cpu": "8000m", "memory": "97280Mi"}, "95 % of the memory: another boot may have less"
    assert spare_requests(cpu="7500m") == {"cpu": "7500m", "memory": "97280Mi"}
    network = daemon("100m", "50Mi", nodeSelector={"kubernetes.io/os": "linux"})
    assert spare_requests(network, daemon()) == {"cpu": "7900m", "memory": "97230Mi"}
    own = daemon("1", nodeSelector={"gpunodes.dev/pool": "h100"})
    elsewhere = daemon("1", nodeSelector={"gpunodes.dev/pool": "cpu"})
    control = daemon("1", nodeSelector={"node-role.kubernetes.io/control-plane": ""})
    assert spare_requests(own, elsewhere, control)["cpu"] == "7000m"
    limits: dict[str, Any] = {"containers": [{"resources": {"limits": {"cpu": "2"}}}], "nodeSelector": None}
    assert spare_requests(daemon(**limits))["cpu"] == "6000m"
    first = [
        {"resources": {"requests": {"cpu": "3"}}},
        {"restartPolicy": "Always", "resources": limits["containers"][0]["resources"]},
    ]
    assert spare_requests(daemon("500m", initContainers=first))["cpu"] == "5000m", "the first one, or both others"


def test_daemonsets_of_any_user_take_no_more_than_half_of_a_spare_machine() -> None:
    assert spare_requests(daemon("1000"))["cpu"] == "8000m", "it runs nowhere"
    assert spare_requests(daemon("7"), daemon("7"), daemon("many"))["cpu"] == "4000m"


def test_spare_machines_of_which_nothing_is_known_are_refused() -> None:
    given = cluster(gpunodes_pools={"h100": {"max": 2, "spare": 1}})
    with pytest.raises(
        WrongInput, match="the pool h100 of gpunodes_pools has spare machines, and CPU and memory of none"
    ):
        role_pools(given, document(given, [machine("w1", None)], {}), [])


def test_spare_machines_with_mps_are_refused() -> None:
    """A pod may request one share there: the kubelet refused the spare pods again and again."""
    for sharing, refused in (("mps-4", True), ("time-slicing-4", False), ("mig-1g.10gb-7", False)):
        own = dataclasses.replace(machine("w1"), labels={"gpunodes.dev/sharing": sharing})
        for spare in (0, 1):
            given = cluster(gpunodes_pools={"h100": {"max": 2, "spare": spare}})
            if not (refused and spare):
                document(given, [own], {})
                continue
            with pytest.raises(WrongInput, match="and pods share the GPUs of w1 by MPS"):
                document(given, [own], {})


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
