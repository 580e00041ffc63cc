"""The lifecycle of a small cluster on Debian 13 with the default Kubernetes, from bare machines to bare machines.

A selection of what the other files of this folder test in detail: the most common operations, and the most critical
failures. The GPUs are the lab's stand-ins: no GPU computes anything.
"""

from __future__ import annotations

import stat
from pathlib import Path

import yaml

from . import unhealthy
from .conftest import BARE, STATE, LabSpec, Operator, kill, lines, search_for_secrets

LAB = LabSpec("debian13", workers=1, gpu_workers=1)
MACHINES = ("control-1", "worker-1", "gpu-1")

MINE = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "mine", "cluster": {"server": "https://192.0.2.9:6443"}}],
    "users": [{"name": "mine", "user": {"username": "me"}}],
    "contexts": [{"name": "mine", "context": {"cluster": "mine", "user": "mine"}}],
    "current-context": "mine",
}
"""The user's kubeconfig, with another cluster."""

_bare: dict[str, list[str]] = {}


def test_up_makes_a_cluster_of_bare_machines_after_a_kill(operator: Operator) -> None:
    _bare.update(operator.each(MACHINES, BARE))
    # The pool has one GPU machine only.
    unhealthy.write(operator, "control-1", unhealthy.SINGLE_MACHINE_SETTINGS)
    running = operator.start("up", "--driver", "580")
    operator.wait_for(running, "control-1: Start the control plane")
    refused = operator.gpunodes("up", code=1)
    assert "another command works on this cluster: up of " in refused.stderr
    kill(running)
    operator.gpunodes("up", "--driver", "580", limit_s=3000)
    status = operator.document("status")
    assert {node["name"]: node["ready"] for node in status["nodes"]} == dict.fromkeys(MACHINES, True)
    assert operator.tokens() == []


def test_up_again_changes_nothing(operator: Operator) -> None:
    before = operator.each(MACHINES, STATE)
    document = operator.document("up", "--driver", "580")
    assert {each["name"]: each["outcome"] for each in document["machines"]} == dict.fromkeys(MACHINES, "unchanged")
    assert operator.each(MACHINES, STATE) == before


def test_pods_get_the_gpus(operator: Operator) -> None:
    document = operator.document("gpu", "verify", "gpu-1")
    levels = {level["level"]: level["state"] for level in document["machines"][0]["levels"]}
    assert levels == dict.fromkeys(("host", "container", "kubelet", "pod"), "ok")
    assert "nvidia.com/gpu" not in unhealthy.node(operator, "worker-1")["status"]["allocatable"]


def test_a_hung_machine_is_found_and_repaired(operator: Operator) -> None:
    before = unhealthy.boot(operator, "gpu-1")
    unhealthy.fault(operator, "gpu-1", "reboot-hang")
    unhealthy.hang(operator)
    assert unhealthy.wait_for(operator, "gpu-1", ["reboot"])["hung_in_driver"]
    found = unhealthy.repaired(operator.document("health", "--reboot-hung", "--yes"))
    assert found["step"] == "sysrq"
    assert unhealthy.boot(operator, "gpu-1") != before
    unhealthy.assert_clean(operator, ["gpu-1"])


def test_a_node_leaves_and_joins_by_plain_ansible(operator: Operator) -> None:
    operator.gpunodes("remove", "--yes", "worker-1")
    assert operator.document("status")["missing"] == ["worker-1"]
    planned = operator.playbook("join", "--limit", "worker-1", "--check", "--diff")
    assert "TASK [gpunodes.bootstrap.containerd : " in planned
    assert lines(operator.ssh("worker-1", BARE)) == _bare["worker-1"]
    operator.playbook("join", "--limit", "worker-1")
    assert operator.document("status")["missing"] == []
    assert operator.tokens() == []


def test_no_secret_leaks(operator: Operator) -> None:
    # gpu-1 joined before it was reset.
    search_for_secrets(operator, MACHINES, boots={"gpu-1": 2})


def test_reset_leaves_nothing(operator: Operator) -> None:
    """Neither on the machines, nor of the cluster's context in the user's kubeconfig, whose other entries stay."""
    path = Path(operator.environment["KUBECONFIG"])
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_text(yaml.safe_dump(MINE))
    operator.gpunodes("kubeconfig", "--merge")
    merged = yaml.safe_load(path.read_text())
    [context] = {each["name"] for each in merged["contexts"]} - {"mine"}
    assert merged["current-context"] == context
    done = operator.gpunodes("reset", "gpu-1", "worker-1", "control-1", "--yes")
    assert f"{path}: the context {context} of this cluster is removed" in done.stderr
    assert yaml.safe_load(path.read_text()) == {**MINE, "current-context": ""}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert operator.each(MACHINES, BARE) == _bare
