"""The cluster through its API: nodes, their readiness and removal, join tokens."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api
from gpunodes.ansible.module_utils.cluster import nodes, readiness, removal, removed_nodes, tokens
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.planner import reports

NODE: dict[str, Any] = {
    "metadata": {
        "name": "worker-1",
        "annotations": {nodes.READY_BOOT: "boot"},
        "labels": {},
    },
    "spec": {},
    "status": {
        "addresses": [{"type": "InternalIP", "address": "10.0.0.2"}],
        "conditions": [{"type": "Ready", "status": "True"}],
        "nodeInfo": {"kubeletVersion": "v1.36.3", "machineID": "m", "systemUUID": "U", "bootID": "boot"},
    },
}


def elects(*arguments: tuple[str, str]) -> bool:
    """Whether a cluster elects leaders, by kubeadm's ConfigMap with these arguments of the controller manager."""
    listed = "".join(f"  - name: {name}\n    value: {value}\n" for name, value in arguments)
    text = f"apiServer: {{}}\ncontrollerManager:\n  extraArgs:\n{listed}kind: ClusterConfiguration\n"
    return nodes._has_leader_election({"data": {"ClusterConfiguration": text}})


def test_a_cluster_without_leader_election() -> None:
    assert elects(("profiling", '"false"'), ("leader-elect", '"true"'), ("leader-elect-lease-duration", "60s"))
    assert elects(("leader-elect", '"true"'), ("profiling", '"false"'))
    for value in ('"false"', "false", "'False'", '"0"'):
        assert not elects(("profiling", '"true"'), ("leader-elect", value))
    for unknown in (None, {}, {"data": None}, {"data": {"ClusterConfiguration": ["leader-elect: false"]}}):
        assert nodes._has_leader_election(unknown)


def pod_with(**status: object) -> dict[str, object]:
    return {"metadata": {"name": "p"}, "spec": {"nodeName": "worker-1"}, "status": status}


def test_a_proven_node() -> None:
    described = nodes.describe(NODE, [])
    assert described["verified"]
    assert (described["role"], described["address"], described["product_uuid"]) == ("worker", "10.0.0.2", "u")


@pytest.mark.parametrize("keep", [True, False])
def test_the_node_of_a_control_plane_is_drained_only_on_request_and_may_stay(
    keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its member of etcd is removed in between."""
    node = {**NODE, "metadata": {**NODE["metadata"], "uid": "u", "labels": {nodes.CONTROL_PLANE: ""}}}
    calls: list[str] = []

    class Client:
        def find(self, _: str) -> Any:
            return node

        def get(self, *_: str, **__: str) -> Any:
            return {"items": []}

        def call(self, verb: str, *_: Any) -> None:
            calls.append(verb)

    def drained(*_: Any) -> bool:
        calls.append("drain")
        return True

    def refused(*_: Any) -> list[str]:
        calls.append("refuse")
        return []

    monkeypatch.setattr(kube_api, "admin", Client)
    monkeypatch.setattr(removal, "_drain", drained)
    monkeypatch.setattr(removed_nodes, "refuse", refused)
    with pytest.raises(MachineProblem, match="worker-1 is a control plane"):
        removal.remove("worker-1", 10, force=True, check=False)
    assert calls == []
    report, _ = removal.remove("worker-1", 10, force=False, check=False, control_plane=True, keep=keep)
    assert calls == (["drain"] if keep else ["drain", "refuse", "DELETE"])
    assert report.actions == ["drain worker-1", *([] if keep else ["delete node worker-1"])]
    node["spec"] = {"unschedulable": True}
    report, _ = removal.remove("worker-1", 10, force=False, check=True, control_plane=True, keep=True)
    assert report.actions == []


@pytest.mark.parametrize("changed", [None, "uid", "machine_id", "boot_id"])
def test_a_node_of_another_machine_is_neither_drained_nor_deleted(
    changed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the choice and its turn the name may have become another machine's: looked at again, and by uid."""
    node = {**NODE, "metadata": {**NODE["metadata"], "uid": "uid-1"}}
    calls: list[tuple[Any, ...]] = []

    class Client:
        def find(self, path: str) -> Any:
            return node

        def get(self, *_: str, **__: str) -> Any:
            return {"items": []}

        def call(self, *words: Any) -> None:
            calls.append(words)

    def drained(*_: Any) -> bool:
        calls.append(("drain",))
        return True

    def refused(_: Any, name: str) -> list[str]:
        calls.append(("refuse", name))
        return []

    monkeypatch.setattr("gpunodes.ansible.module_utils.kube_api.admin", Client)
    monkeypatch.setattr(removal, "_drain", drained)
    monkeypatch.setattr(removed_nodes, "refuse", refused)
    described = nodes.describe(node, [])
    expected = {key: described[key] for key in ("uid", "boot_id", "machine_id", "product_uuid")}
    if changed:
        with pytest.raises(MachineProblem, match=f"belongs to another machine now: it reports {changed}"):
            removal.remove("worker-1", 10, False, False, {**expected, changed: "before"})
        assert calls == []
    else:
        removal.remove("worker-1", 10, False, False, expected)
        assert calls == [
            ("drain",),
            ("refuse", "worker-1"),
            ("DELETE", "/api/v1/nodes/worker-1", {"preconditions": {"uid": "uid-1"}}),
        ]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"labels":' * 100_000, "x" * 1_000_000])
def test_an_annotation_that_cannot_be_read_tells_of_nothing_of_ours(text: str) -> None:
    """A node that writes it keeps nobody from the others."""
    annotations = {**NODE["metadata"]["annotations"], "gpunodes.dev/managed": text}
    described = nodes.describe({**NODE, "metadata": {**NODE["metadata"], "annotations": annotations}}, [])
    assert described["managed"] == {"labels": {}, "taints": []}


def test_what_one_node_reports_oddly_is_its_own_trouble() -> None:
    """The cluster's report keeps its shape, whatever a kubelet writes: nobody else's command is refused for it."""
    info = {**NODE["status"]["nodeInfo"], "kubeletVersion": "", "containerRuntimeVersion": "X://"}
    resources = {"nvidia.com/gpu": str((1 << 63) - 1), "nvidia.com/gpu.shared": str((1 << 63) - 1)}
    addresses = [{"type": "InternalIP", "address": "not an ip"}]
    status = {**NODE["status"], "nodeInfo": info, "allocatable": resources, "addresses": addresses}
    told = nodes.describe({**NODE, "status": status}, [])
    assert (told["address"], told["version"], told["runtime"], told["gpus"]) == ("", "", "", 0)
    assert [told[key] for key in ("ready", "verified", "gpus_verified")] == [False] * 3
    assert told["reason"] == "its kubelet reports an invalid address and version and runtime"
    whole = {"version": "v1.36.3", "endpoint": "10.0.0.1:6443", "ca_hash": "sha256:" + "0" * 64, "nodes": [told]}
    assert reports.cluster_problem(whole) == ""


def test_a_node_with_thousands_of_values_is_its_own_trouble() -> None:
    labels = {f"own-{number}": "" for number in range(1001)}
    metadata = {
        **NODE["metadata"],
        "labels": labels,
        "annotations": {**NODE["metadata"]["annotations"], "gpunodes.dev/managed": json.dumps({"labels": [*labels]})},
    }
    addresses = [{"type": "InternalIP", "address": f"10.0.{number // 250}.{number % 250}"} for number in range(1001)]
    told = nodes.describe({**NODE, "metadata": metadata, "status": {**NODE["status"], "addresses": addresses}}, [])
    assert (told["addresses"], told["managed"]) == ([], {"labels": {}, "taints": []})
    assert [told[key] for key in ("ready", "verified", "gpus_verified")] == [False] * 3
    assert "has more than 1000 addresses and managed labels" in told["reason"]
    assert told["machine_id"] == "m", "it can be removed"
    unreadable = nodes.unreadable("worker-2", "no labels")
    assert (unreadable["ready"], unreadable["reason"]) == (False, "its Node object cannot be read: no labels")
    listed = [told, unreadable]
    whole = {"version": "v1.36.3", "endpoint": "10.0.0.1:6443", "ca_hash": "sha256:" + "0" * 64, "nodes": listed}
    assert reports.cluster_problem(whole) == ""


def test_a_reboot_ends_the_proof() -> None:
    info = {**NODE["status"]["nodeInfo"], "bootID": "later"}
    node = {**NODE, "status": {**NODE["status"], "nodeInfo": info}}
    assert not nodes.describe(node, [])["verified"]


def test_a_pod_that_waits_ends_the_proof_and_is_the_reason() -> None:
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    described = nodes.describe(NODE, [pod_with(containerStatuses=[{"state": state}])])
    assert not described["verified"]
    assert described["reason"] == "pod p: ImagePullBackOff: no such image"


def test_pod_problems() -> None:
    ready = [{"type": "Ready", "status": "True"}]
    assert nodes.pod_problem(pod_with(conditions=ready)) == ""
    assert nodes.pod_problem(pod_with(phase="Pending")) == "pod p is pending"
    unplaced = [{"type": "PodScheduled", "status": "False", "message": "no nodes"}]
    assert nodes.pod_problem(pod_with(conditions=unplaced)) == "pod p: no nodes"


def test_a_node_is_proven_step_by_step_and_nothing_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = [{"type": "Ready", "status": "True"}]
    up = [*ready, {"type": "NetworkUnavailable", "status": "False"}]
    parts = {"kube-system": {"k8s-app": "kube-proxy"}, "kube-flannel": {nodes.NETWORK_LABEL: "flannel"}}
    here = [
        {
            "metadata": {"name": f"p{n}", "namespace": space, "labels": labels},
            "spec": {"nodeName": "worker-1"},
            "status": {},
        }
        for n, (space, labels) in enumerate(parts.items())
    ]
    # Users of any namespace may give their pods these labels.
    ill = {"containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}
    for labels in parts.values():
        theirs = {"name": "theirs", "namespace": "lab", "labels": labels}
        here.append({"metadata": theirs, "spec": {"nodeName": "worker-1"}, "status": ill})
    phases = iter(["Pending", "Succeeded"])
    asked: list[str] = []

    class Api:
        def call(self, verb: str, path: str, *_: object) -> None:
            asked.append(f"{verb} {path}")

        def find(self, path: str) -> object:
            asked.append(path)
            if path == "/api/v1/nodes/worker-1":
                return {**NODE, "status": {**NODE["status"], "conditions": up}}
            return {"metadata": {"name": "probe"}, "status": {"phase": next(phases)}}

        def get(self, path: str, **query: str) -> dict[str, object]:
            asked.append(f"{path} {query}")
            if "kube-dns" in str(query):
                return {"items": [pod_with(conditions=ready)]}
            if len([line for line in asked if "fieldSelector" in line]) > 1:
                for pod in here[:2]:
                    pod["status"] = {"conditions": ready}
            return {"items": here}

    monkeypatch.setattr(kube_api, "admin", Api)
    monkeypatch.setattr(readiness, "_clean", lambda *_: None)
    monkeypatch.setattr(readiness, "_POLL_S", 0)
    assert readiness.wait_until_ready(["worker-1"], "image", 60) == {"worker-1": ""}
    probes = [line for line in asked if "gpunodes-ready-" in line]
    assert len(probes) == 2
    assert [line for line in asked if "/nodes" in line] == [
        *2 * ["/api/v1/nodes/worker-1"],
        "PATCH /api/v1/nodes/worker-1",
    ]


def test_a_network_that_dies_is_the_cause_of_what_happens_to_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's event named a file that was missing, and not the program that should have written it."""
    ready = [{"type": "Ready", "status": "True"}, {"type": "NetworkUnavailable", "status": "False"}]
    node = {**NODE, "status": {**NODE["status"], "conditions": ready}}
    restarts = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s"}}

    def pod(name: str, space: str, labels: dict[str, str]) -> dict[str, Any]:
        meta = {"name": name, "namespace": space, "labels": labels}
        return {"metadata": meta, "spec": {"nodeName": "worker-1"}, "status": {"conditions": ready}}

    here = [
        pod("proxy", "kube-system", {"k8s-app": "kube-proxy"}),
        pod("flannel", "kube-flannel", {nodes.NETWORK_LABEL: "flannel"}),
    ]

    class Api:
        def call(self, verb: str, *_: object) -> None:
            # The network dies after the probe pod was made.
            here[1]["status"] = {"containerStatuses": [{"state": restarts}]}

        def find(self, path: str) -> object:
            return node if "/nodes/" in path else {"metadata": {"name": "probe"}, "status": {"phase": "Pending"}}

        def get(self, path: str, **query: str) -> dict[str, object]:
            if path.endswith("/flannel/log"):
                return {"message": "iptables: exec format error\n"}
            if "kube-dns" in str(query):
                return {"items": []}
            return {"items": here}

    monkeypatch.setattr(kube_api, "admin", Api)
    monkeypatch.setattr(readiness, "_clean", lambda *_: None)
    monkeypatch.setattr(readiness, "_POLL_S", 0.01)
    assert readiness.wait_until_ready(["worker-1"], "image", 0.1) == {
        "worker-1": "pod flannel: CrashLoopBackOff: back-off 20s; its log: iptables: exec format error"
    }


FLANNEL = """\
I1128 03:13:28.872818 1 main.go:234] Installing signal handlers
E1128 03:13:29.279158 1 main.go:391] Failed to setup masq rules, could not get iptables version: exec format error
I1128 03:13:29.280754 1 main.go:448] Stopping shutdownHandler...
"""


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        ("starts\n\nends\n", "ends"),
        # flannel 0.26
        (FLANNEL, FLANNEL.splitlines()[1]),
        ("panic: no route\n\ngoroutine 1 [running]:\nruntime/panic.go:884\nx.Error(0xc)\n", "panic: no route"),
        ("retrying after it failed\nno such file\n", "no such file"),
        ('level=error msg="no route"\nlevel=info msg=ends\n', 'level=error msg="no route"'),
    ],
)
def test_the_line_that_tells_why_a_network_add_on_ends(log: str, line: str) -> None:
    assert readiness._telling(log) == line


def _waiting_for_network(name: str) -> dict[str, Any]:
    message = (
        "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:Network plugin"
    )
    conditions = [
        {"type": "Ready", "status": "False", "message": f"{message} returns error: cni plugin not initialized"}
    ]
    return {**NODE, "metadata": {"name": name}, "status": {**NODE["status"], "conditions": conditions}}


@pytest.mark.parametrize("another_has_one", [False, True])
def test_a_cluster_without_the_administrators_network_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, another_has_one: bool
) -> None:
    ready = {**NODE, "status": {**NODE["status"], "conditions": [{"type": "Ready", "status": "True"}]}}

    class Api:
        def find(self, path: str) -> object:
            return _waiting_for_network(path.rpartition("/")[2])

        def get(self, path: str, **_: str) -> dict[str, object]:
            cluster = (
                [_waiting_for_network("worker-1"), ready] if another_has_one else [_waiting_for_network("worker-1")]
            )
            return {"items": cluster if path == "/api/v1/nodes" else []}

    monkeypatch.setattr(kube_api, "admin", Api)
    monkeypatch.setattr(readiness, "_POLL_S", 0)
    monkeypatch.setattr(readiness, "_NO_NETWORK_S", 0.05)
    began = time.monotonic()
    [reason] = readiness.wait_until_ready(["worker-1"], "image", 0.5, own_network=True).values()
    # Where another node has a network, the add-on may still be on its way to this one.
    assert (time.monotonic() - began < 0.4) is not another_has_one
    assert ("install yours, then run the command again" in reason) is not another_has_one
    [reason] = readiness.wait_until_ready(["worker-1"], "image", 0.1).values()
    assert reason == "no pod of the kube-proxy is on it yet"


def test_a_network_of_the_administrator_is_proven_by_the_pod_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    up = [{"type": "Ready", "status": "True"}, {"type": "NetworkUnavailable", "status": "False"}]
    phases = iter(["Pending", "Succeeded"])

    class Api:
        def call(self, *_: object) -> None:
            pass

        def find(self, path: str) -> object:
            if path == "/api/v1/nodes/worker-1":
                return {**NODE, "status": {**NODE["status"], "conditions": up}}
            return {"metadata": {"name": "probe"}, "status": {"phase": next(phases)}}

        def get(self, *_: str, **__: str) -> dict[str, object]:
            return {"items": []}  # no kube-proxy: the add-on replaces it

    monkeypatch.setattr(kube_api, "admin", Api)
    monkeypatch.setattr(readiness, "_POLL_S", 0)
    assert readiness.wait_until_ready(["worker-1"], "image", 60, own_network=True) == {"worker-1": ""}


def test_probe_tolerates_all_and_needs_no_token() -> None:
    spec = readiness.probe_pod("n", "worker-1", "image")["spec"]
    assert spec["nodeName"] == "worker-1"
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["automountServiceAccountToken"] is False


def test_token_form() -> None:
    name, _, secret = tokens.new_token().partition(".")
    assert (len(name), len(secret)) == (6, 16)
    assert tokens.new_token() != tokens.new_token()
