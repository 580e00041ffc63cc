"""GPUs by dynamic resource allocation: the setting, the plan, ResourceSlices, and the verification by a claim."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from gpunodes import settings
from gpunodes.ansible.module_utils import devices, gpu_cluster
from gpunodes.ansible.module_utils.cluster import nodes, slices
from gpunodes.engine.cluster.nodes import parse
from gpunodes.errors import WrongInput
from gpunodes.planner import gpu, gpu_serving, pools
from gpunodes.views import gpu as view

from tests.unit.module_utils.test_gpu_verify import Api, pod
from tests.unit.planner.test_gpu_plan import machine

ROLE = Path(__file__).parents[2] / "roles" / "device_plugin"
DRA = {"gpunodes_gpu_serving": "dra"}


def rendered() -> dict[tuple[str, str], dict[str, Any]]:
    """The driver's objects by kind and name."""
    loader = DataLoader()
    defaults = loader.load_from_file(str(ROLE / "defaults/main.yml"), trusted_as_template=True)
    made = Templar(loader, variables=defaults).template(trust_as_template((ROLE / "templates/dra.yml.j2").read_text()))
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(made) if each}


def resource_slice(node: str, *names: str, generation: int = 1, kind: str = "gpu", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{generation}-{kind}"},
        "spec": {
            "driver": slices.DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": [{"name": name, "attributes": {"type": {"string": kind}}} for name in names],
            **spec,
        },
    }


def test_the_commands_for_its_removal_name_each_object() -> None:
    page = (ROLE.parents[1] / "docs" / "scheduling.md").read_text()
    lines = re.findall(r"^ {4}kubectl (?:-n kube-system )?delete (\S+) (\S+)$", page, re.MULTILINE)
    removed = {(kind, name) for kinds, name in lines for kind in kinds.split(",")}
    assert removed == {(kind.lower(), name) for kind, name in rendered()}


# --- the setting and the plan ---


def test_the_label_follows_from_the_setting() -> None:
    assert pools.labels(settings.resolve(DRA), []) == {devices.SERVING: "dra"}
    assert pools.labels(settings.resolve({}), []) == {}
    assert list(settings.problems({"gpunodes_gpu_serving": "both"}))


@pytest.mark.parametrize(
    "other",
    [{"gpunodes_gpu_sharing": {"mode": "time-slicing", "replicas": 4}}, {"gpunodes_burn_in": True}],
)
def test_what_needs_the_device_plugin_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(WrongInput, match="needs the device plugin"):
        gpu_serving.serving(settings.resolve({**DRA, **other}))


def planned(version: str = "1.36", **more: Any) -> gpu.Planned:
    return gpu.planned("gpu-1", machine("H100"), gpu.requested_of(settings.resolve({**DRA, **more}), version))


def test_the_plan_shows_it_and_refuses_what_lacks_it() -> None:
    found = planned()
    assert "DeviceClass gpu.nvidia.com" in view.plans(gpu.Plans("1.36", [found]))
    assert gpu.requested_of({**settings.resolve({}), **found.requested.settings()}, "1.36") == found.requested
    assert "cri-dockerd does not pass CDI devices" in str(planned(gpunodes_runtime="docker").conflicts)
    assert "does not serve resource.k8s.io/v1" in str(planned("1.33.4").conflicts)


def test_a_pool_that_scales_is_refused_in_one_sentence() -> None:
    problem = gpu_serving.conflict("gpu-1", settings.resolve(DRA))
    assert problem
    assert "its pool scales" in str(problem)
    assert gpu_serving.conflict("gpu-1", settings.resolve({})) is None


# --- ResourceSlices ---


def test_only_gpus_of_the_newest_generation_count() -> None:
    found = [
        resource_slice("gpu-1", "gpu-0", "gpu-1", "gpu-2"),
        resource_slice("gpu-1", "gpu-0", "gpu-1", generation=2),
        resource_slice("gpu-1", "gpu-1-mig", generation=2, kind="mig"),
        resource_slice("gpu-2", "gpu-0", driver="other.example"),
        resource_slice("gpu-3"),
        {"spec": None},
    ]
    assert slices.by_node(found) == {"gpu-1": {"gpu-1/gpu-0", "gpu-1/gpu-1"}, "gpu-3": set()}


def test_the_slice_of_a_real_h200() -> None:
    """As the driver v0.4.1 published it on one with driver 580.159.04; its UUID is replaced."""
    attributes = {
        "addressingMode": {"string": "None"},
        "architecture": {"string": "Hopper"},
        "brand": {"string": "Nvidia"},
        "cudaComputeCapability": {"version": "9.0.0"},
        "cudaDriverVersion": {"version": "13.0.0"},
        "driverVersion": {"version": "580.159.4"},
        "productName": {"string": "NVIDIA H200"},
        "resource.kubernetes.io/pciBusID": {"string": "0000:00:06.0"},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
        "type": {"string": "gpu"},
        "uuid": {"string": "GPU-00000000-0000-0000-0000-0000000000a1"},
    }
    device = {"name": "gpu-0", "attributes": attributes, "capacity": {"memory": {"value": "143771Mi"}}}
    assert slices.by_node([resource_slice("gpu-1", devices=[device])]) == {"gpu-1": {"gpu-1/gpu-0"}}


NODE: dict[str, Any] = {
    "metadata": {"name": "gpu-1", "labels": {devices.SERVING: "dra", "gpunodes.dev/gpu-count": "2"}},
    "status": {
        "nodeInfo": {"kubeletVersion": "v1.36.3", "machineID": "m", "systemUUID": "U", "bootID": "b"},
        "allocatable": {"cpu": "8"},
    },
}


def test_status_counts_slices_and_a_repair_waits_for_no_allocatable_gpus() -> None:
    assert nodes.describe(NODE, [], {"gpu-1": {"a", "b"}})["gpus"] == 2
    assert nodes.describe(NODE, [], {})["gpus"] == 0
    found = parse(NODE, "gpunodes.dev/pool")
    assert (found.expected, found.allocatable) == (None, None)
    assert (
        found.pool
        == parse({**NODE, "metadata": {**NODE["metadata"], "labels": {"gpunodes.dev/gpu-count": "2"}}}, "x").pool
    )


# --- the verification ---


class Claims(Api):
    """A cluster whose node has GPUs in slices."""

    def __init__(self, *names: str, allocated: tuple[str, ...] = ()) -> None:
        super().__init__(0)
        self.node["metadata"]["labels"] = {devices.SERVING: "dra"}
        self.slices = [resource_slice("gpu-1", *names)]
        results = [{"driver": slices.DRIVER, "pool": "gpu-1", "device": name} for name in allocated]
        self.claims = [{"metadata": {"name": "c"}, "status": {"allocation": {"devices": {"results": results}}}}]
        self.made: list[Any] = []

    def get(self, path: str, **query: str) -> Any:
        if path.endswith("/resourceslices"):
            assert query["fieldSelector"] == "spec.driver=gpu.nvidia.com,spec.nodeName=gpu-1"
            return {"items": self.slices}
        if path.endswith("/resourceclaims"):
            return {"items": self.claims}
        return super().get(path, **query)

    def call(self, method: str, path: str, body: Any, *rest: object) -> Any:
        self.made.append(body)
        return super().call(method, path, body, *rest)


def levels(monkeypatch: pytest.MonkeyPatch, api: Api, limit_s: float = 5.0) -> list[tuple[str, str, str]]:
    monkeypatch.setattr(gpu_cluster.kube_api, "admin", lambda: api)  # type: ignore[attr-defined]  # imported there, not exported
    monkeypatch.setattr(gpu_cluster, "_POLL_S", 0.01)
    found = gpu_cluster.verify({"gpu-1": 2}, "image", limit_s)["gpu-1"]
    return [(level["level"], level["state"], level["fact"]) for level in found]


def test_a_node_is_verified_by_a_job_with_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Claims("gpu-0", "gpu-1", allocated=("gpu-0",))
    assert levels(monkeypatch, api) == [
        ("kubelet", "ok", "2 GPUs in ResourceSlices"),
        ("pod", "ok", "a job that requested one GPU got GPU-1"),
    ]
    template, job, _ = api.made
    assert template["kind"] == "ResourceClaimTemplate"
    spec = job["spec"]["template"]["spec"]
    assert spec["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": template["metadata"]["name"]}]
    assert spec["containers"][0]["resources"] == {"claims": [{"name": "gpu"}]}
    assert [call[0] for call in api.calls] == ["POST", "POST", "PATCH", "DELETE", "DELETE"]


def test_claims_of_all_gpus_are_proof_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Claims("gpu-0", "gpu-1", allocated=("gpu-0", "gpu-1"))
    assert levels(monkeypatch, api)[1] == ("pod", "skipped", "claims have all of 2 GPUs")


def test_a_node_without_its_slices_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    [level] = levels(monkeypatch, Claims("gpu-0"), 0.05)
    assert level[2] == "1 GPUs in ResourceSlices; no pod of the DRA driver runs on it, after 0 s"


def test_pods_with_claims_to_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = pod("claimed", "Running")
    claimed["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "c"}]
    plugin = pod("plugin", "Running")
    plugin["spec"] |= {"runtimeClassName": "nvidia", "volumes": [{"hostPath": {"path": "/dev/nvidia0"}}]}
    api = Claims(allocated=("gpu-0",))
    api.pods = [claimed, plugin]
    monkeypatch.setattr(gpu_cluster.kube_api, "admin", lambda: api)  # type: ignore[attr-defined]  # imported there, not exported
    assert gpu_cluster.pods_with_gpus("gpu-1") == ["lab/claimed"]
    api.claims = [
        {"metadata": {"name": "c"}, "spec": {"devices": {"requests": [{"exactly": {"deviceClassName": "nic"}}]}}}
    ]
    assert gpu_cluster.pods_with_gpus("gpu-1") == []


# --- the objects ---


def test_the_driver_and_the_plugin_never_serve_the_same_node() -> None:
    from tests.unit.test_gpu_sharing import rendered as plugins

    driver = rendered()["DaemonSet", "nvidia-dra-driver"]["spec"]["template"]["spec"]
    assert driver["nodeSelector"] == {"gpunodes.dev/gpu": "true", devices.SERVING: "dra"}
    plain = plugins()["DaemonSet", "nvidia-device-plugin-daemonset"]["spec"]["template"]["spec"]
    [term] = plain["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {"key": devices.SERVING, "operator": "DoesNotExist"} in term["matchExpressions"]
    assert driver["tolerations"] == plain["tolerations"]


def test_the_driver_has_few_rights() -> None:
    [role] = [each for (kind, _), each in rendered().items() if kind == "ClusterRole"]
    given = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    changes = {(resource, verb) for resource, verb in given if verb not in {"get", "list", "watch"}}
    assert changes == {("resourceslices", verb) for verb in ("create", "update", "delete")}
    assert not {resource for resource, _ in given} & {"secrets", "pods", "configmaps"}
