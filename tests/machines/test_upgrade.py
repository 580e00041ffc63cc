"""Kubernetes 1.35 becomes 1.36 on one control plane and one worker, whose pods answer meanwhile; kills and refusals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time

from . import web
from .conftest import BARE, LONG, LabSpec, Operator, lines

# Pods move to the control plane while the worker is drained.
LAB = LabSpec(
    "debian13",
    workers=1,
    kubernetes="1.35",
    up_options=("--kubernetes-version", "1.36"),
    cluster=("--kubernetes-version", "1.35"),
    settings={
        "gpunodes_control_plane_schedulable": True,
        # A kubelet of another minor starts its static pods again, all at once: the controllers may be in a back-off.
        "gpunodes_ready_timeout": 1800,
    },
)


def playbook(operator: Operator, *words: str) -> list[str]:
    """The command line of the playbook for the target of this test."""
    # After its static pods were restarted a node is not ready for some seconds, and the plan then says so.
    operator.kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=180s")
    target = operator.document("upgrade", "plan", "1.36")["target"]
    return ["playbook", "upgrade", "-e", f"upgrade_target={target}", *words]


def wait_until(operator: Operator, machine: str, command: str, why: str) -> None:
    """Wait until a shell command succeeds on a machine, as root."""
    deadline = time.monotonic() + LONG
    while operator.lab("ssh", machine, f"sudo sh -c {shlex.quote(command)}").returncode:
        assert time.monotonic() < deadline, why
        time.sleep(1)


def versions(operator: Operator) -> dict[str, str]:
    # A kubelet that has just started is not ready for some seconds: `status` then ends with 3.
    nodes = operator.document("status", code=None)["nodes"]
    return {node["name"]: node["version"].rpartition(".")[0] for node in nodes}


def test_the_plan_names_the_order_and_changes_nothing(operator: Operator) -> None:
    before = {machine: operator.ssh(machine, "cat /var/lib/gpunodes/ledger.json") for machine in LAB.machines}
    plan = operator.document("upgrade", "plan", "1.36")
    assert plan["possible"], plan["findings"]
    assert [(step["machine"], step["part"]) for step in plan["steps"]] == [
        ("control-1", "control_plane"),
        ("control-1", "node"),
        ("worker-1", "node"),
    ]
    assert {each["name"] for each in plan["components"]} >= {"etcd", "CoreDNS", "kube-proxy"}
    assert {machine: operator.ssh(machine, "cat /var/lib/gpunodes/ledger.json") for machine in LAB.machines} == before


def test_a_skipped_minor_and_a_downgrade_are_refused(operator: Operator) -> None:
    assert "upgrade to 1.36 first" in operator.gpunodes("upgrade", "plan", "1.37", code=2).stderr
    assert "cannot be downgraded" in operator.gpunodes("upgrade", "plan", "1.34", code=2).stderr


def test_a_removed_gate_is_refused(operator: Operator) -> None:
    folder = operator.folder / "inventory" / "host_vars"
    (folder / "worker-1.yml").write_text("gpunodes_feature_gates: {CSIMigrationPortworx: true}\n")
    try:
        plan = operator.document("upgrade", "plan", "1.36", code=1)
    finally:
        (folder / "worker-1.yml").unlink()
    # A warning says, too, that the kubelet lacks the gate.
    [error] = [each for each in plan["findings"] if each["severity"] == "error"]
    assert (error["machine"], error["check"]) == ("worker-1", "gates")
    assert "removed in Kubernetes 1.36" in error["fact"]


def test_a_killed_upgrade_of_the_control_plane_is_continued(operator: Operator) -> None:
    web.serve(operator)
    operator.gpunodes(*playbook(operator, "--tags", "prepare"))
    assert operator.ssh("worker-1", "kubelet --version").startswith("Kubernetes v1.35")
    words = playbook(operator, "--tags", "apply", "-e", '{"upgrade_parts": ["control_plane"]}')
    running = operator.start(*words)
    # The new API server's manifest is there: etcd is done, the others are not.
    wanted = "grep -q kube-apiserver:v1.36 /etc/kubernetes/manifests/kube-apiserver.yaml"
    wait_until(operator, "control-1", wanted, "kubeadm has not replaced the API server")
    operator.ssh("control-1", "pkill -KILL -x kubeadm")
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert json.loads(operator.ssh("control-1", "cat /var/lib/gpunodes/ledger.json"))["upgrade"] == "apply"
    # An emulated machine starts an API server in minutes; the playbook waits one for it.
    kubectl = "kubectl --kubeconfig /etc/kubernetes/admin.conf get --raw"
    ready = f"{kubectl} /version | grep -q v1.36 && {kubectl} /readyz"
    wait_until(operator, "control-1", ready, "the new API server does not start")
    operator.gpunodes(*words, limit_s=2 * LONG)
    assert json.loads(operator.ssh("control-1", "cat /var/lib/gpunodes/ledger.json"))["upgrade"] == ""
    assert operator.document("status", code=None)["version"].startswith("v1.36")
    assert set(versions(operator).values()) == {"v1.35"}


def test_the_kubelets_follow_one_by_one(operator: Operator) -> None:
    for machine in LAB.machines:
        words = playbook(operator, "--limit", machine, "-e", '{"upgrade_parts": ["node"]}')
        drain = ("drain", machine, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
        operator.kubectl(*drain, limit_s=LONG)
        for tag in ("apply", "verify"):
            operator.gpunodes(*words, "--tags", tag, limit_s=2 * LONG)
        operator.kubectl("uncordon", machine)
    assert set(versions(operator).values()) == {"v1.36"}
    operator.gpunodes(*playbook(operator, "--tags", "addons", "--limit", "control-1"))
    answers = web.answers(operator)
    assert len(answers) > 100
    assert answers.count("failed") / len(answers) < 0.05, "the Service was away"


def test_another_run_changes_nothing(operator: Operator) -> None:
    assert operator.document("upgrade", "plan", "1.36")["steps"] == []
    before = {machine: operator.ssh(machine, "cat /var/lib/gpunodes/ledger.json") for machine in LAB.machines}
    operator.gpunodes(*playbook(operator, "--tags", "apply"))
    assert {machine: operator.ssh(machine, "cat /var/lib/gpunodes/ledger.json") for machine in LAB.machines} == before
    results = operator.document("up", "--kubernetes-version", "1.36", "--dry-run")["machines"]
    assert {each["outcome"] for each in results} == {"unchanged"}


def test_a_worker_returns_to_its_older_kubelet(operator: Operator) -> None:
    words = playbook(operator, "--limit", "worker-1", "-e", '{"upgrade_parts": ["node"]}')
    operator.gpunodes(*words, "--tags", "undo", limit_s=2 * LONG)
    deadline = time.monotonic() + LONG
    while versions(operator)["worker-1"] != "v1.35":
        assert time.monotonic() < deadline
        time.sleep(5)
    # A kubelet that has just started is not ready for some seconds.
    operator.kubectl("wait", "--for=condition=Ready", "node/worker-1", "--timeout=180s")
    assert lines(operator.ssh("worker-1", "apt-mark showhold | grep -c ^kube")) == ["2"]
    assert (
        "cannot return"
        in operator.gpunodes(*playbook(operator, "--limit", "control-1", "--tags", "undo"), code=None).stdout
    )
    operator.gpunodes(*words, "--tags", "apply", limit_s=2 * LONG)
    assert versions(operator)["worker-1"] == "v1.36"


def test_the_add_ons_are_up_to_date(operator: Operator) -> None:
    found = operator.document("addon", "plan")["addons"]
    assert [(each["name"], each["needed"]) for each in found] == [("kube-flannel-ds", False)]
    operator.gpunodes("addon", "upgrade", "--yes")


def test_a_reset_still_leaves_a_bare_machine(operator: Operator) -> None:
    operator.gpunodes("remove", "--yes", "worker-1")
    assert lines(operator.ssh("worker-1", BARE)) == operator.bare["worker-1"]
