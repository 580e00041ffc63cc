"""GPU software from a bare machine to a node with GPUs, and back. The GPUs are the lab's stand-ins.

This tests packages, modules, taints, CUDA; test_gpu_pods.py tests what pods get. No GPU computes anything.
"""

from __future__ import annotations

import re
import time
from typing import Any

from . import unhealthy
from .conftest import BARE, STATE, LabSpec, Operator, lines
from .pods import ALL_OK, GPU_IMAGE, example, levels, start

LAB = LabSpec("debian13", workers=0, gpu_workers=1)
MACHINES = ("control-1", "gpu-1")
UP_LIMIT_S = 3000.0
"""An emulated machine builds a kernel module while a control plane starts."""
DEDICATED = {"key": "dedicated", "value": "ml", "effect": "NoSchedule"}
SETTINGS = {"gpunodes_gpu_taint": True, "gpunodes_node_taints": [DEDICATED]}

_bare: list[str] = []


def tolerations() -> dict[str, Any]:
    """The tolerations of a pod for gpu-1, whose pool has an additional taint."""
    return {"tolerations": [*example("GPU nodes for GPU pods")["tolerations"], {**DEDICATED, "operator": "Equal"}]}


def test_the_machine_is_bare(operator: Operator) -> None:
    _bare.extend(lines(operator.ssh("gpu-1", BARE)))
    assert operator.ssh("gpu-1", "ls /dev/nvidia* 2>/dev/null", code=None) == ""


def test_verify_reports_the_missing_driver(operator: Operator) -> None:
    document = operator.document("gpu", "verify", "gpu-1", code=3)
    assert document["machines"][0]["levels"][0]["level"] == "host"
    assert "nvidia is not loaded" in document["machines"][0]["levels"][0]["fact"]


def test_up_makes_a_cluster_that_serves_gpus(operator: Operator) -> None:
    unhealthy.write(operator, "gpu-1", SETTINGS)
    operator.gpunodes("up", "--driver", "580", limit_s=UP_LIMIT_S)
    [machine] = operator.document("gpu", "verify", "gpu-1")["machines"]
    assert levels(machine) == ALL_OK


def test_a_pool_is_a_label_and_taints(operator: Operator) -> None:
    label = "jsonpath={.metadata.labels.gpunodes\\.dev/pool}"
    assert operator.kubectl("get", "node", "gpu-1", "-o", label).strip() == "gpu"
    taints = operator.kubectl("get", "node", "gpu-1", "-o", "jsonpath={.spec.taints[*].key}")
    assert taints.split() == ["dedicated", "nvidia.com/gpu"]
    operator.kubectl("label", "node", "gpu-1", "team=a")


def test_up_again_changes_nothing(operator: Operator) -> None:
    before = operator.each(MACHINES, STATE)
    document = operator.document("up", "--driver", "580")
    assert {machine["outcome"] for machine in document["machines"]} == {"unchanged"}
    assert operator.each(MACHINES, STATE) == before
    assert operator.kubectl("get", "node", "-l", "team=a", "-o", "name").strip() == "node/gpu-1"


def test_a_pod_waits_when_all_gpus_are_taken(operator: Operator) -> None:
    for name, count in (("first", 2), ("second", 1)):
        resources = {"resources": {"limits": {"nvidia.com/gpu": count}}}
        start(operator, name, GPU_IMAGE, "nvidia-smi -L; sleep 3600", resources, **tolerations())
    operator.kubectl("wait", "--for=condition=Ready", "pod/first", "--timeout=180s")
    assert operator.kubectl("logs", "first").count("UUID: GPU-") == 2
    waiting = operator.kubectl("get", "pod", "second", "-o", "jsonpath={.status.conditions[0].message}")
    assert "Insufficient nvidia.com/gpu" in waiting
    operator.kubectl("delete", "pod", "first", "--wait=true")
    operator.kubectl("wait", "--for=condition=Ready", "pod/second", "--timeout=180s")
    assert operator.kubectl("logs", "second").count("UUID: GPU-") == 1


def test_a_daemon_reload_takes_no_gpu_away(operator: Operator) -> None:
    operator.ssh("gpu-1", "systemctl daemon-reload")
    time.sleep(5)
    assert operator.kubectl("exec", "second", "--", "nvidia-smi", "-L").count("UUID: GPU-") == 1


def test_an_upgrade_keeps_the_driver(operator: Operator) -> None:
    """Both the hold of its packages and the pin of its branch keep it. The repository has a newer branch."""
    unpinned = ("-oDir::Etc::Preferences=/dev/null", "-oDir::Etc::PreferencesParts=/dev/null")
    driver = {"nvidia-open", "nvidia-kernel-open-dkms"}

    def upgraded(*options: str) -> set[str]:
        """The packages that `apt-get upgrade` would upgrade."""
        plan = operator.ssh("gpu-1", f"apt-get --simulate {' '.join(options)} upgrade")
        return set(re.findall(r"^Inst (\S+) \[", plan, re.MULTILINE))

    operator.ssh("gpu-1", "apt-get -qq update")
    assert driver <= upgraded(*unpinned, "--ignore-hold"), "the repository has no newer version: this test cannot fail"
    assert not driver & upgraded("--ignore-hold")
    assert not driver & upgraded(*unpinned)
    versions = f"dpkg-query -W -f '${{Package}} ${{Version}}\n' {' '.join(sorted(driver))}"
    before = operator.ssh("gpu-1", versions)
    assert len(lines(before)) == len(driver)
    options = " ".join(unpinned)
    operator.ssh("gpu-1", f"DEBIAN_FRONTEND=noninteractive apt-get -qqy {options} upgrade >/dev/null")
    assert operator.ssh("gpu-1", versions) == before


def test_the_driver_is_not_removed_while_a_pod_uses_it(operator: Operator) -> None:
    done = operator.gpunodes("gpu", "remove", "--yes", "gpu-1", code=1)
    assert "default/second uses GPUs of gpu-1" in done.stdout + done.stderr
    assert operator.document("gpu", "verify", "gpu-1")["exit_code"] == 0
    operator.kubectl("delete", "pod", "second", "--wait=true")


def test_removal_leaves_a_node_without_gpus(operator: Operator) -> None:
    operator.gpunodes("gpu", "remove", "--yes", "gpu-1")
    assert operator.ssh("gpu-1", "lsmod | grep -c '^nvidia'", code=None).strip() == "0"
    assert (
        operator.ssh("gpu-1", "dpkg-query -W -f '${db:Status-Status} ${Package}\n' '*nvidia*' | grep ^installed", None)
        == ""
    )
    labels = operator.kubectl("get", "node", "gpu-1", "-o", "jsonpath={.metadata.labels}")
    assert "gpunodes.dev/gpu" not in labels
    taints = operator.kubectl("get", "node", "gpu-1", "-o", "jsonpath={.spec.taints[*].key}")
    assert taints.split() == ["dedicated"]
    status = operator.document("status")
    assert {node["name"]: node["ready"] for node in status["nodes"]}["gpu-1"]


def test_requested_cuda_versions_are_installed(operator: Operator) -> None:
    # Together they need more space than the machine has.
    operator.gpunodes("gpu", "install", "gpu-1", "--driver", "580", "--with-cuda", "13.0")
    operator.gpunodes("gpu", "install", "gpu-1", "--driver", "580", "--with-cuda", "13.0", "--with-cuda", "13.1")
    for version in ("13.0", "13.1"):
        assert f"release {version}" in operator.ssh("gpu-1", f"/usr/local/cuda-{version}/bin/nvcc --version")


def test_reset_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("remove", "--yes", "gpu-1")
    assert lines(operator.ssh("gpu-1", BARE)) == _bare
