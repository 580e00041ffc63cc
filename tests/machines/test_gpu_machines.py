"""A new GPU node with NVSwitches and cuDNN that takes work only after a burn-in; one installation of the driver.

The GPUs, NVSwitches and Fabric Manager are the lab's stand-ins. So is DCGM: a script that reports what a file contains.
tests/machines/test_gpu_alone.py has nouveau, and the reboot that a driver needs.
"""

from __future__ import annotations

import json
import time
from typing import Any

import yaml

from .conftest import LabSpec, Operator
from .pods import start

LAB = LabSpec("debian13", workers=0, gpu_workers=1, up_options=("--nvswitches", "2"))
UP = ("up", "--driver", "580", "--with-cudnn", "9")
UP_LIMIT_S = 3000.0
GPU_IMAGE = "nvcr.io/nvidia/k8s-device-plugin:v0.19.0"
TAINTS = ("get", "node", "gpu-1", "-o", "jsonpath={.spec.taints[*].key}")
BURN_IN = "gpunodes.dev/burn-in"
# The addresses of the stand-in's GPUs (lab/standin/src/board).
DCGMI = r"""#!/bin/sh
case "$1" in
discovery)
    echo '| 0      | Name: stand-in                                      |'
    echo '|        | PCI Bus ID: 00000001:10:00.0                        |'
    echo '| 1      | Name: stand-in                                      |'
    echo '|        | PCI Bus ID: 00000001:11:00.0                        |'
    ;;
diag)
    if [ -e /run/dcgm-sleeps ]; then touch /run/dcgm-began; sleep 600; fi
    cat /run/dcgm.json
    ;;
esac
"""


def dcgm(operator: Operator, state: str) -> None:
    """Let the stand-in of DCGM report that GPU 1 is in this state."""
    results = [
        {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 0, "status": "Pass"},
        {
            "entity_group": "GPU",
            "entity_group_id": 1,
            "entity_id": 1,
            "status": state,
            "warnings": [{"warning": "a DBE was found", "error_id": 1}],
        },
    ]
    tests = [{"name": "memory", "results": results, "test_summary": {"status": state}}]
    report = {"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": tests}]}}
    document = json.dumps({**report, "metadata": {"version": "4.2.3"}})
    operator.ssh("gpu-1", f"cat >/run/dcgm.json <<'END'\n{document}\nEND")


def burn_ins(operator: Operator) -> list[tuple[str, str]]:
    """The burn-ins in the history of gpu-1: outcome and detail."""
    entries = operator.document("history", "gpu-1")["entries"]
    return [(each["outcome"], each["detail"]) for each in entries if each["kind"] == "burn-in"]


def test_a_node_whose_burn_in_fails_keeps_its_taint(operator: Operator) -> None:
    operator.ssh("gpu-1", f"cat >/usr/local/bin/dcgmi <<'END'\n{DCGMI}END\nchmod 755 /usr/local/bin/dcgmi")
    dcgm(operator, "Fail")
    path = operator.folder / "inventory" / "host_vars" / "gpu-1.yml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({"gpunodes_burn_in": True}))
    done = operator.gpunodes(*UP, code=3, limit_s=UP_LIMIT_S)
    cause = "DCGM 4.2.3 diagnostics, level 3: memory on GPU 1 (0001:11:00.0): a DBE was found"
    assert cause in done.stdout + done.stderr
    assert operator.kubectl(*TAINTS).split() == [BURN_IN]
    # It registered with it; a later registration, as that of a pool that scales, has other taints.
    assert "register-with-taints" not in operator.ssh("gpu-1", "cat /var/lib/kubelet/kubeadm-flags.env")
    assert burn_ins(operator) == [("failed", cause)]


def test_nvswitches_bring_fabric_manager(operator: Operator) -> None:
    assert operator.ssh("gpu-1", "systemctl is-active nvidia-fabricmanager").strip() == "active"
    versions = operator.ssh("gpu-1", "dpkg-query -W -f '${Version} ' nvidia-fabricmanager nvidia-driver").split()
    assert len(versions) == 2
    assert len(set(versions)) == 1


def test_cudnn_can_be_loaded(operator: Operator) -> None:
    operator.ssh("gpu-1", "python3 -c 'import ctypes; ctypes.CDLL(\"libcudnn.so.9\")'")


def test_up_again_burns_the_node_in_again(operator: Operator) -> None:
    dcgm(operator, "Pass")
    operator.gpunodes(*UP)
    assert operator.kubectl(*TAINTS).split() == []
    assert [outcome for outcome, _ in burn_ins(operator)] == ["failed", "passed"]
    # A node that has passed is not burnt in by a later run, so that its pods are left alone.
    assert [machine["outcome"] for machine in operator.document(*UP)["machines"]] == ["unchanged", "unchanged"]
    assert len(burn_ins(operator)) == 2


def test_a_node_in_use_is_refused_and_keeps_its_pods(operator: Operator) -> None:
    resources: dict[str, Any] = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    start(operator, "train", GPU_IMAGE, "sleep 3600", resources)
    operator.kubectl("wait", "--for=condition=Ready", "pod/train", "--timeout=180s")
    done = operator.gpunodes("gpu", "burn-in", "gpu-1", code=1)
    assert "default/train uses GPUs of gpu-1" in done.stdout + done.stderr
    assert operator.kubectl(*TAINTS).split() == []
    assert operator.kubectl("get", "pod", "train", "-o", "jsonpath={.status.phase}") == "Running"


def test_drain_evicts_the_pods_first(operator: Operator) -> None:
    operator.gpunodes("gpu", "burn-in", "gpu-1", "--drain", "--level", "1")
    assert operator.kubectl("get", "pods", "-o", "name") == ""
    assert operator.kubectl(*TAINTS).split() == []
    assert burn_ins(operator)[-1][0] == "passed"


def test_an_interrupted_burn_in_can_be_repeated(operator: Operator) -> None:
    operator.ssh("gpu-1", "rm -f /run/dcgm-began; touch /run/dcgm-sleeps")
    process = operator.start("gpu", "burn-in", "gpu-1")
    deadline = time.monotonic() + 300
    while "dcgm-began" not in operator.ssh("gpu-1", "ls /run"):
        assert time.monotonic() < deadline
        time.sleep(2)
    process.terminate()
    assert process.wait(120) != 0
    assert operator.kubectl(*TAINTS).split() == [BURN_IN]
    operator.ssh("gpu-1", "rm /run/dcgm-sleeps")
    # The test ends with the command that started it.
    deadline = time.monotonic() + 120
    while operator.ssh("gpu-1", "pgrep -f '[d]cgmi diag' || true").strip():
        assert time.monotonic() < deadline
        time.sleep(2)
    operator.gpunodes("gpu", "burn-in", "gpu-1")
    assert operator.kubectl(*TAINTS).split() == []


def test_a_fabric_manager_that_stopped_is_reported(operator: Operator) -> None:
    operator.ssh("gpu-1", "systemctl stop nvidia-fabricmanager")
    [machine] = operator.document("health", "gpu-1", code=3)["machines"]
    assert "fabric-manager" in {finding["rule"] for finding in machine["findings"]}
    operator.ssh("gpu-1", "systemctl start nvidia-fabricmanager; rm /usr/local/bin/dcgmi")
