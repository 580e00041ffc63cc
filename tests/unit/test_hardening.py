"""What a new cluster and its nodes get for their safety: arguments, files and the device plugin's pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from gpunodes.ansible.filter import general as filters
from gpunodes.ansible.module_utils import gpu_verify
from gpunodes.ansible.module_utils.kubeadm import init
from jinja2 import Environment

ROLES = Path(__file__).parents[2] / "roles"


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = DataLoader().load_from_file(str(path), trusted_as_template=True)
    return found


def rendered(role: str, name: str, **more: Any) -> Any:
    """A variable of a role, with its defaults and these settings."""
    variables = {**load(ROLES / role / "defaults/main.yml"), **load(ROLES / role / "vars/main.yml"), **more}
    return Templar(DataLoader(), variables=variables).template(variables[name])


def cluster(**more: Any) -> dict[str, Any]:
    """kubeadm's ClusterConfiguration with the settings' defaults."""
    settings = load(ROLES / "settings/defaults/main.yml")
    given = {"control_plane_audit_rules": settings["gpunodes_audit_rules"], "control_plane_endpoint": "a:6443", **more}
    documents: list[dict[str, Any]] = rendered("control_plane", "_control_plane_documents", **given)
    [document] = [one for one in documents if "networking" in one]
    return document


def arguments(component: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in component["extraArgs"]}


def test_a_new_control_plane_does_not_profile_and_keeps_an_audit_log() -> None:
    """CIS benchmark 1.10: 1.2.15 to 1.2.19, 1.3.2, 1.4.1, 3.2.1."""
    made = cluster()
    api = arguments(made["apiServer"])
    assert (api["profiling"], api["audit-log-path"]) == ("false", "/var/log/kubernetes/audit.log")
    assert (api["audit-log-maxage"], api["audit-log-maxbackup"], api["audit-log-maxsize"]) == ("30", "10", "100")
    assert arguments(made["controllerManager"]) == arguments(made["scheduler"]) == {"profiling": "false"}
    # What the API server reads and writes is mounted into its pod.
    mounted = {volume["mountPath"]: volume.get("readOnly", False) for volume in made["apiServer"]["extraVolumes"]}
    assert mounted == {"/etc/kubernetes/gpunodes": True, "/var/log/kubernetes": False}
    assert {str(Path(api[name]).parent) for name in ("audit-policy-file", "encryption-provider-config")} <= set(mounted)


def test_a_token_that_a_user_requests_lasts_a_day_unless_the_settings_say_otherwise() -> None:
    """Who lost a role may have requested one for a service account before: Kubernetes would give it any time."""
    name = "service-account-max-token-expiration"
    assert arguments(cluster()["apiServer"])[name] == "24h0m0s"
    longer = cluster(control_plane_arguments={"apiServer": {name: "720h0m0s"}})
    assert arguments(longer["apiServer"])[name] == "720h0m0s"


def test_every_component_gets_the_arguments_of_the_settings() -> None:
    given = {
        "apiServer": {"profiling": "true"},
        "scheduler": {"leader-elect": "false"},
        "etcd": {"heartbeat-interval": "500", "election-timeout": "5000"},
    }
    made = cluster(control_plane_arguments=given)
    assert arguments(made["apiServer"])["profiling"] == "true"
    assert arguments(made["scheduler"]) == {"profiling": "false", "leader-elect": "false"}
    assert arguments(made["etcd"]["local"]) == given["etcd"]
    assert cluster()["etcd"] == {"local": {"extraArgs": []}}


def test_the_audit_log_holds_no_secret() -> None:
    """No rule records what is in an object, and who reads a Secret is recorded whoever it is."""
    settings = load(ROLES / "settings/defaults/main.yml")
    rules = settings["gpunodes_audit_rules"]
    assert {rule["level"] for rule in rules} == {"None", "Metadata"}
    assert rules[0] == {
        "level": "Metadata",
        "resources": [{"group": "", "resources": ["secrets", "serviceaccounts/token"]}],
    }
    assert rules[-1] == {"level": "Metadata"}
    policy = rendered("control_plane", "_control_plane_files", control_plane_audit_rules=rules)
    assert policy["/etc/kubernetes/gpunodes/audit-policy.json"]["rules"] == rules


def test_secrets_are_encrypted_in_etcd_unless_the_setting_denies_it() -> None:
    [entry] = rendered("control_plane", "_control_plane_files")["/etc/kubernetes/gpunodes/encryption.json"]["resources"]
    assert entry["resources"] == ["secrets"]
    # Not even for reading may a Secret lie there in the clear.
    assert [list(provider) for provider in entry["providers"]] == [["secretbox"]]
    assert entry["providers"][0]["secretbox"]["keys"][0]["secret"] == init.RANDOM_KEY
    off = {"control_plane_audit_rules": [], "control_plane_encrypt_secrets": False}
    assert rendered("control_plane", "_control_plane_files", **off) == {}
    assert arguments(cluster(**off)["apiServer"]) == {
        "profiling": "false",
        "service-account-max-token-expiration": "24h0m0s",
    }
    assert cluster(**off)["apiServer"]["extraVolumes"] == []


def test_the_settings_arguments_win() -> None:
    given = {"apiServer": {"profiling": "true", "v": "4"}, "scheduler": {"v": "2"}}
    made = cluster(control_plane_arguments=given)
    assert arguments(made["apiServer"])["profiling"] == "true"
    assert arguments(made["apiServer"])["v"] == "4"
    assert arguments(made["scheduler"]) == {"profiling": "false", "v": "2"}


# The device plugin


def plugin() -> dict[str, Any]:
    """The pod of the device plugin."""
    template = Environment(autoescape=False, trim_blocks=True).from_string(  # noqa: S701 - YAML, no page
        (ROLES / "device_plugin/templates/nvidia.yml.j2").read_text()
    )
    text = template.render(device_plugin_image="image", device_plugin_sharing=[])
    [daemon] = [one for one in yaml.safe_load_all(text) if one and one["kind"] == "DaemonSet"]
    pod: dict[str, Any] = daemon["spec"]["template"]["spec"]
    return pod


def test_the_device_plugin_runs_on_tainted_nodes_and_leaves_for_a_reset() -> None:
    """A GPU pool with taints of its own serves its GPUs; a NoExecute taint, by which repair frees a GPU, evicts it."""
    assert plugin()["tolerations"] == [{"operator": "Exists", "effect": "NoSchedule"}]


def test_the_device_plugin_can_do_little_else() -> None:
    """No token, no capability, no writable root, and neither the machine's sockets nor its keys are mounted."""
    pod = plugin()
    [container] = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}
    writable = {paths[mount["name"]] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/var/lib/kubelet/device-plugins", "/var/run/cdi"}
    assert set(paths.values()) - writable == {"/dev/null", "/usr", "/lib", "/etc/ld.so.cache", "/dev"}


def test_no_variable_gives_gpus() -> None:
    """Neither the plugin nor the check of a machine gets its GPUs by a variable (NVIDIA's runtime: test_desired.py)."""
    [container] = plugin()["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert "NVIDIA_VISIBLE_DEVICES" not in variables
    assert variables["DEVICE_LIST_STRATEGY"] == "cdi-cri,volume-mounts"
    assert not any(
        "NVIDIA_VISIBLE_DEVICES" in word for word in gpu_verify.container("containerd", "image", "name", "all", [])[0]
    )


def test_serving_certificates_are_a_setting() -> None:
    """On: kubelets ask for certificates, the API server verifies them, and a service of the machine approves them."""
    for on in (False, True):
        given = {"control_plane_serving_certificates": on}
        documents = rendered("control_plane", "_control_plane_documents", control_plane_endpoint="a:6443", **given)
        [kubelet] = [one for one in documents if one["kind"] == "KubeletConfiguration"]
        assert kubelet["serverTLSBootstrap"] is on
        assert ("kubelet-certificate-authority" in arguments(cluster(**given)["apiServer"])) is on
    assert '__name__ == "__main__"' in filters.program("serving")
