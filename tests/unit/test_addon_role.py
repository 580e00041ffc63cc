"""The optional add-ons: their table is complete, and their templates are safe objects; tests/repair applies them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from gpunodes.ansible.filter import general as filters
from gpunodes.errors import WrongInput
from gpunodes.planner import addons, load_balancer

ROLE = Path(__file__).parents[2] / "roles" / "addon"
TEMPLATES = sorted(path.name.removesuffix(".yml.j2") for path in (ROLE / "templates").iterdir())
GOOD = {
    "gpunodes_serving_certificates": True,
    "gpunodes_network": "flannel",
    "gpunodes_pod_subnet": "10.244.0.0/16",
    "gpunodes_service_subnet": "10.96.0.0/12",
    "gpunodes_control_plane_vip": "10.0.0.10",
    "gpunodes_load_balancer_addresses": ["10.0.0.200-10.0.0.203", "10.0.0.210"],
}
MACHINE_ACCESS = {"network-policy", "load-balancer"}
"""Add-ons that work on the machines themselves, as root."""


@functools.cache
def rendered(name: str) -> tuple[dict[str, Any], ...]:
    """The objects of an add-on, as the role applies them."""
    text = trust_as_template((ROLE / f"templates/{name}.yml.j2").read_text())
    addon = addons.chosen(name)
    known = {"addon_images": addons.images_of(addon, {}), "addon_settings": addons.values_of(addon, GOOD)}
    made = Templar(DataLoader(), variables=known).template(text)
    return tuple(each for each in yaml.safe_load_all(made) if each)


def pods(name: str) -> Iterator[dict[str, Any]]:
    for each in rendered(name):
        if each["kind"] in {"Deployment", "DaemonSet", "StatefulSet"}:
            yield each["spec"]["template"]["spec"]


def test_each_row_has_a_template_or_a_manifest() -> None:
    table = addons.optional()
    assert {name for name, each in table.items() if not each.manifest} == set(TEMPLATES)
    for each in table.values():
        assert each.source.startswith("https://")
        assert each.version in each.source
        assert each.licence
        assert each.run in {"seen", "real API server only", "not run"}
        assert each.run == "seen" or each.why


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_image_is_of_the_table_and_has_a_registry(name: str) -> None:
    """So mirrors of registries apply, and the setting replaces it."""
    addon = addons.chosen(name)
    used = {container["image"] for pod in pods(name) for container in pod["containers"]}
    assert used <= set(addon.images.values())
    for image in addon.images.values():
        assert "." in image.partition("/")[0]
        assert image.rpartition(":")[2] not in {"latest", "master"}
    text = (ROLE / f"templates/{name}.yml.j2").read_text()
    assert all(f"addon_images.{key} " in text for key in addon.images)


@pytest.mark.parametrize("name", TEMPLATES)
def test_accounts_may_not_read_secrets_and_have_no_wildcards(name: str) -> None:
    rules = [rule for each in rendered(name) if each["kind"] in {"Role", "ClusterRole"} for rule in each["rules"]]
    for rule in rules:
        assert "*" not in {*rule["verbs"], *rule["resources"], *rule["apiGroups"]}
        assert not {"secrets", "serviceaccounts/token"} & set(rule["resources"])
        assert not {"impersonate", "escalate", "bind"} & set(rule["verbs"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_pods_have_requests_a_priority_and_no_more_rights_than_they_need(name: str) -> None:
    for pod in pods(name):
        assert pod["priorityClassName"].startswith("system-")
        assert pod["tolerations"]
        for container in pod["containers"]:
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            if name in MACHINE_ACCESS:
                continue
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        if name not in MACHINE_ACCESS:
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not pod.get("hostNetwork")


@pytest.mark.parametrize("name", TEMPLATES)
def test_objects_are_in_the_namespace_of_the_table(name: str) -> None:
    spaces = {each["metadata"]["namespace"] for each in rendered(name) if "namespace" in each["metadata"]}
    assert spaces == {addons.chosen(name).namespace}


def test_metrics_server_verifies_the_certificates_of_kubelets() -> None:
    [pod] = pods("metrics-server")
    arguments = pod["containers"][0]["args"]
    assert not [each for each in arguments if "insecure" in each]
    assert [each for each in arguments if each.startswith("--kubelet-certificate-authority=")]
    addon = addons.chosen("metrics-server")
    refused = addons.refusal(addon, {**GOOD, "gpunodes_serving_certificates": False})
    assert "gpunodes_serving_certificates" in str(refused)
    assert addons.refusal(addon, {**GOOD, "gpunodes_serving_certificates": "True"}) is None


def test_a_load_balancer_gets_addresses_that_nobody_has() -> None:
    addon = addons.chosen("load-balancer")
    [config] = [each for each in rendered("load-balancer") if each["kind"] == "ConfigMap"]
    assert config["data"] == {"cidr-global": "10.0.0.200/30,10.0.0.210/32"}
    assert addons.refusal(addon, GOOD, ["10.0.0.1", "fd00::1", "w1.example"]) is None
    for given, cluster, words in (
        ([], [], "needs the setting gpunodes_load_balancer_addresses, which is empty"),
        (["10.0.0.200-10.0.0.250"], ["10.0.0.1", "10.0.0.233"], "contains 10.0.0.233, which the cluster itself has"),
        (["10.0.0.8/29"], [], "contains 10.0.0.10,"),
        (["10.97.0.0/28"], [], "contains 10.96.0.0/12,"),
        (["10.0.0.0/8"], [], "is ['10.0.0.0/8']; wanted: IPv4 addresses"),
    ):
        refused = addons.refusal(addon, {**GOOD, "gpunodes_load_balancer_addresses": given}, cluster)
        assert words in str(refused)
        answer = filters.addon("load-balancer", {}, {**GOOD, "gpunodes_load_balancer_addresses": given}, cluster)
        assert (answer["problem"], answer["settings"]) == (str(refused), {})


@pytest.mark.parametrize(
    "given",
    [
        "10.0.0.1",
        ["10.0.0.9-10.0.0.1"],
        ["10.0.0.1/24"],
        ["x"],
        ["::1"],
        ["0.0.0.0"],  # noqa: S104 - nothing is bound to it
        ["127.0.0.1"],
        ["224.0.0.1"],
        ["10.0.0.0/21"],
        [{}],
        ["10.0.0.1'].exists(x, true) || ['"],
    ],
)
def test_other_addresses_are_refused(given: Any) -> None:
    assert not load_balancer.is_valid(given)
    with pytest.raises(ValueError, match=r".+"):
        load_balancer.blocks(given)


def test_settings_replace_images() -> None:
    own = {"metrics-server/server": "registry.example/metrics:1"}
    assert filters.addon("metrics-server", own, GOOD)["images"] == {"server": "registry.example/metrics:1"}
    assert filters.addon("local-path", own, GOOD)["images"] == dict(addons.chosen("local-path").images)
    with pytest.raises(AnsibleFilterError, match="gpunodes_addon_images has metrics-server/no"):
        filters.addon("metrics-server", {"metrics-server/no": "x"}, GOOD)
    with pytest.raises(AnsibleFilterError, match="no optional add-on"):
        filters.addon("../x", {}, GOOD)
    with pytest.raises(WrongInput, match="no optional add-on"):
        addons.chosen("x")
    assert filters.addon("", {}, {})["images"] == {}
