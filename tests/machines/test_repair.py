"""Machines with stand-in GPUs that hang and do not reboot: each is repaired by the next escalation step."""

from __future__ import annotations

import time

from . import unhealthy
from .conftest import Operator
from .unhealthy import assert_clean, assert_needs_repair, entry, fault, hang, history, repaired, verdict, wait_for

LAB = unhealthy.LAB


def test_a_hang_whose_reboot_hangs_is_repaired_by_sysrq(operator: Operator) -> None:
    before = unhealthy.boot(operator, "gpu-1")
    start = len(unhealthy.console("gpu-1"))
    fault(operator, "gpu-1", "reboot-hang")
    hang(operator)
    assert wait_for(operator, "gpu-1", ["reboot"])["hung_in_driver"]
    plan = operator.document("health", "gpu-*", "--reboot-hung", "--dry-run", code=3)
    first = entry(plan)
    assert (first["decision"], first["step"]) == ("repair", "reboot")
    assert any("blocked for more than" in line for line in first["verdict"]["evidence"])
    assert unhealthy.boot(operator, "gpu-1") == before
    found = repaired(operator.document("health", "gpu-*", "--reboot-hung", "--yes"))
    assert unhealthy.boot(operator, "gpu-1") != before
    # Orderly reboots hung in the driver: the kernel reset the machine by sysrq.
    assert "sysrq: Resetting" in unhealthy.console("gpu-1")[start:]
    assert found["step"] == "sysrq"
    steps = [(each["what"], each["outcome"]) for each in history(operator) if each["kind"] == "step"]
    assert steps == [("reboot", "failed"), ("force", "failed"), ("sysrq", "succeeded")]
    assert {"RepairStarted", "RepairEnded"} <= unhealthy.events(operator)
    assert_clean(operator)


def test_a_hang_without_sshd_is_repaired_by_the_bmc(operator: Operator) -> None:
    before = unhealthy.node(operator, "gpu-1")["status"]["nodeInfo"]["bootID"]
    fault(operator, "gpu-1", "reboot-hang")
    hang(operator)
    operator.ssh("gpu-1", "systemd-run --on-active=3 sh -c 'systemctl stop ssh.socket ssh.service; pkill -x sshd'")
    time.sleep(10)
    document = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    assert entry(document)["decision"] == "refuse", "an unreachable machine may be healthy"
    found = repaired(operator.document("repair", "gpu-1", "--yes", "--reason", "its sshd is dead"))
    assert found["step"] == "bmc"
    steps = [(each["what"], each["outcome"]) for each in history(operator) if each["kind"] == "step"]
    assert steps == [("reboot", "skipped"), ("force", "skipped"), ("sysrq", "skipped"), ("bmc", "succeeded")]
    assert unhealthy.boot(operator, "gpu-1") != before
    assert_clean(operator)


def test_a_gpu_reset_suffices(operator: Operator) -> None:
    before = unhealthy.boot(operator, "gpu-1")
    fault(operator, "gpu-1", "ecc")
    assert wait_for(operator, "gpu-1", ["reset_gpu"])["xids"] == [48, 63]
    refused = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    assert entry(refused)["decision"] == "nothing", "a reset was not requested"
    wider = ("health", "gpu-1", "--reboot-hung", "--actions", "reset_gpu,reboot", "--yes")
    assert repaired(operator.document(*wider))["step"] == "gpu-reset"
    assert unhealthy.boot(operator, "gpu-1") == before
    # The Xids are still in the log of this boot, but they are older than the reset.
    assert verdict(operator, "gpu-1")["xids"] == []
    assert {each["decision"] for each in operator.document(*wider)["machines"]} == {"nothing"}
    assert_clean(operator)


def test_a_bmc_that_refuses(operator: Operator) -> None:
    before = unhealthy.boot(operator, "gpu-1")
    with unhealthy.bmc(operator, "refuses"):
        assert operator.document("power", "gpu-1", "status")["state"] == "on"
        assert "refuses" in operator.gpunodes("power", "gpu-1", "cycle", "--yes", code=1).stderr
        document = operator.document("repair", "gpu-1", "--from", "bmc", "--yes", code=3)
    assert entry(document)["outcome"] == "needs-repair"
    assert "refuses" in entry(document)["why"]
    assert_needs_repair(operator)
    assert unhealthy.boot(operator, "gpu-1") == before
    operator.gpunodes("uncordon", "gpu-1")
    assert_clean(operator)
