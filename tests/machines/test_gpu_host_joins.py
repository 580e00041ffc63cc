"""A GPU host, where people use Docker, becomes a node of a cluster with containerd: its Docker, a running container and
its users stay. The GPUs are stand-ins.
"""

from __future__ import annotations

import shlex

import yaml

from . import pods
from .conftest import LabSpec, Operator

LAB = LabSpec("debian13", workers=0, gpu_workers=1, up_options=("--cpus", "2"))
IMAGE = "nvcr.io/nvidia/k8s-device-plugin:v0.19.0"
SETTINGS = "inventory/host_vars/gpu-1.yml"
MEMBERS = "getent group docker | cut -d: -f4"
STARTED = "docker inspect --format '{{.State.Running}} {{.State.StartedAt}}' people"
GPUS = f"docker run --rm --gpus all --entrypoint nvidia-smi {IMAGE} -L"


def put(operator: Operator, group: str) -> None:
    """Put gpu-1 into one group of machines, with its connection."""
    path = operator.folder / "inventory/hosts.yml"
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    groups = found["all"]["children"]
    machine = next(
        each["hosts"].pop("gpu-1") for name, each in groups.items() if name != "gpu" and "gpu-1" in each["hosts"]
    )
    groups.setdefault(group, {"hosts": {}})["hosts"]["gpu-1"] = machine
    found["all"]["children"] = {name: each for name, each in groups.items() if each["hosts"]}
    path.write_text(yaml.safe_dump(found, sort_keys=False), encoding="utf-8")


def test_people_use_docker_on_a_gpu_host(operator: Operator) -> None:
    operator.ssh("gpu-1", "useradd --create-home alice")
    path = operator.folder / SETTINGS
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({"gpunodes_docker_users": ["alice"]}), encoding="utf-8")
    put(operator, "gpu_hosts")
    operator.gpunodes("gpu", "install", "gpu-1", "--runtime", "docker", "--driver", "580", limit_s=3000)
    operator.ssh("gpu-1", f"docker run --detach --name people --entrypoint sleep {IMAGE} 10d")


def test_it_becomes_a_node_and_docker_stays(operator: Operator) -> None:
    before = operator.ssh("gpu-1", STARTED)
    assert before.startswith("true ")
    operator.gpunodes("init-master", "control-1")
    put(operator, "workers")
    operator.gpunodes("join", "gpu-1", "--driver", "580", limit_s=3000)
    runtime = "jsonpath={.status.nodeInfo.containerRuntimeVersion}"
    assert operator.kubectl("get", "node", "gpu-1", "-o", runtime).startswith("containerd://")
    assert operator.ssh("gpu-1", STARTED) == before, "its container was not restarted"
    assert operator.ssh("gpu-1", MEMBERS).split() == ["alice"]
    assert operator.ssh("gpu-1", f"su - alice -c {shlex.quote(GPUS)}").count("UUID: GPU-") == 2


def test_pods_get_gpus_beside_it(operator: Operator) -> None:
    operator.gpunodes("gpu", "verify", "gpu-1")
    assert pods.greedy(operator, "gpu-1", IMAGE) == pods.NOTHING
    assert {each["outcome"] for each in operator.document("join", "gpu-1", "--driver", "580")["machines"]} == {
        "unchanged"
    }
