"""Repairs in a pool of two GPU machines: the loop guard, and a control plane whose API server does not respond."""

from __future__ import annotations

import time

from . import unhealthy
from .conftest import Operator
from .unhealthy import assert_clean, assert_needs_repair, entry, hang, repaired, wait_for, wait_until_healthy

GPU = ("gpu-1", "gpu-2")
LAB = unhealthy.POOL
REPAIR = ("health", "gpu-1", "--reboot-hung", "--yes")


def test_the_loop_guard_and_no_control_plane(operator: Operator) -> None:
    # The repair that the guard counts.
    repaired(operator.document("repair", "gpu-1", "--yes"))
    wait_until_healthy(operator, GPU)
    before = unhealthy.boot(operator, "gpu-1")
    hang(operator)
    wait_for(operator, "gpu-1", ["reboot"])
    with unhealthy.with_variables(operator, "control-1", gpunodes_repair_guard_repairs=1):
        found = entry(operator.document(*REPAIR, code=3))
        assert (found["decision"], found["outcome"]) == ("needs-repair", "needs-repair")
        assert "times in 24 h and is unhealthy again" in found["why"]
        assert_needs_repair(operator)
        operator.gpunodes("uncordon", "gpu-1")
    assert unhealthy.boot(operator, "gpu-1") == before

    # The API server is unreachable; the stopped kubelet does not restart it: emulated, an API server that starts while
    # three nodes reconnect may exceed its own time limit of one minute.
    refused = "INPUT -p tcp --dport 6443 -j REJECT --reject-with tcp-reset"
    operator.ssh("control-1", f"systemctl stop kubelet; iptables -I {refused}")
    try:
        done = operator.gpunodes(*REPAIR, code=1)
        assert "--without-cluster" in done.stderr
        assert unhealthy.boot(operator, "gpu-1") == before
        repaired(operator.document(*REPAIR, "--without-cluster"))
        assert unhealthy.boot(operator, "gpu-1") != before
    finally:
        operator.ssh("control-1", f"iptables -D {refused}; systemctl start kubelet")
    deadline = time.monotonic() + unhealthy.BOOT_S
    ready = "kubectl --kubeconfig /etc/kubernetes/admin.conf get --raw /readyz --request-timeout=5s"
    while operator.ssh("control-1", ready, code=None) != "ok":
        assert time.monotonic() < deadline
        time.sleep(5)
    wait_until_healthy(operator, GPU)
    assert_clean(operator, GPU)


def test_no_password_leaks(operator: Operator) -> None:
    unhealthy.assert_no_password_leaks(operator)
