"""GPU nodes from bare machines to pods that share what there is, and back. The GPUs are the lab's stand-ins.

What is proven here is the way of the software: packages, modules, runtimes, kubelet, pods. No GPU computes anything.
"""

from __future__ import annotations

import time
from typing import Any

from .conftest import BARE, STATE, Kind, Operator, lines

LAB = Kind("debian13", workers=1, gpu_workers=2)
GPU = ("gpu-1", "gpu-2")
POD = """
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 0
  nodeSelector: {gpunodes.dev/gpu-count: "2"}
  containers:
    - name: smi
      image: IMAGE
      command: [sh, -c, "nvidia-smi -L; sleep 3600"]
      resources: {limits: {nvidia.com/gpu: COUNT}}
"""

_bare: dict[str, list[str]] = {}


def image(operator: Operator) -> str:
    """The device plugin's image, which the nodes have."""
    return operator.kubectl(
        "-n", "kube-system", "get", "daemonset", "nvidia-device-plugin-daemonset",
        "-o", "jsonpath={.spec.template.spec.containers[0].image}",
    ).strip()  # fmt: skip


def start(operator: Operator, name: str, count: int) -> None:
    text = POD.replace("NAME", name).replace("COUNT", str(count)).replace("IMAGE", image(operator))
    operator.ssh("control-1", f"cat >/run/pod.yml <<'END'\n{text}\nEND")
    operator.kubectl("apply", "-f", "/run/pod.yml")


def levels(machine: dict[str, Any]) -> dict[str, str]:
    return {level["level"]: level["state"] for level in machine["levels"]}


def test_the_machines_are_bare(operator: Operator) -> None:
    for machine in GPU:
        _bare[machine] = list(lines(operator.ssh(machine, BARE)))
        assert operator.ssh(machine, "ls /dev/nvidia* 2>/dev/null", code=None) == ""


def test_verify_says_that_the_driver_is_missing(operator: Operator) -> None:
    document = operator.document("gpu", "verify", "gpu-1", code=3)
    assert document["machines"][0]["levels"][0]["level"] == "host"
    assert "nvidia is not loaded" in document["machines"][0]["levels"][0]["fact"]


def test_up_makes_a_cluster_that_serves_gpus(operator: Operator) -> None:
    operator.gpunodes("up", "--driver", "580")
    document = operator.document("gpu", "verify")
    found = {machine["machine"]: machine for machine in document["machines"]}
    for name in GPU:
        assert levels(found[name]) == dict.fromkeys(("host", "container", "kubelet", "pod"), "ok")
    assert found["worker-1"]["gpus"] == 0


def test_up_again_changes_nothing(operator: Operator) -> None:
    before = {machine: operator.ssh(machine, STATE) for machine in GPU}
    document = operator.document("up", "--driver", "580")
    assert {machine["outcome"] for machine in document["machines"]} == {"unchanged"}
    assert {machine: operator.ssh(machine, STATE) for machine in GPU} == before


def test_a_cpu_node_has_nothing_of_it(operator: Operator) -> None:
    assert (
        operator.ssh("worker-1", "dpkg-query -W '*nvidia*' 2>/dev/null; ls /var/lib/gpunodes/gpu.json", code=None) == ""
    )


def test_a_pod_waits_when_all_gpus_are_taken(operator: Operator) -> None:
    for name, count in (("first", 2), ("second", 2), ("third", 1)):
        start(operator, name, count)
    operator.kubectl("wait", "--for=condition=Ready", "pod/first", "pod/second", "--timeout=180s")
    assert operator.kubectl("logs", "first").count("UUID: GPU-") == 2
    waiting = operator.kubectl("get", "pod", "third", "-o", "jsonpath={.status.conditions[0].message}")
    assert "Insufficient nvidia.com/gpu" in waiting
    operator.kubectl("delete", "pod", "first", "--wait=true")
    operator.kubectl("wait", "--for=condition=Ready", "pod/third", "--timeout=180s")
    assert operator.kubectl("logs", "third").count("UUID: GPU-") == 1


def test_a_daemon_reload_takes_no_gpu_away(operator: Operator) -> None:
    for machine in GPU:
        operator.ssh(machine, "systemctl daemon-reload")
    time.sleep(5)
    assert operator.kubectl("exec", "third", "--", "nvidia-smi", "-L").count("UUID: GPU-") == 1


def test_an_upgrade_keeps_the_driver(operator: Operator) -> None:
    version = "dpkg-query -W -f '${Version}' nvidia-open-580 nvidia-kernel-open-dkms"
    before = operator.ssh("gpu-1", version)
    operator.ssh("gpu-1", "apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qqy upgrade >/dev/null")
    assert operator.ssh("gpu-1", version) == before


def test_the_driver_is_not_taken_away_under_a_pod(operator: Operator) -> None:
    node = operator.kubectl("get", "pod", "third", "-o", "jsonpath={.spec.nodeName}").strip()
    done = operator.gpunodes("gpu", "remove", node, code=1)
    assert "use" in done.stdout + done.stderr
    operator.kubectl("delete", "pod", "second", "third", "--wait=true")


def test_removal_leaves_a_node_without_gpus(operator: Operator) -> None:
    operator.gpunodes("gpu", "remove", "gpu-2")
    assert operator.ssh("gpu-2", "lsmod | grep -c '^nvidia'", code=None).strip() == "0"
    assert (
        operator.ssh("gpu-2", "dpkg-query -W -f '${db:Status-Status} ${Package}\n' '*nvidia*' | grep ^installed", None)
        == ""
    )
    labels = operator.kubectl("get", "node", "gpu-2", "-o", "jsonpath={.metadata.labels}")
    assert "gpunodes.dev/gpu" not in labels
    status = operator.document("status")
    assert {node["name"]: node["ready"] for node in status["nodes"]}["gpu-2"]


def test_cuda_comes_where_it_is_wished(operator: Operator) -> None:
    operator.gpunodes("gpu", "install", "gpu-2", "--driver", "580", "--with-cuda", "13.0", "--with-cuda", "13.1")
    for version in ("13.0", "13.1"):
        assert f"release {version}" in operator.ssh("gpu-2", f"/usr/local/cuda-{version}/bin/nvcc --version")


def test_reset_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("remove", "gpu-1", "gpu-2")
    for machine in GPU:
        assert lines(operator.ssh(machine, BARE)) == _bare[machine]
