"""What a new cluster and its nodes get for their safety: arguments, files and the device plugin's pod."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from gpunodes.ansible.filter_plugins import gpunodes as filters
from gpunodes.ansible.module_utils.gpunodes import facts, gpu_verify, host, kube_api, kubeadm, kubeconfig, ledger

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
    assert entry["providers"][0]["secretbox"]["keys"][0]["secret"] == kubeadm.RANDOM_KEY
    off = {"control_plane_audit_rules": [], "control_plane_encrypt_secrets": False}
    assert rendered("control_plane", "_control_plane_files", **off) == {}
    assert arguments(cluster(**off)["apiServer"]) == {"profiling": "false"}
    assert cluster(**off)["apiServer"]["extraVolumes"] == []


def test_the_settings_arguments_win() -> None:
    given = {"apiServer": {"profiling": "true", "v": "4"}, "scheduler": {"v": "2"}}
    made = cluster(control_plane_arguments=given)
    assert arguments(made["apiServer"])["profiling"] == "true"
    assert arguments(made["apiServer"])["v"] == "4"
    assert arguments(made["scheduler"]) == {"profiling": "false", "v": "2"}


def test_keys_are_made_on_the_machine_for_root_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two clusters never share a key, kubeadm finds it when it starts, the kubelet's configuration is for root."""
    seen: list[dict[str, Any]] = []
    path = tmp_path / "gpunodes" / "encryption.json"
    config = tmp_path / "config.yaml"

    def run(verb: str, *_: Any) -> None:
        seen.append({"verb": verb, **json.loads(path.read_text())})
        config.write_text("")
        config.chmod(0o644)

    monkeypatch.setattr(kubeadm, "_MANIFEST", str(tmp_path / "none"))
    monkeypatch.setattr(kubeadm, "_ETCD", str(tmp_path / "none"))
    monkeypatch.setattr(kubeadm, "_KUBELET_CONFIG", str(config))
    monkeypatch.setattr(kubeconfig, "ADMIN", str(tmp_path / "none"))
    monkeypatch.setattr(kubeconfig, "KUBELET", str(tmp_path / "none"))
    monkeypatch.setattr(kubeadm, "_leftovers", list)
    monkeypatch.setattr(kubeadm, "_begin", lambda *_: None)
    monkeypatch.setattr(kubeadm, "_kubeadm", run)
    monkeypatch.setattr(kube_api, "admin", lambda: Api({}))
    monkeypatch.setattr(ledger, "load", lambda *_: ledger.Ledger())
    monkeypatch.setattr(ledger.Ledger, "save", lambda *_: None)
    files = {str(path): {"secret": kubeadm.RANDOM_KEY}}
    assert kubeadm.init([], {}, files, 60, check=True) == ["kubeadm init"]
    assert not path.exists()
    for _ in range(2):
        kubeadm.init([], {}, files, 60, check=False)
    assert path.stat().st_mode & 0o777 == 0o600
    assert config.stat().st_mode & 0o777 == 0o600
    assert len({one["secret"] for one in seen}) == 2
    assert {len(one["secret"]) for one in seen} == {44}


class Api:
    """A cluster whose init came to its end, with these bootstrap tokens: descriptions by name."""

    def __init__(self, tokens: dict[str, str]) -> None:
        self.tokens = tokens

    def get(self, path: str, **_: str) -> Any:
        data = {
            name: {"description": base64.b64encode(message.encode()).decode()} for name, message in self.tokens.items()
        }
        items = [{"metadata": {"name": name}, "data": each} for name, each in data.items()]
        return {"items": items} if path.endswith("/secrets") else {}

    def find(self, _: str) -> Any:
        return {}

    def delete(self, path: str) -> None:
        del self.tokens[path.rpartition("/")[2]]


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose kubeadm ended well, and whose run was killed just behind it; its kubelet's configuration."""
    pem = base64.b64encode(b"x").decode()
    for name in ("admin", "manifest"):
        (tmp_path / name).write_text(f"server: https://127.0.0.1\ncertificate-authority-data: {pem}\n")
    config = tmp_path / "config.yaml"
    config.write_text("")
    config.chmod(0o644)
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    monkeypatch.setattr(kubeconfig, "ADMIN", str(tmp_path / "admin"))
    monkeypatch.setattr(kubeadm, "_MANIFEST", str(tmp_path / "manifest"))
    monkeypatch.setattr(kubeadm, "_KUBELET_CONFIG", str(config))
    monkeypatch.setattr(host, "service_states", lambda _: {"kubelet": {"active": True}})
    return config


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_an_init_that_was_killed_behind_kubeadm_is_finished(monkeypatch: pytest.MonkeyPatch, killed: Path) -> None:
    """kubeadm's own token goes, of all that there are, and the kubelet's configuration is root's alone."""
    ledger.Ledger(kubeadm="init started").save()
    tokens = {"bootstrap-token-a": "kubeadm init", "bootstrap-token-b": "gpunodes join", "bootstrap-token-c": ""}
    monkeypatch.setattr(kube_api, "admin", lambda **_: Api(tokens))
    done = ["finish an interrupted kubeadm init"]
    assert kubeadm.init([], {}, {}, 60, check=True) == done
    assert (mode(killed), len(tokens), ledger.load().kubeadm) == (0o644, 3, "init started")
    assert kubeadm.init([], {}, {}, 60, check=False) == done
    assert (mode(killed), list(tokens)) == (0o600, ["bootstrap-token-b", "bootstrap-token-c"])
    assert ledger.load().kubeadm == "init done"
    assert kubeadm.init([], {}, {}, 60, check=False) == []


def test_a_join_that_was_killed_behind_kubeadm_is_finished(monkeypatch: pytest.MonkeyPatch, killed: Path) -> None:
    monkeypatch.setattr(facts, "kubernetes", lambda: {"role": "worker", "ca_hash": "pin", "server": ""})
    ledger.Ledger(kubeadm="join started").save()
    done = ["finish an interrupted kubeadm join"]
    assert kubeadm.join("", "", "pin", registered=True, settings={}, limit_s=60, check=True) == done
    assert (mode(killed), ledger.load().kubeadm) == (0o644, "join started")
    assert kubeadm.join("", "", "pin", registered=True, settings={}, limit_s=60, check=False) == done
    assert (mode(killed), ledger.load().kubeadm) == (0o600, "join done")
    assert kubeadm.join("", "", "pin", registered=True, settings={}, limit_s=60, check=False) == []


@pytest.mark.parametrize(
    ("stage", "unfinished"), [("", False), ("join started", True), ("init started", True), ("join done", False)]
)
def test_a_machine_says_that_its_join_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str, unfinished: bool
) -> None:
    """The role worker asks kubeadm_join of a machine that says so: else nobody would finish what is left."""
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger/ledger.json"))
    ledger.Ledger(kubeadm=stage).save()
    assert facts.kubernetes()["unfinished"] is unfinished


# The device plugin


def plugin() -> dict[str, Any]:
    """The pod of the device plugin."""
    text = (ROLES / "device_plugin/templates/nvidia.yml.j2").read_text().replace("{{ device_plugin_image }}", "image")
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
    assert not any("NVIDIA_VISIBLE_DEVICES" in word for word in gpu_verify._containerd("image", "name")[1])


def test_serving_certificates_are_a_setting() -> None:
    """On: kubelets ask for certificates, the API server verifies them, and a service of the machine approves them."""
    for on in (False, True):
        given = {"control_plane_serving_certificates": on}
        documents = rendered("control_plane", "_control_plane_documents", control_plane_endpoint="a:6443", **given)
        [kubelet] = [one for one in documents if one["kind"] == "KubeletConfiguration"]
        assert kubelet["serverTLSBootstrap"] is on
        assert ("kubelet-certificate-authority" in arguments(cluster(**given)["apiServer"])) is on
    assert '__name__ == "__main__"' in filters.program("serving")
