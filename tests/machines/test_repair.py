"""Machines with stand-in GPUs that hang and refuse to reboot: each repaired by what is left."""

from __future__ import annotations

import time

from . import sick
from .conftest import Operator
from .sick import clean, entry, fault, hang, history, needs_repair, repaired, verdict, wait_for

LAB = sick.LAB


def test_a_hang_whose_reboot_hangs_ends_by_sysrq_on_the_machine_itself(operator: Operator) -> None:
    before = sick.boot(operator, "gpu-1")
    said = len(sick.console("gpu-1"))
    fault(operator, "gpu-1", "reboot-hang")
    hang(operator)
    assert wait_for(operator, "gpu-1", ["reboot"])["hung_in_driver"]
    plan = operator.document("health", "gpu-*", "--reboot-hung", "--dry-run", code=3)
    first = entry(plan)
    assert (first["ruling"], first["rung"]) == ("repair", "reboot")
    assert any("blocked for more than" in line for line in first["verdict"]["evidence"])
    assert sick.boot(operator, "gpu-1") == before
    found = repaired(operator.document("health", "gpu-*", "--reboot-hung", "--yes"))
    assert sick.boot(operator, "gpu-1") != before
    # The orderly ways did hang in the driver: a reset by the kernel's own hand ended it.
    assert "sysrq: Resetting" in sick.console("gpu-1")[said:]
    assert found["rung"] == "sysrq"
    told = [(each["what"], each["outcome"]) for each in history(operator) if each["kind"] == "rung"]
    assert told == [("reboot", "failed"), ("force", "failed"), ("sysrq", "took")]
    assert {"RepairStarted", "RepairEnded"} <= sick.events(operator)
    clean(operator)


def test_the_same_with_sshd_dead_ends_by_the_bmc(operator: Operator) -> None:
    before = sick.node(operator, "gpu-1")["status"]["nodeInfo"]["bootID"]
    fault(operator, "gpu-1", "reboot-hang")
    hang(operator)
    operator.ssh("gpu-1", "systemd-run --on-active=3 sh -c 'systemctl stop ssh.socket ssh.service; pkill -x sshd'")
    time.sleep(10)
    document = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    assert entry(document)["ruling"] == "refuse", "nothing says that a machine that is not reached is sick"
    found = repaired(operator.document("repair", "gpu-1", "--yes", "--reason", "its sshd is dead"))
    assert found["rung"] == "bmc"
    told = [(each["what"], each["outcome"]) for each in history(operator) if each["kind"] == "rung"]
    assert told == [("reboot", "skipped"), ("force", "skipped"), ("sysrq", "skipped"), ("bmc", "took")]
    assert sick.boot(operator, "gpu-1") != before
    clean(operator)


def test_a_gpu_reset_suffices(operator: Operator) -> None:
    before = sick.boot(operator, "gpu-1")
    fault(operator, "gpu-1", "ecc")
    assert wait_for(operator, "gpu-1", ["reset_gpu"])["xids"] == [48, 63]
    refused = operator.document("health", "gpu-1", "--reboot-hung", "--yes", code=3)
    assert entry(refused)["ruling"] == "nothing", "a reset was not asked for"
    wider = ("health", "gpu-1", "--reboot-hung", "--actions", "reset_gpu,reboot", "--yes")
    assert repaired(operator.document(*wider))["rung"] == "gpu-reset"
    assert sick.boot(operator, "gpu-1") == before
    # The log of this boot still has the Xids; they are of before the reset.
    assert verdict(operator, "gpu-1")["xids"] == []
    assert {each["ruling"] for each in operator.document(*wider)["machines"]} == {"nothing"}
    clean(operator)


def test_a_bmc_that_refuses(operator: Operator) -> None:
    before = sick.boot(operator, "gpu-1")
    with sick.bmc(operator, "refuses"):
        assert operator.document("power", "gpu-1", "status")["state"] == "on"
        assert "refuses" in operator.gpunodes("power", "gpu-1", "cycle", "--yes", code=1).stderr
        document = operator.document("repair", "gpu-1", "--from", "bmc", "--yes", code=3)
    assert entry(document)["outcome"] == "needs-repair"
    assert "refuses" in entry(document)["why"]
    needs_repair(operator)
    assert sick.boot(operator, "gpu-1") == before
    operator.gpunodes("uncordon", "gpu-1")
    clean(operator)
