"""A GPU worker with Docker as its runtime, in a cluster whose control plane has containerd, and its removal.

The lab's machines reach one mirror only, which Docker itself cannot use. The GPUs are stand-ins.
"""

from __future__ import annotations

from .conftest import BARE, STATE, LabSpec, Operator, lines
from .pods import NOTHING, greedy

LAB = LabSpec("debian13", workers=0, gpu_workers=1)
JOIN = ("join", "gpu-1", "--runtime", "docker", "--driver", "580")
JOIN_LIMIT_S = 3000.0
"""The machine builds a kernel module, and Docker unpacks the images."""
PLUGIN = "nvcr.io/nvidia/k8s-device-plugin:v0.19.0"
SCAN = '-c "test -e /dev/nvidia0 && echo present || echo none"'
RUNTIME = "jsonpath={.status.nodeInfo.containerRuntimeVersion}"

_bare: list[str] = []


def test_a_join_with_docker_serves_gpus(operator: Operator) -> None:
    _bare.extend(lines(operator.ssh("gpu-1", BARE)))
    operator.gpunodes("init-master", "control-1")
    operator.gpunodes(*JOIN, limit_s=JOIN_LIMIT_S)
    assert operator.kubectl("get", "node", "gpu-1", "-o", RUNTIME).startswith("docker://")
    assert operator.kubectl("get", "node", "control-1", "-o", RUNTIME).startswith("containerd://")
    [machine] = operator.document("gpu", "verify", "gpu-1")["machines"]
    found = {level["level"]: (level["state"], level["fact"]) for level in machine["levels"]}
    assert {state for state, _ in found.values()} == {"ok"}
    assert set(found) == {"host", "container", "kubelet", "pod"}
    assert "container of docker" in found["container"][1]


def test_users_can_run_docker_containers_with_gpus_on_the_node(operator: Operator) -> None:
    device = "--device nvidia.com/gpu=all"
    for option in (device, "--gpus all"):
        gpus = operator.ssh("gpu-1", f"docker run --rm {option} --entrypoint nvidia-smi {PLUGIN} -L")
        assert gpus.count("UUID: GPU-") == 2, option
    for option, found in ((device, "present"), ("--gpus all", "present"), ("", "none")):
        assert operator.ssh("gpu-1", f"docker run --rm {option} --entrypoint sh {PLUGIN} {SCAN}").split() == [found], (
            option
        )


def test_gpus_go_only_to_pods_that_request_them(operator: Operator) -> None:
    """No GPU by a variable of an image or a pod, by NVIDIA's runtime, or by an annotation."""
    assert greedy(operator, "gpu-1", PLUGIN) == NOTHING


def test_an_image_gets_no_gpus_by_a_variable(operator: Operator) -> None:
    """NVIDIA's own images request all GPUs by a variable; without an option of `docker run` they get none."""
    scan = """-c 'echo "$NVIDIA_VISIBLE_DEVICES"; test -e /dev/nvidia0 && echo present || echo none'"""
    found = operator.ssh("gpu-1", f"docker run --rm --entrypoint sh {PLUGIN} {scan}")
    assert found.split() == ["all", "none"]


def test_a_second_join_changes_nothing(operator: Operator) -> None:
    before = operator.ssh("gpu-1", STATE)
    for command in (JOIN, ("join", "gpu-1")):
        document = operator.document(*command)
        assert [machine["outcome"] for machine in document["machines"]] == ["unchanged"]
    assert operator.ssh("gpu-1", STATE) == before


def test_removal_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("remove", "--yes", "gpu-1")
    assert lines(operator.ssh("gpu-1", BARE)) == _bare
    assert operator.ssh("gpu-1", "ls -d /var/lib/docker /run/docker /sys/class/net/docker0", code=None) == ""
