"""Upgrades of drivers: what is refused, what is warned of, and when there is nothing to do."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.errors import ExitCode
from gpunodes.planner.gpu import RequestedSoftware, plan
from gpunodes.planner.gpu_upgrade import Upgrade, Upgrades, planned, upgrade, without_driver

from tests.unit.planner.test_gpu_plan import machine

INSTALLED = {
    "module": "580.65.06",
    "loaded": True,
    "origin": "nvidia-repository",
    "packages": {"nvidia-open-580": "580.65.06-1"},
    "flavour": "open",
}


def facts(*cards: str, system: str = "debian 13", manager: str = "apt", **gpu: Any) -> dict[str, Any]:
    found = machine(*(cards or ("H100",)), system=system, **{"driver": INSTALLED, "clients": 3, **gpu})
    return {**found, "package_manager": manager, "kubernetes": {"role": "worker"}}


def made(found: dict[str, Any], driver: str, **requested: Any) -> Upgrade:
    result = upgrade("gpu-1", found, RequestedSoftware("1.36", driver, **requested))
    assert isinstance(result, Upgrade), result
    return result


def refused(found: dict[str, Any], driver: str, **requested: Any) -> str:
    result = upgrade("gpu-1", found, RequestedSoftware("1.36", driver, **requested))
    assert not isinstance(result, Upgrade), result
    return "\n".join(map(str, result))


def test_a_driver_in_use_is_planned_as_if_it_were_not_there() -> None:
    assert not hasattr(plan("gpu-1", facts(), RequestedSoftware("1.36", "590")), "branch")
    found = made(facts(), "590")
    assert (found.installed, found.requested, found.needed, found.downgrade) == ("580.65.06", "590", True, False)
    assert [package.name for package in found.plan.packages][1:3] == ["nvidia-driver-pinning-590", "nvidia-open"]


@pytest.mark.parametrize(
    ("driver", "needed"),
    [("580", False), ("580.65.06", False), ("580.95.05", True), ("580.65", True), ("595", True)],
)
def test_there_is_nothing_to_do_if_the_driver_meets_the_request(driver: str, needed: bool) -> None:
    assert made(facts(), driver).needed is needed


@pytest.mark.parametrize(
    ("found", "driver", "message"),
    [
        (facts(), "", "no driver is requested"),
        (facts(), "111", "the driver branch '111' is unknown"),
        (facts("V100", driver={**INSTALLED, "flavour": "proprietary"}), "590", "driver 590 does not support Volta"),
        (facts("B200"), "550", "driver 550 does not support Blackwell"),
        (
            facts(cuda={"13.0": "nvidia-repository"}, system="ubuntu 24.04"),
            "570",
            "CUDA 13.0 is installed or requested",
        ),
        (facts(driver=machine()["gpu"]["driver"]), "590", "run `gpunodes gpu install gpu-1`"),
        (facts(driver={**INSTALLED, "origin": "runfile"}), "590", "was not installed from packages"),
        (facts(driver={**INSTALLED, "origin": "distribution"}), "590", "the installed driver comes from the distr"),
        (facts(functions=[]), "590", "no NVIDIA GPU is on the PCI bus"),
        (facts(manager="dnf", system="rhel 9"), "590", "its packages come by dnf"),
        (facts(headers={"running": False, "package": None}), "590", "headers of the running kernel"),
        (facts(secure_boot=True), "590", "Secure Boot is on"),
    ],
)
def test_refusals(found: dict[str, Any], driver: str, message: str) -> None:
    assert message in refused(found, driver)


def test_the_kernel_of_the_machine_decides_as_for_an_installation() -> None:
    found = {**facts("A100", system="debian 12"), "kernel": "6.12.107"}
    found["gpu"]["driver"] = {**INSTALLED, "origin": "distribution", "flavour": "open"}
    upgraded = made(found, "535", source="distribution")
    assert upgraded.plan.flavour == "proprietary"
    assert "the kernel modules change from open to proprietary ones" in upgraded.warnings
    found["kernel"] = "6.19.1"
    assert "do not build for the kernel 6.19.1" in refused(found, "535", source="distribution")


def test_a_downgrade_is_warned_of() -> None:
    found = made(facts(driver={**INSTALLED, "module": "595.45.04"}), "580")
    assert found.downgrade
    assert "this is a downgrade from 595.45.04" in found.warnings[-1]
    assert "CUDA 13" not in found.warnings[-1]
    older = made(facts("A100", system="ubuntu 24.04"), "570")
    assert "containers with CUDA 13 no longer run" in older.warnings[-1]
    assert not made(facts(), "590").downgrade
    assert made(facts(driver={**INSTALLED, "module": "580.95.05"}), "580.65.06").downgrade


def test_fabric_manager_has_the_version_of_the_driver() -> None:
    found = {package.name: package for package in made(facts(nvswitches=4), "590.44.01").plan.packages}
    assert found["nvidia-fabricmanager"].version == "590.44.01-*"
    assert found["nvidia-fabricmanager"].same_version_as == "nvidia-open"


def test_results_of_several_machines() -> None:
    request = RequestedSoftware("1.36", "590")
    good, bad = planned("a", facts(), request), planned("b", facts("V100"), request)
    silent = planned("c", None, request, "it does not respond")
    assert (silent.upgrade, silent.unreachable) == (None, "it does not respond")
    assert Upgrades("590", [good]).exit_code is ExitCode.DONE
    assert Upgrades("590", [good, bad]).exit_code == 3
    assert Upgrades("590", [bad, silent]).exit_code == 1
    assert Upgrades("590", [good], interrupted=True).exit_code == 130


def test_facts_without_a_driver_keep_the_rest() -> None:
    found = facts()
    blank = without_driver(found)
    assert found["gpu"]["driver"] is INSTALLED
    assert (blank["gpu"]["driver"]["module"], blank["gpu"]["clients"]) == (None, None)
    assert blank["gpu"]["functions"] == found["gpu"]["functions"]
    assert without_driver({"gpu": {"functions": [], "nvswitches": 0}}) == {"gpu": {"functions": [], "nvswitches": 0}}
