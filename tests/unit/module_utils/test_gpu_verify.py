"""Levels of proof, labels and taints that are ours, programs that hang. The API is a dictionary here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpunodes.ansible.module_utils import devices, gpu_cluster, gpu_verify, kube_api, kubeconfig, pools
from gpunodes.ansible.module_utils.cluster.nodes import GPU_BOOT, describe
from gpunodes.ansible.module_utils.problem import MachineProblem

SMI = """<?xml version="1.0" ?>
<nvidia_smi_log>
  <driver_version>580.65.06</driver_version><cuda_version>13.0</cuda_version>
  <gpu id="00000000:3B:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name><uuid>GPU-1</uuid>
    <fb_memory_usage><total>81559 MiB</total></fb_memory_usage></gpu>
  <gpu id="00000000:5E:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name><uuid>GPU-2</uuid>
    <fb_memory_usage><total>81559 MiB</total></fb_memory_usage></gpu>
</nvidia_smi_log>"""


@pytest.mark.parametrize(
    "text", ["[]", "5", '"x"', "{", '{"labels": 5, "taints": {"a": 1}}', '{"labels": [[], {}, 1]}']
)
def test_a_node_that_spoils_its_annotation_has_nothing_of_ours(text: str) -> None:
    """A node may write its own annotations: what is no list of names there stops nobody from reading the cluster."""
    spoilt = {"metadata": {"annotations": {pools.MANAGED: text}, "labels": {"a": "b"}, "resourceVersion": "1"}}
    assert pools.managed(spoilt) == {"labels": {}, "taints": []}
    patch = pools.patch_of(spoilt, {"gpunodes.dev/pool": "x"}, [])
    assert patch is not None
    assert patch["metadata"]["labels"] == {"gpunodes.dev/pool": "x"}


def test_what_nvidia_smi_says_becomes_labels() -> None:
    seen = gpu_verify.parse_smi(SMI)
    assert (seen.driver, seen.cuda, [gpu["uuid"] for gpu in seen.gpus]) == ("580.65.06", "13.0", ["GPU-1", "GPU-2"])
    assert gpu_verify.labels({"gpus": list(seen.gpus), "driver": seen.driver, "cuda": seen.cuda}) == {
        "gpunodes.dev/gpu-product": "NVIDIA-H100-80GB-HBM3",
        "gpunodes.dev/gpu-memory": "81559Mi",
        "gpunodes.dev/gpu-count": "2",
        "gpunodes.dev/gpu-driver": "580.65.06",
        "gpunodes.dev/gpu-cuda": "13.0",
    }
    assert gpu_verify.parse_smi("Failed to initialize NVML").gpus == ()


def test_the_first_level_that_fails_ends_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> gpu_verify.SmiReport:
        raise MachineProblem("the module nvidia is not loaded", "the driver", "load it")

    monkeypatch.setattr(gpu_verify, "expected", lambda: ["0000:3b:00.0"])
    monkeypatch.setattr(gpu_verify, "_host", broken)
    found = gpu_verify.verify("image", "containerd", [])
    assert found["levels"] == [
        {
            "level": "host",
            "state": "failed",
            "fact": "the module nvidia is not loaded",
            "wanted": "the driver",
            "remedy": "load it",
        }
    ]
    monkeypatch.setattr(gpu_verify, "_host", lambda *_: gpu_verify.parse_smi(SMI))
    monkeypatch.setattr(gpu_verify, "_container", broken)
    assert [level["level"] for level in gpu_verify.verify("image", "containerd", [])["levels"]] == ["host", "container"]


def node(labels: dict[str, str], taints: list[dict[str, str]], managed: Any = None) -> dict[str, Any]:
    annotations = {pools.MANAGED: json.dumps(managed)} if managed else {}
    metadata = {"name": "n", "resourceVersion": "7", "labels": labels, "annotations": annotations}
    return {"metadata": metadata, "spec": {"taints": taints}}


TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
THEIRS = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


def test_labels_and_taints_of_others_stay() -> None:
    patch = pools.patch_of(node({"team": "a"}, [THEIRS]), {"gpunodes.dev/pool": "x"}, [TAINT])
    assert patch
    assert patch["metadata"]["labels"] == {"gpunodes.dev/pool": "x"}
    assert patch["spec"]["taints"] == [THEIRS, TAINT]
    assert patch["metadata"]["resourceVersion"] == "7"


@pytest.mark.parametrize("key", ["node.kubernetes.io/unreachable", "gpunodes.dev/needs-repair"])
def test_a_node_does_not_get_rid_of_the_taint_that_says_what_is_wrong_with_it(key: str) -> None:
    """A kubelet may annotate its own node and may not change its taints: ours must not do it in its place."""
    wrong = {"key": key, "effect": "NoSchedule"}
    sick = node({}, [wrong, TAINT], {"labels": [], "taints": [f"{key}:NoSchedule", "nvidia.com/gpu:NoSchedule"]})
    assert pools.managed(sick)["taints"] == [TAINT]
    patch = pools.patch_of(sick, {}, [])
    assert patch is not None
    assert patch["spec"]["taints"] == [wrong]


@pytest.mark.parametrize(
    "key", ["node-restriction.kubernetes.io/tenant", "node-role.kubernetes.io/control-plane", "x.k8s.io/y"]
)
def test_a_node_does_not_get_rid_of_a_label_that_it_may_not_change(key: str) -> None:
    """As it may annotate itself, gpunodes removed for it what the admission plugin NodeRestriction keeps."""
    claims = node({key: "a", "team": "b"}, [], {"labels": [key, "team"], "taints": []})
    assert pools.managed(claims)["labels"] == {"team": "b"}
    patch = pools.patch_of(claims, {}, [])
    assert patch is not None
    assert patch["metadata"]["labels"] == {"team": None}
    # Settings may have it: then it is set, as any other.
    patch = pools.patch_of(claims, {key: "c"}, [])
    assert patch is not None
    assert patch["metadata"]["labels"][key] == "c"


def test_what_is_right_is_left_alone_and_what_was_ours_goes() -> None:
    ours = {"labels": ["gpunodes.dev/pool"], "taints": ["nvidia.com/gpu:NoSchedule"]}
    right = node({"gpunodes.dev/pool": "x", "team": "a"}, [THEIRS, TAINT], ours)
    assert pools.patch_of(right, {"gpunodes.dev/pool": "x"}, [TAINT]) is None
    assert pools.managed(right) == {"labels": {"gpunodes.dev/pool": "x"}, "taints": [TAINT]}
    gone = pools.patch_of(right, {}, [])
    assert gone
    assert gone["metadata"]["labels"] == {"gpunodes.dev/pool": None}
    assert gone["metadata"]["annotations"] == {pools.MANAGED: None}
    assert gone["spec"]["taints"] == [THEIRS]
    assert pools.patch_of(node({"team": "a"}, []), {}, []) is None


class Kept:
    """A cluster with one node, which keeps what is changed."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.node = found
        self.patches = 0

    def find(self, path: str) -> Any:
        assert path == "/api/v1/nodes/control-1"
        return self.node

    def call(self, method: str, path: str, body: Any, *_: Any) -> None:
        assert (method, path) == ("PATCH", "/api/v1/nodes/control-1")
        self.patches += 1
        self.node["metadata"]["labels"] |= body["metadata"]["labels"]
        self.node["metadata"]["annotations"] |= body["metadata"]["annotations"]


def test_a_label_that_is_added_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    firewall, role = {"gpunodes.dev/firewall": "ufw"}, "node-role.kubernetes.io/gpu"
    api = Kept(node({"gpunodes.dev/pool": "x", "team": "a", role: ""}, [TAINT]))
    monkeypatch.setattr(kube_api, "admin", lambda: api)
    monkeypatch.setattr(kubeconfig, "load", lambda _: {})
    names = {"labels": ["gpunodes.dev/pool", role], "taints": ["nvidia.com/gpu:NoSchedule"]}
    api.node["metadata"]["annotations"] = {pools.MANAGED: json.dumps(names)}
    assert pools.add("control-1", firewall, check=True)
    assert api.patches == 0
    assert pools.add("control-1", firewall, check=False)
    assert api.node["metadata"]["labels"] == {"gpunodes.dev/pool": "x", "team": "a", role: "", **firewall}
    assert pools.managed(api.node)["labels"] == {"gpunodes.dev/pool": "x", **firewall}
    assert pools.managed(api.node)["taints"] == [TAINT]
    assert pools.add("control-1", firewall, check=False) == []
    assert api.patches == 1


class Registering:
    """A cluster whose node is registered only at the third look."""

    def __init__(self) -> None:
        self.looks = 0
        self.patches: list[Any] = []

    def find(self, path: str) -> Any:
        assert path == "/api/v1/nodes/gpu-1"
        self.looks += 1
        return node({}, []) if self.looks > 2 else None

    def call(self, method: str, path: str, body: Any, *_: Any) -> None:
        assert (method, path) == ("PATCH", "/api/v1/nodes/gpu-1")
        self.patches.append(body)


def test_a_node_that_has_just_joined_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Registering()
    monkeypatch.setattr(kube_api, "admin", lambda: api)
    monkeypatch.setattr(pools, "_PAUSE_S", 0.0)
    changed, _ = pools.apply("gpu-1", {"gpunodes.dev/gpu": "true"}, [], check=False)
    assert changed == ["gpu-1"]
    assert [patch["metadata"]["labels"] for patch in api.patches] == [{"gpunodes.dev/gpu": "true"}]
    # Nothing is wished for, and nothing is there.
    api.looks = 0
    assert pools.apply("gpu-1", {}, [], check=False) == ([], [])
    # Nobody comes.
    monkeypatch.setattr(pools, "REGISTERS_S", -1.0)
    with pytest.raises(MachineProblem, match="has no node gpu-1"):
        pools.apply("gpu-1", {"gpunodes.dev/gpu": "true"}, [], check=False)


class Api:
    """A cluster with one node and its pods; a job's pod ends at once."""

    def __init__(self, offered: int, *pods: dict[str, Any], **more: str) -> None:
        allocatable = {"cpu": "8", "nvidia.com/gpu": str(offered), **more}
        self.node: dict[str, Any] = {
            "metadata": {"name": "gpu-1"},
            "status": {"nodeInfo": {"bootID": "b"}, "allocatable": allocatable},
        }
        self.pods = list(pods)
        self.calls: list[tuple[str, str]] = []
        self.jobs: list[Any] = []
        self.mirrors: list[dict[str, Any]] = []
        """Pods with the job's label that other nodes made."""
        self.log = "GPU 0: NVIDIA H100 (UUID: GPU-1)\n"

    def find(self, path: str) -> Any:
        return self.node if path.endswith("/gpu-1") else None

    def get(self, path: str, **query: str) -> Any:
        if path.endswith("/log"):
            return {"message": self.log}
        if "labelSelector" in query and "job-name" in query["labelSelector"]:
            ended = {"metadata": {"name": "p"}, "spec": {"nodeName": "gpu-1"}, "status": {"phase": "Succeeded"}}
            return {"items": [*self.mirrors, ended]}
        spaces = {"lab", "kube-system"} if path == "/api/v1/pods" else {path.split("/")[4]}
        pods = [each for each in self.pods if each["metadata"]["namespace"] in spaces]
        return {"items": [] if path.endswith("/events") else pods}

    def call(self, method: str, path: str, body: Any, *_: object) -> Any:
        self.calls.append((method, path))
        if path.endswith("/jobs"):
            self.jobs.append(body)
        return {}

    def delete(self, path: str, **_: str) -> bool:
        self.calls.append(("DELETE", path))
        return True


def pod(name: str, phase: str, **limits: str) -> dict[str, Any]:
    container = {"resources": {"limits": limits}}
    return {
        "metadata": {"namespace": "lab", "name": name},
        "spec": {"containers": [container]},
        "status": {"phase": phase},
    }


def levels(monkeypatch: pytest.MonkeyPatch, api: Api, limit_s: float = 5.0) -> list[tuple[str, str, str]]:
    monkeypatch.setattr(gpu_cluster.kube_api, "admin", lambda: api)  # type: ignore[attr-defined]  # imported there, not exported
    monkeypatch.setattr(gpu_cluster, "_POLL_S", 0.01)
    found = gpu_cluster.verify({"gpu-1": 2}, "image", limit_s)["gpu-1"]
    return [(level["level"], level["state"], level["fact"]) for level in found]


def test_a_node_is_proven_by_a_job_that_gets_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(2)
    assert levels(monkeypatch, api) == [
        ("kubelet", "ok", "allocatable nvidia.com/gpu: 2"),
        ("pod", "ok", "a job that requested one GPU got GPU-1"),
    ]
    assert [call[0] for call in api.calls] == ["POST", "PATCH", "DELETE"]


def test_a_mirror_pod_of_another_node_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(2)
    api.mirrors = [{"metadata": {"name": "a"}, "spec": {"nodeName": "evil"}, "status": {"phase": "Failed"}}]
    assert levels(monkeypatch, api)[1] == ("pod", "ok", "a job that requested one GPU got GPU-1")


def test_the_devices_of_a_plugin_that_leaves_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of gpunodes_gpu_sharing the kubelet may still offer what the plugin before offered."""
    plugin = pod("plugin-1", "Running") | {"spec": {"containers": [], "nodeName": "gpu-1"}}
    plugin["metadata"] |= {"namespace": "kube-system", "labels": {"gpunodes.dev/sharing": "time-slicing-2"}}
    api = Api(4, plugin)
    fact = "allocatable nvidia.com/gpu: 4; pod plugin-1 of the device plugin is being replaced, after 0 s"
    assert levels(monkeypatch, api, 0.05) == [("kubelet", "failed", fact)]
    api.node["metadata"]["labels"] = {"gpunodes.dev/sharing": "time-slicing-2"}
    assert levels(monkeypatch, api)[0] == ("kubelet", "ok", "allocatable nvidia.com/gpu: 4")
    plugin["metadata"]["deletionTimestamp"] = "2026-11-26T10:00:00Z"
    assert levels(monkeypatch, api, 0.05) == [("kubelet", "failed", fact)]
    # Users of any namespace may give their pods the plugin's label.
    plugin["metadata"]["namespace"] = "lab"
    assert levels(monkeypatch, api)[0] == ("kubelet", "ok", "allocatable nvidia.com/gpu: 4")


def test_a_job_whose_devices_are_gone_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Api):
        """Its kubelet refuses the first job's pod."""

        def get(self, path: str, **query: str) -> Any:
            found = super().get(path, **query)
            if "job-name" in query.get("labelSelector", "") and len(self.jobs) < refused:
                status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed"}
                found["items"][0]["status"] = status
            return found

    refused = 2
    api = Refusing(2)
    assert levels(monkeypatch, api)[1] == ("pod", "ok", "a job that requested one GPU got GPU-1")
    assert [call[0] for call in api.calls] == ["POST", "DELETE", "POST", "PATCH", "DELETE"]
    refused = 1 << 30
    [level] = levels(monkeypatch, Refusing(2), 0.05)
    assert level == ("kubelet", "failed", "pod p: UnexpectedAdmissionError: Allocate failed, after 0 s")


def test_gpus_in_use_are_proof_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = pod("x", "Running", **{"nvidia.com/gpu": "2"})
    assert levels(monkeypatch, Api(2, busy))[1] == ("pod", "skipped", "pods use all of nvidia.com/gpu: 2")


def test_gpus_of_sidecars_are_in_use_too(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = pod("x", "Running")
    limits = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    busy["spec"]["initContainers"] = [{"name": "sidecar", "restartPolicy": "Always", **limits}]
    assert levels(monkeypatch, Api(2, busy))[1] == ("pod", "skipped", "pods use all of nvidia.com/gpu: 2")
    monkeypatch.setattr(gpu_cluster.kube_api, "admin", lambda: Api(2, busy))  # type: ignore[attr-defined]  # imported there, not exported
    assert gpu_cluster.pods_with_gpus("gpu-1") == ["lab/x"]


def test_slices_and_shares_of_gpus_are_asked_for_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    mig = "nvidia.com/mig-1g.10gb"
    busy = pod("x", "Running", **{"nvidia.com/gpu": "1"})
    api = Api(1, busy, **{mig: "7"})
    api.log += "  MIG 1g.10gb     Device  0: (UUID: MIG-1)\n"
    assert levels(monkeypatch, api) == [
        ("kubelet", "ok", f"allocatable nvidia.com/gpu: 1, {mig}: 7"),
        ("pod", "ok", "a job that requested one GPU got GPU-1"),
    ]
    [job] = api.jobs
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {mig: "1"}
    shared = Api(0, **{"nvidia.com/gpu.shared": "8"})
    assert levels(monkeypatch, shared)[0][:2] == ("kubelet", "ok")


def test_a_node_that_offers_too_few_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    found = levels(monkeypatch, Api(1), 0.05)
    assert found == [
        (
            "kubelet",
            "failed",
            "allocatable nvidia.com/gpu: 1; no pod of the device plugin runs on it, after 0 s",
        )
    ]


def test_a_job_that_sees_more_than_it_asked_for_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(2)
    api.log += "GPU 1: NVIDIA H100 (UUID: GPU-2)\n"
    assert levels(monkeypatch, api)[1][:2] == ("pod", "failed")


def test_pods_that_have_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"nvidia.com/gpu": "1"}
    slices = {"nvidia.com/mig-3g.40gb": "1"}
    pods = (pod("idle", "Running", **gpu), pod("slice", "Pending", **slices), pod("ended", "Succeeded", **gpu))
    claim = pod("claim", "Running", **{"deviceclass.resource.kubernetes.io/gpu.nvidia.com": "1"})
    api = Api(2, *pods, claim, pod("cpu", "Running", cpu="1"))
    monkeypatch.setattr(gpu_cluster.kube_api, "admin", lambda: api)  # type: ignore[attr-defined]  # imported there, not exported
    assert gpu_cluster.pods_with_gpus("gpu-1") == ["lab/claim", "lab/idle", "lab/slice"]


def test_the_cluster_tells_what_is_ours() -> None:
    made = node({"gpunodes.dev/pool": "x"}, [], {"labels": ["gpunodes.dev/pool"], "taints": []})
    about = {"kubeletVersion": "v1.36.3", "machineID": "m", "systemUUID": "U", "bootID": "b"}
    made["status"] = {"nodeInfo": about, "allocatable": {"nvidia.com/gpu": "8"}}
    made["metadata"]["annotations"][GPU_BOOT] = "b"
    told = describe(made, [])
    assert (told["gpus"], told["gpus_verified"], told["managed"]["labels"]) == (8, True, {"gpunodes.dev/pool": "x"})
    assert told["plugin_away"] is False
    made["metadata"]["labels"] |= {devices.COUNT: "8"}
    assert describe(made, [])["plugin_away"] is True, "a command took it"
    made["metadata"]["labels"] |= pools.with_plugin(made)["labels"]
    assert describe(made, [])["plugin_away"] is False
    assert pools.with_plugin(made) == {}


def test_mig_instances_are_offered_exactly_as_the_layout_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(14)
    api.node["metadata"]["labels"] = {"gpunodes.dev/sharing": "mig-1g.10gb-7"}
    api.log += "  MIG 1g.10gb     Device  0: (UUID: MIG-1)\n"
    monkeypatch.setattr(gpu_cluster.kube_api, "admin", lambda: api)  # type: ignore[attr-defined]  # imported there, not exported
    monkeypatch.setattr(gpu_cluster, "_POLL_S", 0.01)

    def found(limit_s: float = 5.0) -> list[dict[str, str]]:
        return gpu_cluster.verify({"gpu-1": 14}, "image", limit_s)["gpu-1"]

    assert [each["fact"] for each in found()] == [
        "allocatable nvidia.com/gpu: 14",
        "a job that requested one MIG instance got MIG-1",
    ]
    api.log = "GPU 0: NVIDIA H100 (UUID: GPU-1)\n"
    assert found()[1]["fact"] == "the job's nvidia-smi listed 0 MIG instances"
    api.node["status"]["allocatable"] |= {"nvidia.com/gpu": "2", "nvidia.com/mig-1g.10gb": "12"}
    [level] = found(0.05)
    assert level["state"] == "failed", "as many devices, under other names"
    assert level["wanted"] == "14 MIG instances (7 x 1g.10gb of each GPU)"


def test_several_profiles_have_a_resource_each(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(0, **{"nvidia.com/mig-3g.40gb": "2", "nvidia.com/mig-1g.10gb": "8"})
    api.node["metadata"]["labels"] = {"gpunodes.dev/sharing": "mig-3g.40gb-1-1g.10gb-4"}
    api.log += "  MIG 1g.10gb     Device  0: (UUID: MIG-1)\n"
    monkeypatch.setattr(gpu_cluster.kube_api, "admin", lambda: api)  # type: ignore[attr-defined]  # imported there, not exported
    [kubelet, pod_level] = gpu_cluster.verify({"gpu-1": 10}, "image", 5.0)["gpu-1"]
    assert (kubelet["state"], pod_level["state"]) == ("ok", "ok")
    [job] = api.jobs
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert set(container["resources"]["limits"]) <= {"nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb"}
