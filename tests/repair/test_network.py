"""The rights of the network add-on on a real API server: the token of one node's pod changes no other node.

The requests are those of flannel v0.26.7 (pkg/subnet/kube/kube.go), sent with the token that a kubelet gets for a pod.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from gpunodes.ansible.module_utils import kubeconfig
from gpunodes.ansible.module_utils.cluster import objects

from . import apiserver
from .addon_accounts import Account
from .addon_programs import program, running, until

TEMPLATE = Path(__file__).parents[2] / "roles" / "network" / "templates" / "flannel.yml.j2"
SPACE, ACCOUNT = "/api/v1/namespaces/kube-flannel", "flannel"
PREFIX = "flannel.alpha.coreos.com/"
STRATEGIC, MERGE, APPLY = (
    "application/strategic-merge-patch+json",
    "application/merge-patch+json",
    "application/apply-patch+yaml",
)
READY = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}
UP = {
    "type": "NetworkUnavailable",
    "status": "False",
    "reason": "FlannelIsUp",
    "message": "Flannel is running on this node",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "lastHeartbeatTime": "2026-01-01T00:00:00Z",
}
STATUS = {
    "capacity": {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "4"},
    "allocatable": {"cpu": "7800m", "memory": "31Gi", "nvidia.com/gpu": "4"},
    "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "PIDPressure", "status": "False"}, READY],
    "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
    "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
    "nodeInfo": {"bootID": "b", "machineID": "m", "systemUUID": "u", "kubeletVersion": "v1.36.3"},
    "images": [{"names": [f"registry.example/{n}@sha256:{n:064x}", f"registry.example/{n}:1"]} for n in range(50)],
}
LEASE = {
    f"{PREFIX}backend-data": '{"VNI":1,"VtepMAC":"12:c6:65:89:b4:e3"}',
    f"{PREFIX}backend-type": "vxlan",
    f"{PREFIX}kube-subnet-manager": "true",
    f"{PREFIX}public-ip": "10.0.0.1",
}


def rendered() -> list[dict[str, Any]]:
    """The objects of the network add-on."""
    images = {"daemon": "registry.example/x:1", "plugin": "registry.example/y:1"}
    variables = {"network_images": images, "network_pod_subnet": "10.244.0.0/16", "network_endpoint": "10.0.0.1:6443"}
    made = Templar(DataLoader(), variables=variables).template(trust_as_template(TEMPLATE.read_text()))
    return [each for each in yaml.safe_load_all(made) if each]


def _node(server: apiserver.ApiServer, name: str) -> None:
    """A node with all that kubelets and gpunodes write."""
    metadata = {
        "name": name,
        "labels": {"kubernetes.io/hostname": name, "gpunodes.dev/gpu": "true"},
        "annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true", "gpunodes.dev/of": "x"},
        "finalizers": ["example.com/kept"],
    }
    spec = {"podCIDR": "10.244.1.0/24", "taints": [{"key": "gpunodes.dev/starting", "effect": "NoSchedule"}]}
    server.call("POST", "/api/v1/nodes", {"metadata": metadata, "spec": spec})
    server.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": STATUS}, MERGE)


def _token(server: apiserver.ApiServer, node: str) -> str:
    """The token of flannel's pod on a node."""
    container = {"name": "kube-flannel", "image": "registry.example/x:1"}
    spec = {"nodeName": node, "serviceAccountName": ACCOUNT, "containers": [container], "hostNetwork": True}
    pod = server.call("POST", f"{SPACE}/pods", {"metadata": {"name": f"kube-flannel-{node}"}, "spec": spec})
    bound = {"kind": "Pod", "apiVersion": "v1", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    requested = {"spec": {"boundObjectRef": bound, "expirationSeconds": 3600}}
    made = server.call("POST", f"{SPACE}/serviceaccounts/{ACCOUNT}/token", requested)
    return str(made["status"]["token"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[apiserver.ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("network"), {"authorization-mode": "RBAC"}) as made:
        yield made


@pytest.fixture(scope="module")
def token(server: apiserver.ApiServer) -> str:
    """The token of flannel's pod on gpu-1, when the policy has an effect."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))
        wanted = rendered()
        assert len(objects.apply(wanted, check=False)[0]) == len(wanted)
        assert objects.apply(wanted, check=False)[0] == []
    for name in ("gpu-1", "gpu-2"):
        _node(server, name)
    found, deadline = _token(server, "gpu-1"), time.monotonic() + 60
    while not patched(server, found, "gpu-2", {"metadata": {"annotations": {f"{PREFIX}x": str(time.monotonic())}}}):
        assert time.monotonic() < deadline, "the policy has no effect"
        time.sleep(1)
    return found


def sent(server: apiserver.ApiServer, token: str, method: str, path: str, body: Any = None, kind: str = "") -> str:
    """The message of a request with a token, "" if it succeeds."""
    return Account(server, token).refusal(method, path, body, kind or "application/json")


def patched(server: apiserver.ApiServer, token: str, node: str, change: Any, kind: str = STRATEGIC) -> str:
    return sent(server, token, "PATCH", f"/api/v1/nodes/{node}/status", change, kind)


def test_what_flannel_writes_is_accepted(server: apiserver.ApiServer, token: str) -> None:
    # At its first start, and when a node that another backend served starts anew.
    assert patched(server, token, "gpu-1", {"metadata": {"annotations": LEASE}}) == ""
    assert patched(server, token, "gpu-1", {"status": {"conditions": [UP]}}) == ""
    # Later starts change what is there; the condition is then in the middle, between those of a kubelet.
    later = {**UP, "lastHeartbeatTime": "2026-01-02T00:00:00Z", "lastTransitionTime": "2026-01-02T00:00:00Z"}
    assert patched(server, token, "gpu-1", {"status": {"conditions": [later]}}) == ""
    other = {f"{PREFIX}backend-data": "null", f"{PREFIX}backend-type": "host-gw", f"{PREFIX}public-ip": "10.0.0.7"}
    assert patched(server, token, "gpu-1", {"metadata": {"annotations": other}}) == ""
    gone = dict.fromkeys((f"{PREFIX}backend-data", f"{PREFIX}backend-v6-data"))
    assert patched(server, token, "gpu-1", {"metadata": {"annotations": gone}}) == ""
    found = server.call("GET", "/api/v1/nodes/gpu-1")
    assert found["metadata"]["annotations"][f"{PREFIX}backend-type"] == "host-gw"
    assert f"{PREFIX}backend-data" not in found["metadata"]["annotations"]
    assert {each["type"]: each["status"] for each in found["status"]["conditions"]} == {
        "MemoryPressure": "False",
        "NetworkUnavailable": "False",
        "PIDPressure": "False",
        "Ready": "True",
    }


@pytest.mark.usefixtures("token")
def test_a_node_without_annotations_and_conditions_gets_them(server: apiserver.ApiServer) -> None:
    server.call("POST", "/api/v1/nodes", {"metadata": {"name": "bare"}})
    own = _token(server, "bare")
    assert patched(server, own, "bare", {"metadata": {"annotations": LEASE}}) == ""
    assert patched(server, own, "bare", {"status": {"conditions": [UP]}}) == ""


OWN = "flannel may change its own node only"
METADATA = "flannel may change no label, finalizer, owner or specification of a node"
NOTES = "flannel may change its own annotations of a node only"
CONDITIONS = "flannel may change the condition NetworkUnavailable of a node only"
NOT_READY = {**READY, "status": "False"}
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "y"}


@pytest.mark.parametrize(
    ("node", "change", "refused"),
    [
        ("gpu-2", {"metadata": {"annotations": LEASE}}, OWN),
        ("gpu-2", {"metadata": {"annotations": {"gpunodes.dev/power-off": "boot"}}}, OWN),
        ("gpu-2", {"status": {"conditions": [UP]}}, OWN),
        ("gpu-2", {"status": {"conditions": [NOT_READY]}}, OWN),
        ("gpu-2", {"metadata": {"annotations": {f"{PREFIX}public-ip": "10.0.0.66"}}}, OWN),
        ("gpu-1", {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}, METADATA),
        ("gpu-1", {"metadata": {"labels": {"gpunodes.dev/gpu": None}}}, METADATA),
        ("gpu-1", {"metadata": {"labels": None}}, METADATA),
        ("gpu-1", {"metadata": {"finalizers": ["example.com/more"]}}, METADATA),
        ("gpu-1", {"metadata": {"$deleteFromPrimitiveList/finalizers": ["example.com/kept"]}}, METADATA),
        ("gpu-1", {"metadata": {"ownerReferences": [OWNER]}}, METADATA),
        ("gpu-1", {"metadata": {"annotations": {"gpunodes.dev/of": "y"}}}, NOTES),
        ("gpu-1", {"metadata": {"annotations": {"gpunodes.dev/of": None}}}, NOTES),
        ("gpu-1", {"metadata": {"annotations": {"gpunodes.dev/power-off": "boot", **LEASE}}}, NOTES),
        ("gpu-1", {"metadata": {"annotations": {"flannel.alpha.coreos.com.example/x": "y"}}}, NOTES),
        ("gpu-1", {"status": {"conditions": [NOT_READY]}}, CONDITIONS),
        ("gpu-1", {"status": {"conditions": [{"type": "Ready", "$patch": "delete"}]}}, CONDITIONS),
        ("gpu-1", {"status": {"conditions": [{"type": "GpuBroken", "status": "True"}, UP]}}, CONDITIONS),
        ("gpu-1", {"status": {"allocatable": {"nvidia.com/gpu": "64"}}}, CONDITIONS),
        ("gpu-1", {"status": {"allocatable": {"nvidia.com/gpu": None}}}, CONDITIONS),
        ("gpu-1", {"status": {"addresses": [{"type": "ExternalIP", "address": "10.0.0.66"}]}}, CONDITIONS),
        ("gpu-1", {"status": {"nodeInfo": {"bootID": "other"}}}, CONDITIONS),
        ("gpu-1", {"status": {"images": None}}, CONDITIONS),
        ("gpu-1", {"status": {"volumesInUse": ["x"]}}, CONDITIONS),
        ("gpu-1", {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 6443}}}}, CONDITIONS),
    ],
)
def test_nothing_else_is_changed_by_its_token(
    server: apiserver.ApiServer, token: str, node: str, change: dict[str, Any], refused: str
) -> None:
    before = _comparable(server)
    assert refused in patched(server, token, node, change)
    assert _comparable(server) == before


def _comparable(server: apiserver.ApiServer) -> list[Any]:
    found = copy.deepcopy(server.call("GET", "/api/v1/nodes")["items"])
    for each in found:
        each["metadata"].pop("managedFields", None)
    return list(found)


def test_server_side_apply_is_checked_too(server: apiserver.ApiServer, token: str) -> None:
    label = {"labels": {"node-role.kubernetes.io/control-plane": ""}}
    applied = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-1", **label}}
    path = "/api/v1/nodes/gpu-1/status?fieldManager=kubelet&force=true"
    assert METADATA in sent(server, token, "PATCH", path, applied, APPLY)


@pytest.mark.usefixtures("token")
def test_the_expressions_are_cheap_enough_for_a_large_node(server: apiserver.ApiServer) -> None:
    """Beyond a budget the API server refuses a request, and flannel would not start."""
    labels = {f"example.com/{n}": "x" * 60 for n in range(500)}
    notes = {f"example.com/{n}": "x" * 300 for n in range(500)}
    server.call("POST", "/api/v1/nodes", {"metadata": {"name": "large", "labels": labels, "annotations": notes}})
    images = [{"names": [f"registry.example/{n}@sha256:{n:064x}", f"registry.example/{n}:1"]} for n in range(1500)]
    server.call("PATCH", "/api/v1/nodes/large/status", {"status": {**STATUS, "images": images}}, MERGE)
    own = _token(server, "large")
    assert patched(server, own, "large", {"metadata": {"annotations": LEASE}}) == ""
    assert patched(server, own, "large", {"status": {"conditions": [UP]}}) == ""
    assert CONDITIONS in patched(server, own, "large", {"status": {"images": None}})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/namespaces/default/pods/x"),
        ("GET", f"{SPACE}/pods"),
        ("GET", "/api/v1/secrets"),
        ("DELETE", "/api/v1/nodes/gpu-1"),
        ("PATCH", "/api/v1/nodes/gpu-1"),
        ("PUT", "/api/v1/nodes/gpu-1/status"),
    ],
)
def test_its_account_has_no_other_rights(server: apiserver.ApiServer, token: str, method: str, path: str) -> None:
    body = {"metadata": {"name": "gpu-1"}} if method in {"PATCH", "PUT"} else None
    assert "is forbidden: User" in sent(server, token, method, path, body, MERGE if method == "PATCH" else "")


@pytest.mark.usefixtures("token")
def test_a_token_of_no_pod_changes_nothing(server: apiserver.ApiServer) -> None:
    """Such as one that an administrator requests by hand."""
    made = server.call("POST", f"{SPACE}/serviceaccounts/{ACCOUNT}/token", {"spec": {}})
    assert OWN in patched(server, made["status"]["token"], "gpu-1", {"status": {"conditions": [UP]}})


@pytest.mark.usefixtures("token")
def test_others_change_nodes_as_before(server: apiserver.ApiServer) -> None:
    label = {"metadata": {"labels": {"gpunodes.dev/pool": "a"}}}
    server.call("PATCH", "/api/v1/nodes/gpu-2/status", label, MERGE)
    server.call("PATCH", "/api/v1/nodes/gpu-2", {"metadata": {"labels": {"gpunodes.dev/pool": None}}}, MERGE)


@pytest.mark.usefixtures("token")
def test_each_object_is_valid(server: apiserver.ApiServer) -> None:
    """A field that its kind does not have is an error, and so is a name in an expression that does not exist."""
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/gpunodes-flannel"
    [policy] = [each for each in rendered() if each["kind"] == "ValidatingAdmissionPolicy"]
    query = "dryRun=All&fieldValidation=Strict&fieldManager=test&force=true"
    server.call("PATCH", f"{path}?{query}", policy, APPLY)
    apiserver.controllers(server, "validatingadmissionpolicy-status-controller")
    deadline = time.monotonic() + 90
    while not (status := server.call("GET", path).get("status") or {}).get("observedGeneration"):
        assert time.monotonic() < deadline
        time.sleep(1)
    assert status["typeChecking"] == {}


@pytest.mark.skipif(not Path("/proc/sys/net/bridge").exists(), reason="flannel needs the kernel module br_netfilter")
@pytest.mark.usefixtures("token")
def test_flannel_itself_registers_its_node(server: apiserver.ApiServer) -> None:
    """With the backend that changes nothing on this machine; what it writes to its node differs in values only."""
    path, folder = program("flannel", "flannel"), server.folder
    _node(server, "real")
    config = yaml.safe_load(server.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": _token(server, "real")}
    given = folder / "flannel.conf"
    given.touch(mode=0o600)
    given.write_text(yaml.safe_dump(config))
    network = {"Network": "10.244.0.0/16", "Backend": {"Type": "alloc"}}
    (folder / "net-conf.json").write_text(json.dumps(network))
    words = [
        *("--kube-subnet-mgr", "--iface=127.0.0.1", "--iptables-forward-rules=false"),
        *(f"--kubeconfig-file={given}", f"--net-config-path={folder}/net-conf.json", f"--subnet-file={folder}/env"),
    ]

    def registered() -> bool:
        node = server.call("GET", "/api/v1/nodes/real")
        return UP["reason"] in {each.get("reason") for each in node["status"]["conditions"]}

    with running(server, "flannel", [str(path), *words], POD_NAME="kube-flannel-real", POD_NAMESPACE="kube-flannel"):
        until("it has registered", registered)
    assert server.call("GET", "/api/v1/nodes/real")["metadata"]["annotations"][f"{PREFIX}public-ip"] == "127.0.0.1"
