"""A pool whose GPUs are served by dynamic resource allocation: from bare machines to a pod with a claim, and back.

Not run on machines yet. The GPUs are the lab's stand-ins; the driver is NVIDIA's program (`lab up --images dra`).
"""

from __future__ import annotations

import json
from typing import Any

from . import pods
from .conftest import LabSpec, Operator
from .waiting import until

LAB = LabSpec("debian13", workers=0, gpu_workers=1, up_options=("--images", "dra"))
UP = ("up", "--driver", "580")
UP_LIMIT_S = 3000.0
"""An emulated machine builds a kernel module while a control plane starts."""
POOL = "h100"
SYSTEM = ("-n", "kube-system")
CLAIM: dict[str, Any] = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaimTemplate",
    "metadata": {"name": "one-gpu"},
    "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}}},
}


def pool(operator: Operator, **variables: Any) -> None:
    """Let the pool of gpu-1 have these variables."""
    operator.group(POOL, "gpu-1", gpunodes_pool=POOL, **variables)


def serving(operator: Operator) -> list[str]:
    """The DaemonSets that have a pod on gpu-1 and serve its GPUs."""
    found = operator.kubectl(*SYSTEM, "get", "pods", "--field-selector=spec.nodeName=gpu-1", "-o", "json")
    owners = {pod["metadata"]["ownerReferences"][0]["name"] for pod in json.loads(found)["items"]}
    return sorted(name for name in owners if name.startswith("nvidia-"))


def offered(operator: Operator) -> int:
    """The GPUs of gpu-1 in ResourceSlices."""
    found = json.loads(operator.kubectl("get", "resourceslices", "-o", "json"))["items"]
    return sum(len(each["spec"].get("devices") or ()) for each in found if each["spec"].get("nodeName") == "gpu-1")


def assert_serves(operator: Operator) -> None:
    """Assert that `gpu verify` finds the GPUs of gpu-1 at all levels."""
    [machine] = operator.document("gpu", "verify", "gpu-1")["machines"]
    assert (machine["gpus"], pods.levels(machine)) == (2, pods.ALL_OK)


def claim(operator: Operator) -> tuple[str, str]:
    """The node and the output of a pod that lists the GPU of its claim."""
    operator.ssh("control-1", f"cat >/run/claim.json <<'END'\n{json.dumps(CLAIM)}\nEND")
    operator.kubectl("apply", "-f", "/run/claim.json")
    container = {"resources": {"claims": [{"name": "gpu"}]}}
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    pods.start(operator, "claims", pods.GPU_IMAGE, "nvidia-smi -L", container, resourceClaims=claims)
    return pods.ended(operator, "claims")


def test_a_new_node_of_the_pool_offers_its_gpus_in_slices(operator: Operator) -> None:
    pool(operator, gpunodes_gpu_serving="dra")
    assert "DeviceClass gpu.nvidia.com" in operator.gpunodes("gpu", "plan", "gpu-1").stdout
    operator.gpunodes(*UP, limit_s=UP_LIMIT_S)
    assert serving(operator) == ["nvidia-dra-driver"]
    assert offered(operator) == 2
    assert_serves(operator)


def test_a_pod_gets_the_gpu_of_its_claim_and_only_that(operator: Operator) -> None:
    node, log = claim(operator)
    assert (node, log.count("UUID: GPU-")) == ("gpu-1", 1)
    assert pods.greedy(operator, "gpu-1", pods.GPU_IMAGE) == pods.NOTHING
    until("no claim is left", lambda: operator.kubectl("get", "resourceclaims", "-A", "-o", "name").strip() == "")


def test_a_second_run_changes_nothing(operator: Operator) -> None:
    assert {each["outcome"] for each in operator.document(*UP)["machines"]} == {"unchanged"}


def test_without_the_setting_the_device_plugin_serves_again(operator: Operator) -> None:
    operator.kubectl("delete", "resourceclaimtemplate", "one-gpu")
    pool(operator)
    operator.gpunodes("join", "gpu-1", "--driver", "580")
    until("the driver's pod has left", lambda: serving(operator) == ["nvidia-device-plugin-daemonset"])
    allocatable = ("get", "node", "gpu-1", "-o", r"jsonpath={.status.allocatable.nvidia\.com/gpu}")
    until("the plugin offers them", lambda: operator.kubectl(*allocatable).strip() == "2")
    assert_serves(operator)
    pods.start(operator, "counts", pods.GPU_IMAGE, "nvidia-smi -L", {"resources": {"limits": {"nvidia.com/gpu": 1}}})
    assert pods.ended(operator, "counts")[1].count("UUID: GPU-") == 1
