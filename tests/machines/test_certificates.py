"""The certificates of a cluster end, and are renewed after a kill."""

from __future__ import annotations

import json
import time

from .conftest import BARE, SLOW_RESTARTS, LabSpec, Operator, kill, lines, search_for_secrets

LAB = LabSpec("debian13", workers=1, cluster=(), settings=SLOW_RESTARTS)
MACHINES = LAB.machines
CONFIG = ("-n", "kube-system", "get", "configmap", "kubeadm-config", "-o", "json")


def test_certificates_of_fifteen_minutes_are_shown_and_end(operator: Operator) -> None:
    config = json.loads(operator.kubectl(*CONFIG))["data"]["ClusterConfiguration"]
    kept = [line for line in config.splitlines() if not line.startswith("certificateValidityPeriod")]
    patch = {"data": {"ClusterConfiguration": "\n".join([*kept, "certificateValidityPeriod: 15m0s"]) + "\n"}}
    operator.kubectl("-n", "kube-system", "patch", "configmap", "kubeadm-config", "-p", json.dumps(patch))
    operator.gpunodes("certs", "renew", "--force")
    found = operator.document("certs", code=3)
    control = next(each for each in found["machines"] if each["machine"] == "control-1")
    ends = {each["name"]: each["not_after"] for each in control["certificates"]}
    assert ends["apiserver"] - time.time() < 1000
    assert any("gpunodes certs renew" in each for each in control["warnings"])
    warned = operator.document("preflight", "worker-1")
    assert "certificates" in {each["check"] for each in warned["findings"]}
    time.sleep(max(0.0, max(ends["apiserver"], ends["admin.conf"]) - time.time()) + 30)
    operator.kubectl("get", "nodes", code=1)


def test_certificates_that_have_ended_are_renewed_after_a_kill(operator: Operator) -> None:
    """No API responds by now: kubeadm then takes its defaults, a year."""
    running = operator.start("certs", "renew")
    operator.wait_for(running, "control-1: Renew the certificates")
    time.sleep(10)
    kill(running)
    operator.gpunodes("certs", "renew")
    operator.kubectl("get", "nodes")
    deadline = time.monotonic() + 300
    while not all(node["ready"] for node in operator.document("status", code=None)["nodes"]):
        assert time.monotonic() < deadline
        time.sleep(5)
    assert operator.document("certs")["exit_code"] == 0
    assert operator.ssh("control-1", "ls -A /etc/kubernetes/gpunodes-manifests") == ""


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES)


def test_reset_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("reset", "--yes", *MACHINES)
    for machine in MACHINES:
        assert lines(operator.ssh(machine, BARE)) == operator.bare[machine]
