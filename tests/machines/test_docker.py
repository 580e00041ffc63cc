"""A GPU worker that runs its containers by Docker, in a cluster whose control plane has containerd, and back.

The lab's machines see one mirror and no other registry, which Docker itself cannot use. The GPUs are stand-ins.
"""

from __future__ import annotations

from .conftest import BARE, STATE, Kind, Operator, lines

LAB = Kind("debian13", workers=0, gpu_workers=1)
JOIN = ("join", "gpu-1", "--runtime", "docker", "--driver", "580")
JOIN_LIMIT_S = 3000.0
"""The machine builds a kernel module, and Docker unpacks its images."""
PLUGIN = "nvcr.io/nvidia/k8s-device-plugin:v0.19.0"
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


def test_people_may_use_docker_on_the_node(operator: Operator) -> None:
    said = operator.ssh("gpu-1", f"docker run --rm --gpus all --entrypoint nvidia-smi {PLUGIN} -L")
    assert said.count("UUID: GPU-") == 2
    assert operator.ssh("gpu-1", f"docker run --rm --entrypoint sh {PLUGIN} -c 'ls /dev/nvidia0'", code=None) == ""


def test_a_second_join_changes_nothing(operator: Operator) -> None:
    before = operator.ssh("gpu-1", STATE)
    for words in (JOIN, ("join", "gpu-1")):
        document = operator.document(*words)
        assert [machine["outcome"] for machine in document["machines"]] == ["unchanged"]
    assert operator.ssh("gpu-1", STATE) == before


def test_removal_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("remove", "gpu-1")
    assert lines(operator.ssh("gpu-1", BARE)) == _bare
    assert operator.ssh("gpu-1", "ls -d /var/lib/docker /run/docker /sys/class/net/docker0", code=None) == ""
