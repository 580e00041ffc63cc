"""Pools that scale by power: a machine that boots and never registers its node is given up, and told."""

from __future__ import annotations

from . import scaling, unhealthy
from .conftest import Operator
from .scaling import (
    are_off,
    job,
    nodes,
    phases,
    power_of,
    prepare,
    runs_on,
    until,
    warnings,
)

LAB = scaling.LAB
BOOT_S = 360
"""Longer than an emulated machine without GPUs needs for its node; then its boot is given up."""


def test_a_boot_that_never_registers_is_given_up_and_the_other_pool_serves(operator: Operator) -> None:
    prepare(operator, gpunodes_autoscale_boot_timeout=BOOT_S)
    # Else it might be switched off before its kubelet is disabled, which `autoscale up` would enable again.
    job(operator, "holds", nodeName="worker-1")
    operator.gpunodes("autoscale", "up", "--yes")
    # It runs on until the machine is switched off; the next boot does not start it.
    operator.ssh("worker-1", "systemctl disable kubelet")
    operator.kubectl("delete", "pod", "holds", "--wait=true")
    until("both are idle and switched off", lambda: are_off(operator))
    job(operator, "waits")
    until("worker-1 is switched on", lambda: power_of(operator, "worker-1") == "on")
    until("the pod runs in the other pool", lambda: runs_on(operator, "waits") == "worker-2")
    until("worker-1 is given up", lambda: phases(operator)["worker-1"] == "failed")
    assert power_of(operator, "worker-1") == "off"
    assert "worker-1" not in nodes(operator)


def test_why_is_told(operator: Operator) -> None:
    found = {each["node"]: each for each in operator.document("autoscale", "status", code=None)["machines"]}
    assert "its system responds, its kubelet does not run" in found["worker-1"]["reason"]
    assert found["worker-1"]["unusable"]
    assert not found["worker-2"]["unusable"]
    until("it is told", lambda: warnings(operator, "worker-1", "SwitchedOff", "its kubelet does not run"))
    # It is not tried again for the same pod, and health does not take it for a machine to repair.
    verdict = operator.document("health", "worker-1", "--reboot-hung", "--yes", code=None)["machines"][0]
    assert verdict["decision"] == "nothing"
    assert power_of(operator, "worker-1") == "off"


def test_somebody_switches_it_on_and_its_node_serves_again(operator: Operator) -> None:
    operator.gpunodes("power", "worker-1", "on", "--yes")
    until("its system responds", lambda: operator.lab("ssh", "worker-1", "true").returncode == 0)
    operator.ssh("worker-1", "systemctl enable --now kubelet")
    until("its node is noticed", lambda: phases(operator)["worker-1"] == "on")
    job(operator, "again")
    until("a pod runs on it", lambda: runs_on(operator, "again") == "worker-1")
    operator.gpunodes("autoscale", "down", "--yes")
    unhealthy.assert_no_password_leaks(operator)
