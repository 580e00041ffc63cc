"""GPUs that pods share by time-slicing, and whole ones again. They are the lab's stand-ins: nothing is computed."""

from __future__ import annotations

import functools

import yaml

from . import waiting
from .conftest import LabSpec, Operator
from .pods import GPU_IMAGE, start
from .unhealthy import DRIVER

LAB = LabSpec("debian13", workers=0, gpu_workers=1)
UP_LIMIT_S = 3000.0
"""An emulated machine builds a kernel module while a control plane starts."""
until = functools.partial(waiting.until, limit_s=180.0)


def offered(operator: Operator) -> str:
    return operator.kubectl("get", "node", "gpu-1", "-o", r"jsonpath={.status.allocatable.nvidia\.com/gpu}").strip()


def test_pods_share_gpus_in_turns(operator: Operator) -> None:
    """Four pods on two GPUs of a node whose GPUs were whole before."""
    operator.gpunodes("up", *DRIVER, limit_s=UP_LIMIT_S)
    assert offered(operator) == "2"
    path = operator.folder / "inventory" / "host_vars" / "gpu-1.yml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({"gpunodes_gpu_sharing": {"mode": "time-slicing", "replicas": 2}}))
    plan = operator.gpunodes("gpu", "plan", "gpu-1", *DRIVER).stdout
    assert "2 GPUs x 2 = 4 shares by time-slicing" in " ".join(plan.split())
    operator.gpunodes("join", "gpu-1", *DRIVER)
    [machine] = operator.document("gpu", "verify", "gpu-1")["machines"]
    assert {level["level"]: level["state"] for level in machine["levels"]} == dict.fromkeys(
        ("host", "container", "kubelet", "pod"), "ok"
    )
    assert offered(operator) == "4"
    names = [f"share-{number}" for number in range(4)]
    for name in names:
        start(operator, name, GPU_IMAGE, "nvidia-smi -L; sleep 3600", {"resources": {"limits": {"nvidia.com/gpu": 1}}})
    operator.kubectl("wait", "--for=condition=Ready", *(f"pod/{name}" for name in names), "--timeout=220s")
    until(
        "each lists its GPU",  # ready before its program has printed
        lambda: [operator.kubectl("logs", name).count("UUID: GPU-") for name in names] == [1] * 4,
    )
    operator.kubectl("delete", "pod", *names, "--wait=true")


def test_whole_gpus_again(operator: Operator) -> None:
    (operator.folder / "inventory" / "host_vars" / "gpu-1.yml").write_text("{}\n")
    operator.gpunodes("join", "gpu-1", *DRIVER)
    assert operator.document("gpu", "verify", "gpu-1")["exit_code"] == 0
    until("the kubelet offers both", lambda: offered(operator) == "2")
