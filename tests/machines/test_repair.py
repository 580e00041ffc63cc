"""Machines with stand-in GPUs that hang and refuse to reboot: each repaired by what is left."""

from __future__ import annotations

import time

from . import unhealthy
from .conftest import Operator
from .unhealthy import clean, entry, fault, hang, history, needs_repair, repaired, verdict, wait_for

LAB = unhealthy.LAB


def test_a_hang_whose_reboot_hangs_ends_by_sysrq_on_the_machine_itself(operator: Operator) -> None:
    before = unhealthy.boot(operator, "gpu-1")
    message = len(unhealthy.console("gpu-1"))
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
    # The orderly ways did hang in the driver: a reset by the kernel's own hand ended it.
    assert "sysrq: Resetting" in unhealthy.console("gpu-1")[message:]
    assert found["step"] == "sysrq"
    told = [(each["what"], each["outcome"]) for each in history(operator) if each["kind"] == "step"]
    assert told == [("reboot", "failed"), ("force", "failed"), ("sysrq", "succeeded")]
    assert {"RepairStarted", "RepairEnded"} <= unhealthy.events(operator)
    clean(operator)


def test_the_same_with_sshd_dead_ends_by_the_bmc(operator: Operator) -> None:
    before = unhealthy.node(operator, "gpu-1")["status"]["nodeInfo"]["bootID"]
    fault(operator, "gpu-1", "reboot-hang")
    hang(operator)
    operator.ssh("gpu-1", "systemd-run --on-active=3 sh -c 'systemctl stop ssh.socket ssh.service; pkill -x sshd'")
    time.sleep(10)
    document = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    assert entry(document)["decision"] == "refuse", "nothing says that a machine that is not reached is sick"
    found = repaired(operator.document("repair", "gpu-1", "--yes", "--reason", "its sshd is dead"))
    assert found["step"] == "bmc"
    told = [(each["what"], each["outcome"]) for each in history(operator) if each["kind"] == "step"]
    assert told == [("reboot", "skipped"), ("force", "skipped"), ("sysrq", "skipped"), ("bmc", "succeeded")]
    assert unhealthy.boot(operator, "gpu-1") != before
    clean(operator)


def test_a_gpu_reset_suffices(operator: Operator) -> None:
    before = unhealthy.boot(operator, "gpu-1")
    fault(operator, "gpu-1", "ecc")
    assert wait_for(operator, "gpu-1", ["reset_gpu"])["xids"] == [48, 63]
    refused = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    assert entry(refused)["decision"] == "nothing", "a reset was not asked for"
    wider = ("health", "gpu-1", "--reboot-hung", "--actions", "reset_gpu,reboot", "--yes")
    assert repaired(operator.document(*wider))["step"] == "gpu-reset"
    assert unhealthy.boot(operator, "gpu-1") == before
    # The log of this boot still has the Xids; they are of before the reset.
    assert verdict(operator, "gpu-1")["xids"] == []
    assert {each["decision"] for each in operator.document(*wider)["machines"]} == {"nothing"}
    clean(operator)


def test_a_bmc_that_refuses(operator: Operator) -> None:
    before = unhealthy.boot(operator, "gpu-1")
    with unhealthy.bmc(operator, "refuses"):
        assert operator.document("power", "gpu-1", "status")["state"] == "on"
        assert "refuses" in operator.gpunodes("power", "gpu-1", "cycle", "--yes", code=1).stderr
        document = operator.document("repair", "gpu-1", "--from", "bmc", "--yes", code=3)
    assert entry(document)["outcome"] == "needs-repair"
    assert "refuses" in entry(document)["why"]
    needs_repair(operator)
    assert unhealthy.boot(operator, "gpu-1") == before
    operator.gpunodes("uncordon", "gpu-1")
    clean(operator)
