"""Faults that need a power cycle, BMCs that are down or report a wrong state, and a hang at every boot."""

from __future__ import annotations

from gpunodes.inventory import Inventory

from . import unhealthy
from .conftest import Operator
from .unhealthy import assert_clean, assert_needs_repair, entry, fault, history, repaired, wait_for, wait_until_healthy

LAB = unhealthy.LAB
REPAIR = ("health", "gpu-1", "--reboot-hung", "--yes")


def test_a_fault_that_needs_a_power_cycle_waits_for_the_bmc_and_an_uncordon(operator: Operator) -> None:
    fault(operator, "gpu-1", "needs-cold")
    wait_for(operator, "gpu-1", ["reboot"])
    with unhealthy.bmc(operator, "down"):
        document = operator.document(*REPAIR, code=3)
        assert entry(document)["outcome"] == "needs-repair"
        assert "the new boot has findings" in entry(document)["why"]
        (cold,) = [each for each in history(operator) if each["what"] == "cold"]
        assert "does not respond" in cold["detail"]
    assert_needs_repair(operator)
    before = unhealthy.boot(operator, "gpu-1")
    again = entry(operator.document(*REPAIR, code=3))
    assert (again["decision"], again["outcome"]) == ("needs-repair", None)
    assert "gpunodes uncordon gpu-1" in again["why"]
    assert unhealthy.boot(operator, "gpu-1") == before

    operator.gpunodes("uncordon", "gpu-1")
    assert repaired(operator.document(*REPAIR))["step"] == "cold"
    assert_clean(operator)


def test_a_bmc_that_reports_on_for_a_machine_that_is_off(operator: Operator) -> None:
    assert operator.lab("power", "gpu-1", "off").returncode == 0
    # The machine does not start: the wait for its boot is short.
    with (
        unhealthy.bmc(operator, "lies"),
        unhealthy.with_variables(operator, "control-1", gpunodes_repair_boot_timeout=60),
    ):
        document = operator.document("repair", "gpu-1", "--yes", code=3)
    assert entry(document)["outcome"] == "needs-repair"
    (cold,) = [each for each in history(operator) if each["what"] == "cold"]
    assert "accepted the command off, but reports on" in cold["detail"]
    assert_needs_repair(operator)
    assert operator.document("power", "gpu-1", "status")["state"] == "off"
    assert operator.document("power", "gpu-1", "on")["state"] == "on"
    wait_until_healthy(operator)
    operator.gpunodes("uncordon", "gpu-1")
    assert_clean(operator)


def test_the_bmc_of_another_machine_gets_no_order(operator: Operator) -> None:
    """A wrong BMC address in the inventory must not switch another machine: here the control plane."""
    own = Inventory(operator.folder / "inventory").variables("control-1")
    other = {key: str(own[key]) for key in ("gpunodes_bmc_address", "gpunodes_bmc_user", "gpunodes_bmc_password")}
    before = unhealthy.boot(operator, "gpu-1"), unhealthy.boot(operator, "control-1")
    operator.document("health", "gpu-1", code=None)  # records the machine's identity
    assert operator.document("power", "gpu-1", "status")["own"] is True
    with unhealthy.with_variables(operator, "gpu-1", **other):
        shown = operator.document("power", "gpu-1", "status")
        assert shown["own"] is False
        assert operator.ssh("gpu-1", "cat /sys/class/dmi/id/product_uuid").strip() in shown["identities"]
        for action in ("off", "cycle"):
            done = operator.gpunodes("power", "gpu-1", action, "--yes", code=1)
            assert "belongs to another machine" in done.stderr
        assert (
            entry(operator.document("repair", "gpu-1", "--from", "bmc", "--yes", code=3))["outcome"] == "needs-repair"
        )
        tried = [each["detail"] for each in history(operator) if each["what"] in {"bmc", "cold"}]
        assert tried
        assert all("belongs to another machine" in detail for detail in tried)
    assert (unhealthy.boot(operator, "gpu-1"), unhealthy.boot(operator, "control-1")) == before
    operator.gpunodes("uncordon", "gpu-1")
    assert_clean(operator)


def test_repair_gives_up_on_a_hang_at_every_boot(operator: Operator) -> None:
    for more in ((), ("--at-boot",)):
        fault(operator, "gpu-1", "smi-hang", *more)
    wait_for(operator, "gpu-1", ["reboot"])
    found = entry(operator.document(*REPAIR, code=3))
    assert found["outcome"] == "needs-repair"
    assert "the new boot has findings" in found["why"]
    assert [each["what"] for each in history(operator) if each["kind"] == "verification"][-1] == "cold"
    assert_needs_repair(operator)
    # An administrator fixes the machine.
    fault(operator, "gpu-1", "clear")
    operator.gpunodes("power", "gpu-1", "cycle", "--yes")
    wait_until_healthy(operator)
    operator.gpunodes("uncordon", "gpu-1")
    assert_clean(operator)


def test_no_password_leaks(operator: Operator) -> None:
    unhealthy.assert_no_password_leaks(operator)
