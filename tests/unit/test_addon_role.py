"""The optional add-ons: their table is complete, and their templates are safe objects; tests/repair applies them."""

from __future__ import annotations

import functools
import json
import stat
import subprocess
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
    "gpunodes_monitoring_retention": "15d",
    "gpunodes_monitoring_memory": "2Gi",
    "gpunodes_monitoring_claim": "",
    "gpunodes_monitoring_targets": ["10.0.0.1:9836"],
    "gpunodes_monitoring_alertmanagers": [],
    "gpunodes_monitoring_grafana": True,
    "gpunodes_pod_subnet": "10.244.0.0/16",
    "gpunodes_service_subnet": "10.96.0.0/12",
    "gpunodes_control_plane_vip": "10.0.0.10",
    "gpunodes_load_balancer_addresses": ["10.0.0.200-10.0.0.203", "10.0.0.210"],
}
MACHINE_ACCESS = {"network-policy", "dcgm-exporter", "load-balancer", "csi-driver-nfs"}
"""Add-ons that work on the machines themselves, as root."""
FILES = {"rules": "rules.yml", "scrape": "scrape.yml", "kubelets": "kubelets.yml", "dashboard": "dashboard.json"}
"""Variables of the role that are files of monitoring."""


@functools.cache
def rendered(name: str) -> tuple[dict[str, Any], ...]:
    """The objects of an add-on, as the role applies them."""
    return with_settings(name)


def with_settings(name: str, **changed: Any) -> tuple[dict[str, Any], ...]:
    """The same with other settings."""
    text = trust_as_template((ROLE / f"templates/{name}.yml.j2").read_text())
    addon = addons.chosen(name)
    known = {"addon_images": addons.images_of(addon, {}), "addon_settings": addons.values_of(addon, GOOD | changed)}
    files = {f"_addon_{key}": (ROLE / "files/monitoring" / file).read_text() for key, file in FILES.items()}
    made = Templar(DataLoader(), variables=known | files).template(text)
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
        assert set(each.requires) | set(each.settings) <= set(GOOD)


def test_how_to_get_a_publisher_s_file_is_an_address_or_a_command() -> None:
    for each in addons.optional().values():
        if each.manifest:
            is_address = each.manifest.startswith("https://")
            assert each.obtaining == (f"download {each.manifest}" if is_address else f"make it: {each.manifest} > FILE")
            assert is_address or each.manifest.startswith("helm template ")
            assert each.workload.split()[0] in {"Deployment", "DaemonSet", "StatefulSet"}
            assert is_address or f" --version {each.version.removeprefix('v')} " in each.manifest


def workload(image: Any, name: str = "kueue-controller-manager", space: str = "kueue-system") -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "manager", "image": image}]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": space},
        "spec": {"template": template},
    }


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("registry.k8s.io/kueue/kueue:v0.15.0", "v0.15.0"),
        ("registry.example:5000/kueue:0.15.0@sha256:00", "v0.15.0"),
        ("registry.example:5000/kueue@sha256:00", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_version_of_a_publisher_s_file_is_that_of_its_images(image: Any, version: str) -> None:
    assert addons.version_of(addons.chosen("kueue"), [workload("x:v9.9", "other"), workload(image)]) == version


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ([workload("kueue:v0.14.0")], "the file has version v0.14.0 of Deployment kueue-controller-manager"),
        ([workload("kueue:v0.15.0", "cilium")], "the file has no Deployment kueue-controller-manager in kueue-system"),
        ([workload("kueue:v0.15.0", space="default")], "the file has no Deployment kueue-controller-manager"),
        ([{"kind": "DaemonSet", "metadata": {"name": "kueue-controller-manager"}}], "the file has no Deployment"),
    ],
)
def test_a_file_of_something_else_is_refused(objects: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(WrongInput, match=message) as refused:
        addons.version_of(addons.chosen("kueue"), objects)
    assert "download https://" in str(refused.value.problem.remedy)


def test_cilium_replaces_flannel() -> None:
    refused = addons.refusal(addons.chosen("cilium"), GOOD)
    assert "cilium needs another value of the setting gpunodes_network, which is flannel" in str(refused)


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
        assert "*" not in {*rule["verbs"], *rule.get("resources", ()), *rule.get("apiGroups", ())}
        assert not {"secrets", "serviceaccounts/token", "nodes/proxy", "pods/exec"} & set(rule.get("resources", ()))
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
            own = {key: value for key, value in container["securityContext"].items() if key != "runAsUser"}
            assert own == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        if name not in MACHINE_ACCESS:
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


@pytest.mark.parametrize("name", TEMPLATES)
def test_objects_are_in_the_namespace_of_the_table_or_in_one_that_the_add_on_makes(name: str) -> None:
    spaces = {each["metadata"]["namespace"] for each in rendered(name) if "namespace" in each["metadata"]}
    own = {each["metadata"]["name"] for each in rendered(name) if each["kind"] == "Namespace"}
    assert addons.chosen(name).namespace in spaces
    assert own <= spaces <= own | {addons.chosen(name).namespace}


def keeps_machines_on(name: str) -> bool:
    """Whether a pod of an add-on can run on a worker and has a volume that the autoscaler does not leave behind."""
    for each in rendered(name):
        # A DaemonSet's pods never keep a machine on.
        pod = each["spec"]["template"]["spec"] if each["kind"] in {"Deployment", "StatefulSet"} else {}
        volumes = [volume for volume in pod.get("volumes", ()) if "hostPath" in volume or "emptyDir" in volume]
        local = [volume for volume in volumes if (volume.get("emptyDir") or {}).get("medium") != "Memory"]
        if local and "node-role.kubernetes.io/control-plane" not in pod.get("nodeSelector", {}):
            return True
    return False


def test_the_page_about_scaling_names_the_add_ons_that_keep_a_machine_on() -> None:
    page = " ".join((ROLE.parents[1] / "docs/scaling.md").read_text().split())
    listed = page.partition("of the add-ons this is ")[2].partition(".")[0]
    assert set(listed.replace(" and ", ", ").split(", ")) == {name for name in TEMPLATES if keeps_machines_on(name)}


def test_the_nfs_driver_is_privileged_only_where_it_mounts() -> None:
    for pod in pods("csi-driver-nfs"):
        contexts = {each["name"]: each["securityContext"] for each in pod["containers"]}
        assert contexts.pop("nfs") == {"privileged": True}
        for context in contexts.values():
            assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    # The example of storage.md is for this driver.
    page = (ROLE.parents[1] / "docs/storage.md").read_text()
    [example] = [text for text in page.split("```") if "kind: StorageClass" in text]
    [driver] = [each for each in rendered("csi-driver-nfs") if each["kind"] == "CSIDriver"]
    assert yaml.safe_load(example.removeprefix("yaml"))["provisioner"] == driver["metadata"]["name"]


@pytest.mark.parametrize("name", ["dcgm-exporter", "headlamp", "monitoring"])
def test_only_namespaces_whose_pods_see_the_machine_allow_that(name: str) -> None:
    allowed = {
        each["metadata"]["name"]: each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for each in rendered(name)
        if each["kind"] == "Namespace"
    }
    for each in rendered(name):
        if each["kind"] in {"Deployment", "DaemonSet"}:
            sees = any("hostPath" in volume for volume in each["spec"]["template"]["spec"].get("volumes", ()))
            assert allowed[each["metadata"]["namespace"]] == ("privileged" if sees else "restricted")


def test_only_processes_that_need_it_have_a_token() -> None:
    """A process in another container, such as Grafana, cannot use the rights of the account."""
    [prometheus] = [pod for pod in pods("monitoring") if pod.get("serviceAccountName") == "prometheus"]
    [exporter] = [pod for pod in pods("monitoring") if "serviceAccountName" not in pod]
    assert (prometheus["automountServiceAccountToken"], exporter["automountServiceAccountToken"]) == (False, False)
    assert next(pods("dcgm-exporter"))["automountServiceAccountToken"] is False
    mounted = {
        container["name"]: {mount["name"] for mount in container["volumeMounts"]}
        for container in prometheus["containers"]
    }
    assert ("account" in mounted["prometheus"], "account" in mounted["grafana"]) == (True, False)


def test_prometheus_and_grafana_listen_in_their_pod_only() -> None:
    """They ask for no password."""
    [pod] = [pod for pod in pods("monitoring") if pod.get("serviceAccountName") == "prometheus"]
    prometheus, grafana = pod["containers"]
    assert "--web.listen-address=127.0.0.1:9090" in prometheus["args"]
    assert not [each for each in prometheus["args"] if "enable-" in each]
    assert {"name": "GF_SERVER_HTTP_ADDR", "value": "127.0.0.1"} in grafana["env"]
    assert "ports" not in prometheus
    services = {each["metadata"]["name"] for each in rendered("monitoring") if each["kind"] == "Service"}
    assert services == {"kube-state-metrics"}
    without = prometheus_deployment(gpunodes_monitoring_grafana="false")["spec"]["containers"]
    assert [each["name"] for each in without] == ["prometheus"]


def prometheus_deployment(**changed: Any) -> dict[str, Any]:
    """The Deployment of Prometheus with these settings."""
    [found] = [
        each["spec"]["template"]
        for each in with_settings("monitoring", **changed)
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", "prometheus")
    ]
    return dict(found)


def test_metrics_end_with_the_pod_or_stay_in_a_claim_of_the_user() -> None:
    size = "--storage.tsdb.retention.size=8GB"
    for claim, volume in (
        ("", {"emptyDir": {"sizeLimit": "12Gi"}}),
        ("mine", {"persistentVolumeClaim": {"claimName": "mine"}}),
    ):
        pod = prometheus_deployment(gpunodes_monitoring_claim=claim)["spec"]
        assert {"name": "data", **volume} in pod["volumes"]
        assert (size in pod["containers"][0]["args"]) is not bool(claim)
    assert "PersistentVolumeClaim" not in {each["kind"] for each in with_settings("monitoring")}


def test_a_new_configuration_starts_prometheus_again() -> None:
    def noted(**changed: Any) -> str:
        return str(prometheus_deployment(**changed)["metadata"]["annotations"]["gpunodes.dev/config"])

    assert noted() == noted()
    assert noted() != noted(gpunodes_monitoring_targets=["10.0.0.2:9836"])


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


@pytest.mark.long
def test_ansible_applies_what_these_tests_read(tmp_path: Path) -> None:
    """The rules and the dashboard have expressions in braces: Ansible must not take them for its own."""
    play = {
        "hosts": "localhost",
        "gather_facts": False,
        "vars_files": [str(ROLE / "vars/main.yml")],
        "vars": {
            "addon_name": "monitoring",
            "addon_images": addons.images_of(addons.chosen("monitoring"), {}),
            "addon_settings": addons.values_of(addons.chosen("monitoring"), GOOD),
        },
        "tasks": [
            {"ansible.builtin.copy": {"content": "{{ _addon_rendered | to_json }}", "dest": str(tmp_path / "out")}}
        ],
    }
    for folder in ("files", "templates"):
        (tmp_path / folder).symlink_to(ROLE / folder)
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    done = subprocess.run(
        ["ansible-playbook", "-i", "localhost,", "-c", "local", str(tmp_path / "play.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out").read_text()) == list(rendered("monitoring"))


def test_volumes_of_local_path_are_open_to_pods_and_closed_to_users_of_the_node(tmp_path: Path) -> None:
    """By the script of its ConfigMap, as its helper runs it."""
    config = next(each for each in rendered("local-path") if each["kind"] == "ConfigMap")
    folder = tmp_path / "provisioner" / "pvc-1_default_data"
    folder.parent.mkdir(mode=0o755)
    for _ in range(2):
        subprocess.run(["sh", "-c", config["data"]["setup"]], env={"VOL_DIR": str(folder)}, check=True)
        assert [stat.S_IMODE(each.stat().st_mode) for each in (folder.parent, folder)] == [0o700, 0o777]
    subprocess.run(["sh", "-c", config["data"]["teardown"]], env={"VOL_DIR": str(folder)}, check=True)
    assert not folder.exists()
