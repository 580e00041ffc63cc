"""Repairs in a pool of two GPU machines: the healthy are left alone, too many sick stop them; loop guard; no API."""

from __future__ import annotations

import time

from . import unhealthy
from .conftest import Kind, Operator
from .unhealthy import clean, entry, fault, hang, needs_repair, repaired, wait_for, wait_until_well

GPU = ("gpu-1", "gpu-2")
LAB = Kind("debian13", workers=0, gpu_workers=2, cluster=unhealthy.DRIVER, settings=unhealthy.PATIENT)
REPAIR = ("health", "gpu-1", "--reboot-hung", "--yes")


def test_what_is_well_is_left_alone(operator: Operator) -> None:
    boots = [unhealthy.boot(operator, machine) for machine in GPU]
    document = operator.document("health", "gpu-*", "--reboot-hung", "--yes")
    assert {each["decision"] for each in document["machines"]} == {"nothing"}
    assert [unhealthy.boot(operator, machine) for machine in GPU] == boots
    clean(operator, GPU)


def test_too_many_sick_at_once_stops(operator: Operator) -> None:
    for machine in GPU:
        fault(operator, machine, "lost")
    for machine in GPU:
        wait_for(operator, machine, ["reboot"])
    boots = [unhealthy.boot(operator, machine) for machine in GPU]
    document = operator.document("health", "gpu-*", "--reboot-hung", "--yes", code=3)
    assert {each["decision"] for each in document["machines"]} == {"refuse"}
    assert all("2 of 2" in each["why"] for each in document["machines"])
    assert [unhealthy.boot(operator, machine) for machine in GPU] == boots
    document = operator.document("repair", *GPU, "--max-unavailable", "100%", "--yes")
    for machine in GPU:
        repaired(document, machine)
    clean(operator, GPU)


def test_the_loop_guard_and_no_control_plane(operator: Operator) -> None:
    before = unhealthy.boot(operator, "gpu-1")
    hang(operator)
    wait_for(operator, "gpu-1", ["reboot"])
    with unhealthy.given(operator, "control-1", gpunodes_repair_guard_repairs=1):
        found = entry(operator.document(*REPAIR, code=3))
        assert (found["decision"], found["outcome"]) == ("needs-repair", "needs-repair")
        assert "times in 24 h and is unhealthy again" in found["why"]
        needs_repair(operator)
        operator.gpunodes("uncordon", "gpu-1")
    assert unhealthy.boot(operator, "gpu-1") == before

    # Nobody reaches the API server, and its kubelet does not start it anew for that: emulated, one that starts while
    # three nodes come back to it at once can take longer than the minute that it gives itself.
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
    answers = "kubectl --kubeconfig /etc/kubernetes/admin.conf get --raw /readyz --request-timeout=5s"
    while operator.ssh("control-1", answers, code=None) != "ok":
        assert time.monotonic() < deadline
        time.sleep(5)
    wait_until_well(operator, GPU)
    clean(operator, GPU)


def test_no_password_lies_about(operator: Operator) -> None:
    unhealthy.no_password_lies_about(operator)
