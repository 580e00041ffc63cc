"""The objects of the autoscaler: what it may do, how it runs, and that no password is among them."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from gpunodes.ansible.filter import general as filters
from gpunodes.autoscale import service

ROLE = Path(__file__).parents[2] / "roles" / "autoscaler"
GPUS = {"limits": {"nvidia.com/gpu": 4}}
PROCESSORS = {"requests": {"cpu": "7400m", "memory": "58318Mi"}}
POOLS = {
    "h100": {"min": 0, "max": 4, "priority": 50, "spare": 0},
    "t4.small": {
        "min": 0,
        "max": 2,
        "priority": 10,
        "spare": 2,
        "resources": GPUS,
        "taints": [{"key": "nvidia.com/gpu"}],
    },
    "A_30": {"min": 1, "max": 2, "priority": 10, "spare": 1, "resources": PROCESSORS},
}
ARCHIVED = {"name": "gpunodes.dev/gpunodes:1.0", "digest": f"sha256:{'a' * 64}", "config": f"sha256:{'b' * 64}"}


def rendered(**more: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """The role's objects by kind and name."""
    loader = DataLoader()
    given = [
        loader.load_from_file(str(ROLE / f"{part}/main.yml"), trusted_as_template=True) for part in ("defaults", "vars")
    ]
    variables = {**given[0], **given[1], "autoscaler_pools": POOLS, "_autoscaler_archived": ARCHIVED, **more}
    text = trust_as_template((ROLE / "templates/objects.yml.j2").read_text())
    made = Templar(loader, variables=variables).template(text)
    objects = [each for each in yaml.safe_load_all(made) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def pod(**more: Any) -> dict[str, Any]:
    found: dict[str, Any] = rendered(**more)["Deployment", "gpunodes-autoscaler"]["spec"]["template"]
    return found


def containers(**more: Any) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in pod(**more)["spec"]["containers"]}


def rules(*kinds: str) -> dict[str, set[str]]:
    """The verbs for each resource; those for some names only as resource/NAME."""
    found: dict[str, set[str]] = {}
    for kind in kinds:
        for rule in rendered()[kind, "gpunodes-autoscaler"]["rules"]:
            for resource in rule["resources"]:
                for name in rule.get("resourceNames", [""]):
                    found.setdefault(f"{resource}={name}" if name else resource, set()).update(rule["verbs"])
    return found


def test_all_objects_have_the_label_by_which_they_are_deleted() -> None:
    for each in rendered().values():
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "gpunodes-autoscaler"
        is_proof = each["metadata"]["name"] == "gpunodes-autoscaler-proof"
        assert each["metadata"].get("namespace", "kube-system") == ("gpunodes-proof" if is_proof else "kube-system")
    label = "app.kubernetes.io/part-of=gpunodes-autoscaler"
    assert label in (ROLE / "tasks/main.yml").read_text()


def test_plan_and_passwords_are_not_among_them() -> None:
    """`gpunodes autoscale up` writes them over its session with the API: the role never has a password."""
    names = set(rendered()) | set(rendered(autoscaler_state="absent"))
    assert not {name for kind, name in names if kind == "Secret"}
    assert not names & {("ConfigMap", "gpunodes-autoscaler"), ("ConfigMap", "gpunodes-autoscaler-state")}
    assert not [
        path for path in ROLE.rglob("*.yml") if re.search(r"bmc_password|autoscaler_password", path.read_text())
    ]


def test_its_account_may_create_pods_where_they_have_no_rights_only() -> None:
    found = rendered()
    assert {
        tuple(rule["resources"]): set(rule["verbs"]) for rule in found["Role", "gpunodes-autoscaler-proof"]["rules"]
    } == {
        ("pods",): {"create", "delete"},
        ("pods/log",): {"get"},
    }
    labels = found["Namespace", "gpunodes-proof"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_its_account_may_not_read_secrets_and_little_else() -> None:
    everywhere, own = rules("ClusterRole"), rules("Role")
    assert not [name for name in (*everywhere, *own) if "secret" in name or "*" in name]
    writes = {"create", "update", "patch", "delete"}
    assert {name for name, verbs in everywhere.items() if verbs & writes} == {
        "nodes", "events", "pods/eviction", "pods/status",
    }  # fmt: skip
    assert everywhere["nodes"] == {"get", "list", "watch", "update", "patch", "delete"}
    assert own == {
        "configmaps": {"create", "list", "watch"},
        "configmaps=gpunodes-autoscaler-state": {"get", "update", "patch"},
        "configmaps=gpunodes-kept-off": {"get", "patch"},
        "configmaps=cluster-autoscaler-status": {"get", "update", "delete"},
        "configmaps=cluster-autoscaler-priority-expander": {"get", "update", "delete"},
        "leases": {"get", "list", "create", "update", "delete"},
    }
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        assert rendered()[kind, "gpunodes-autoscaler"]["subjects"] == [
            {"kind": "ServiceAccount", "name": "gpunodes-autoscaler", "namespace": "kube-system"}
        ]


def test_its_pod_runs_on_control_planes_without_rights() -> None:
    spec = pod()["spec"]
    assert rendered()["Deployment", "gpunodes-autoscaler"]["spec"]["strategy"] == {"type": "Recreate"}
    assert spec["nodeSelector"] == {"node-role.kubernetes.io/control-plane": ""}
    assert (spec["hostNetwork"], spec["priorityClassName"]) == (True, "system-cluster-critical")
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert not [volume for volume in spec["volumes"] if "hostPath" in volume]


def test_only_the_power_server_has_the_passwords() -> None:
    [bmc] = [volume for volume in pod()["spec"]["volumes"] if volume["name"] == "bmc"]
    assert bmc["secret"] == {"secretName": "gpunodes-autoscaler-bmc", "defaultMode": 0o400}
    mounts = {name: {each["name"] for each in container["volumeMounts"]} for name, container in containers().items()}
    assert mounts == {"cluster-autoscaler": {"cloud", "socket"}, "power": {"plan", "bmc", "tmp", "socket"}}
    # The folder of Python's modules is /usr: what the pod writes is in memory only.
    [tmp] = [volume for volume in pod()["spec"]["volumes"] if volume["name"] == "tmp"]
    assert tmp["emptyDir"]["medium"] == "Memory"


def test_the_autoscaler_gets_the_times_of_the_settings() -> None:
    given = {"idle_timeout": 60, "boot_timeout": 900, "scan_interval": 5, "drain_timeout": 120}
    made = containers(**{f"autoscaler_{name}": value for name, value in given.items()})["cluster-autoscaler"]["args"]
    assert set(made) == {
        "--cloud-provider=externalgrpc",
        "--cloud-config=/etc/gpunodes/cloud.yaml",
        "--namespace=kube-system",
        "--leader-elect=true",
        "--leader-elect-lease-duration=60s",
        "--leader-elect-renew-deadline=45s",
        "--leader-elect-retry-period=5s",
        "--address=127.0.0.1:8085",
        "--startup-taint=gpunodes.dev/starting",
        "--status-taint=gpunodes.dev/stopping",
        "--status-taint=gpunodes.dev/more-gpus",
        "--expander=priority",
        "--enforce-node-group-min-size=true",
        "--scan-interval=5s",
        "--max-node-provision-time=900s",
        "--scale-down-unneeded-time=60s",
        "--scale-down-delay-after-add=60s",
        "--scale-down-unready-time=900s",
        "--unremovable-node-recheck-timeout=60s",
        # Machines that users switched off must not stop it, however many.
        "--max-total-unready-percentage=100",
        "--max-graceful-termination-sec=120",
        "--skip-nodes-with-system-pods=false",
    }


def test_only_the_autoscaler_can_call_the_power_server() -> None:
    """On the network of the machine any user of it could; the folder of the socket is in no other container."""
    cloud = yaml.safe_load(rendered()["ConfigMap", "gpunodes-autoscaler-cloud"]["data"]["cloud.yaml"])
    assert cloud["address"] == service.ADDRESS
    folder = str(Path(service.ADDRESS.removeprefix("unix://")).parent)
    [socket] = [each for each in pod()["spec"]["volumes"] if each["name"] == "socket"]
    assert "emptyDir" in socket
    for each in containers().values():
        assert {"name": "socket", "mountPath": folder} in each["volumeMounts"]
    assert containers()["power"]["readinessProbe"]["exec"]["command"][-1].startswith(f"test -S {folder}/")
    assert containers()["cluster-autoscaler"]["livenessProbe"]["httpGet"]["host"] == "127.0.0.1"


def test_a_slow_control_plane_fails_no_order_and_no_probe() -> None:
    """The autoscaler's default for a call is 5 s, that of a probe 1 s."""
    cloud = yaml.safe_load(rendered()["ConfigMap", "gpunodes-autoscaler-cloud"]["data"]["cloud.yaml"])
    assert cloud["grpc_timeout"] == "30s"
    probes = (containers()["power"]["readinessProbe"], containers()["cluster-autoscaler"]["livenessProbe"])
    assert [each["timeoutSeconds"] for each in probes] == [10, 10]


def test_pools_are_preferred_by_priority() -> None:
    text = rendered()["ConfigMap", "cluster-autoscaler-priority-expander"]["data"]["priorities"]
    found = yaml.safe_load(text)
    assert {number: set(names) for number, names in found.items()} == {50: {"^h100$"}, 10: {r"^t4\.small$", "^A_30$"}}


def test_spare_machines_are_kept_on_by_pods_that_anyone_may_replace() -> None:
    objects = rendered()
    assert objects["PriorityClass", "gpunodes-spare"]["value"] == -10
    assert objects["PriorityClass", "gpunodes-spare"]["preemptionPolicy"] == "Never"
    spares = {name: each["spec"] for (kind, name), each in objects.items() if kind == "Deployment" and "spare" in name}
    assert set(spares) == {"gpunodes-spare-t4.small", "gpunodes-spare-a-30"}
    made = spares["gpunodes-spare-t4.small"]
    spec = made["template"]["spec"]
    assert (made["replicas"], spec["priorityClassName"]) == (2, "gpunodes-spare")
    assert spec["nodeSelector"] == {"gpunodes.dev/pool": "t4.small"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu"}]
    assert made["strategy"] == {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}, "no second machine meanwhile"
    assert spec["containers"][0]["resources"] == GPUS
    assert spares["gpunodes-spare-a-30"]["template"]["spec"]["containers"][0]["resources"] == PROCESSORS


def test_an_image_of_the_archive_is_never_pulled() -> None:
    """No registry has it. Another image of the same name starts a new pod."""
    power = containers()["power"]
    assert (power["image"], power["imagePullPolicy"]) == (ARCHIVED["name"], "Never")
    assert pod()["metadata"]["annotations"] == {"gpunodes.dev/image": ARCHIVED["digest"]}
    pulled = {"autoscaler_power_image": "registry.example/gpunodes:1"}
    assert (containers(**pulled)["power"]["image"], containers(**pulled)["power"]["imagePullPolicy"]) == (
        "registry.example/gpunodes:1",
        "IfNotPresent",
    )
    assert "annotations" not in pod(**pulled)["metadata"]


def test_what_the_autoscaler_itself_wrote_is_deleted_with_it() -> None:
    more = set(rendered(autoscaler_state="absent")) - set(rendered())
    assert more == {("ConfigMap", "cluster-autoscaler-status"), ("Lease", "cluster-autoscaler")}


def test_the_image_of_an_archive(tmp_path: Path) -> None:
    entry = {"digest": ARCHIVED["digest"], "annotations": {"io.containerd.image.name": ARCHIVED["name"]}}
    documents = {"index.json": {"manifests": [entry]}, "manifest.json": [{"Config": f"blobs/sha256/{'b' * 64}"}]}
    with tarfile.open(tmp_path / "image.tar", "w") as tar:
        for name, document in documents.items():
            (tmp_path / name).write_text(json.dumps(document))
            tar.add(tmp_path / name, name)
    assert filters.image_archive(str(tmp_path / "image.tar")) == ARCHIVED
    for wrong in (tmp_path / "none.tar", tmp_path / "index.json"):
        with pytest.raises(AnsibleFilterError, match="make image"):
            filters.image_archive(str(wrong))
