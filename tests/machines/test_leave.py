"""Workers leave a cluster; joins with power cuts, killed and interrupted commands; reset."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time

from gpunodes.engine.leases.held import DURATION_S

from .conftest import BARE, LabSpec, Operator, kill, lines, search_for_secrets

LAB = LabSpec("debian13", workers=2, cluster=())
MACHINES = LAB.machines


def test_remove_drains_and_resets_a_node(operator: Operator) -> None:
    operator.gpunodes("remove", "--yes", "worker-2")
    status = operator.document("status")
    assert {node["name"] for node in status["nodes"]} == {"control-1", "worker-1"}
    assert status["missing"] == ["worker-2"]
    assert lines(operator.ssh("worker-2", BARE)) == operator.bare["worker-2"]
    # Its certificate cannot make the node again; a join can, below.
    node = shlex.quote(json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "worker-2"}}))
    words = "--as=system:node:worker-2 --as-group=system:nodes create --dry-run=server --validate=false -f - 2>&1"
    said = operator.ssh("control-1", f"echo {node} | kubectl --kubeconfig /etc/kubernetes/admin.conf {words}", code=1)
    assert "gpunodes removed this machine from the cluster" in said


def test_a_template_reported_by_a_machine_is_not_evaluated_on_the_controller(operator: Operator) -> None:
    """The name of a machine's system is data: evaluated as a template it would run ``canary`` on the controller."""
    canary = operator.folder / "bin/canary"
    canary.parent.mkdir()
    canary.write_text(f"#!/bin/sh\ntouch {operator.folder}/ran\n", encoding="utf-8")
    canary.chmod(0o755)
    attack = "{{ lookup((dict(pipe=1)|first), (dict(canary=1)|first)) }}"
    operator.ssh("worker-2", "cp /usr/lib/os-release /run/original")
    operator.ssh("worker-2", f"sed -i 's#^PRETTY_NAME=.*#PRETTY_NAME=\"{attack}\"#' /usr/lib/os-release")
    before, operator.environment["PATH"] = os.environ["PATH"], f"{canary.parent}:{os.environ['PATH']}"
    try:
        assert operator.gpunodes("preflight", "worker-2").returncode == 0
        assert operator.document("join", "worker-2", "--dry-run")["machines"][0]["outcome"] == "changed"
        operator.gpunodes("status")
    finally:
        operator.environment["PATH"] = before
    assert attack in operator.ssh("worker-2", "cat /etc/os-release")
    assert not (operator.folder / "ran").exists()
    operator.ssh("worker-2", "cat /run/original >/usr/lib/os-release")


def test_a_join_completes_after_a_power_cut(operator: Operator) -> None:
    running = operator.start("join", "worker-2")
    operator.wait_for(running, "worker-2: Install Kubernetes")
    time.sleep(10)
    assert operator.lab("power", "worker-2", "off").returncode == 0
    assert running.wait(timeout=600) == 1
    assert operator.tokens() == []
    assert operator.lab("power", "worker-2", "on").returncode == 0
    deadline = time.monotonic() + 300
    while operator.lab("ssh", "worker-2", "true").returncode:
        assert time.monotonic() < deadline, "worker-2 did not come back"
        time.sleep(5)
    operator.gpunodes("join", "worker-2")
    assert operator.document("status")["missing"] == []


def test_an_interrupted_join_leaves_no_token(operator: Operator) -> None:
    operator.gpunodes("remove", "--yes", "worker-1")
    running = operator.start("join", "worker-1")
    operator.wait_for(running, "worker-1: Join the cluster")
    time.sleep(6)
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=600) == 130
    assert operator.tokens() == []


def test_a_playbook_joins_after_a_kill(operator: Operator) -> None:
    running = operator.start("join", "worker-1")
    operator.wait_for(running, "worker-1: Join the cluster")
    time.sleep(6)
    kill(running)
    # Until the Lease of the killed command ends, its token counts as in use.
    time.sleep(DURATION_S)
    operator.gpunodes("playbook", "join", "--limit", "worker-1")
    assert operator.document("status")["missing"] == []
    assert operator.tokens() == []


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES, boots={"worker-2": 2})


def test_a_reset_refuses_while_a_volume_is_busy(operator: Operator) -> None:
    point = "/var/lib/kubelet/plugins/of-a-storage/data"
    operator.ssh(
        "worker-1", f"mkdir -p {point} && mount -t tmpfs server:/export {point} && echo precious >{point}/file"
    )
    operator.ssh("worker-1", f"systemd-run --unit=user --collect --property=WorkingDirectory={point} sleep infinity")
    done = operator.gpunodes("reset", "worker-1", "--yes", code=1)
    assert f"{point} (server:/export) is mounted and used by sleep" in " ".join(done.stdout.split())
    assert operator.ssh("worker-1", f"cat {point}/file; ls /etc/kubernetes").split()[0] == "precious"
    operator.ssh("worker-1", "systemctl stop user")


def test_reset_leaves_nothing(operator: Operator) -> None:
    operator.gpunodes("reset", "worker-*", "control-1", "--yes")
    for machine in MACHINES:
        assert lines(operator.ssh(machine, BARE)) == operator.bare[machine]
