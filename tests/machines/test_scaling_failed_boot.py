"""Pools that scale by power: a machine that boots and never registers its node is given up, and told. Not run yet."""

from __future__ import annotations

from . import scaling, unhealthy
from .conftest import Operator
from .scaling import archive, are_off, job, nodes, phases, power_of, prepare, runs_on, until

LAB = scaling.LAB
BOOT_S = 540
"""Longer than an emulated machine needs for its node and the pod that proves its GPUs; then its boot is given up."""


def test_a_boot_that_never_registers_is_given_up_and_the_other_pool_serves(operator: Operator) -> None:
    prepare(operator, archive(), gpunodes_autoscale_boot_timeout=BOOT_S)
    operator.gpunodes("autoscale", "up", "--yes")
    # It runs on until the machine is switched off; the next boot does not start it.
    operator.ssh("gpu-1", "systemctl disable kubelet")
    until("both are idle and switched off", lambda: are_off(operator))
    job(operator, "waits")
    until("gpu-1 is switched on", lambda: power_of(operator, "gpu-1") == "on")
    until("the pod runs in the other pool", lambda: runs_on(operator, "waits") == "gpu-2")
    until("gpu-1 is given up", lambda: phases(operator)["gpu-1"] == "failed")
    assert power_of(operator, "gpu-1") == "off"
    assert "gpu-1" not in nodes(operator)


def test_why_is_told(operator: Operator) -> None:
    found = {each["node"]: each for each in operator.document("autoscale", "status", code=None)["machines"]}
    assert "its system responds, its kubelet does not run" in found["gpu-1"]["reason"]
    assert found["gpu-1"]["unusable"]
    assert not found["gpu-2"]["unusable"]
    selector = "involvedObject.name=gpu-1,type=Warning"
    events = operator.kubectl("get", "events", "-A", "--field-selector", selector, "-o", "jsonpath={.items[*].message}")
    assert "its kubelet does not run" in events
    # It is not tried again for the same pod, and health does not take it for a machine to repair.
    verdict = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=None)["machines"][0]
    assert verdict["decision"] != "repair"
    assert power_of(operator, "gpu-1") == "off"


def test_somebody_switches_it_on_and_its_node_serves_again(operator: Operator) -> None:
    operator.gpunodes("power", "gpu-1", "on", "--yes")
    until("its system responds", lambda: operator.lab("ssh", "gpu-1", "true").returncode == 0)
    operator.ssh("gpu-1", "systemctl enable --now kubelet")
    until("its node is noticed", lambda: phases(operator)["gpu-1"] == "on")
    job(operator, "again")
    until("a pod runs on it", lambda: runs_on(operator, "again") == "gpu-1")
    operator.gpunodes("autoscale", "down", "--yes")
    unhealthy.assert_no_password_leaks(operator)
