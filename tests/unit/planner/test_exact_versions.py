"""Exact versions of the driver, CUDA and cuDNN: which packages they mean, and when they are refused."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils.packages import RequestedPackage, fits
from gpunodes.errors import WrongInput
from gpunodes.planner import gpu_packages, reports
from gpunodes.planner.gpu import Plan, RequestedSoftware, check, plan

from tests.hostile import machine_report
from tests.unit.planner.test_gpu_plan import machine


def made(facts: dict[str, Any], **requested: Any) -> Plan | tuple[str, ...]:
    found = plan("gpu-1", facts, RequestedSoftware("1.36", **requested))
    return found if isinstance(found, Plan) else tuple(map(str, found))


def packages(facts: dict[str, Any], **requested: Any) -> dict[str, str]:
    found = made(facts, **requested)
    assert isinstance(found, Plan), found
    return {package.name: package.version for package in found.packages}


def test_an_exact_driver_is_requested_of_the_packages_that_would_also_accept_newer_ones() -> None:
    found = packages(machine("H100"), driver="580.95.05")
    assert found["nvidia-driver-pinning-580"] == ""
    assert found["nvidia-open-580"] == found["nvidia-open"] == "580.95.05-*"
    assert "nvidia-open" not in packages(machine("H100"), driver="580")
    assert packages(machine("H100"), driver="590.44.01")["nvidia-open"] == "590.44.01-*"
    assert packages(machine("H100", nvswitches=4), driver="580.95.05")["nvidia-fabricmanager"] == "580.95.05-*"


@pytest.mark.parametrize(
    ("version", "good"),
    [("580.95.05-1", True), ("580.95.05-0ubuntu0.24.04.1", True), ("580.95.051-1", False), ("580.95.0-1", False)],
)
def test_an_exact_version_is_no_prefix(version: str, good: bool) -> None:
    assert fits(RequestedPackage("nvidia-open", gpu_packages.pattern_of("580.95.05", exact=True)), version) is good


def test_exact_cuda_and_cudnn() -> None:
    found = packages(machine("H100"), cuda=("13.0.2", "13.1"), cudnn="9.14.0.64")
    assert (found["cuda-toolkit-13-0"], found["cuda-toolkit-13-1"]) == ("13.0.2-*", "")
    assert found["cudnn9-cuda-13"] == "9.14.0.64-*"
    assert packages(machine("H100"), cudnn="9.14")["cudnn9-cuda-13"] == "9.14.*"


def test_the_last_cudnn_of_old_gpus_has_exact_versions_too() -> None:
    assert packages(machine("V100"), driver="580", cudnn="9.10.2.21")["cudnn9-cuda-12"] == "9.10.2.21-*"
    assert "cuDNN 9.11.0.1 does not support Volta" in str(made(machine("V100"), driver="580", cudnn="9.11.0.1"))


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"driver": "581.1.1"}, "the driver branch '581' is unknown"),
        ({"driver": "580.x"}, "'580.x' is not a version of the driver"),
        ({"driver": "580.*"}, "is not a version of the driver"),
        ({"driver": "580.95.05.1"}, "is not a version of the driver"),
        ({"driver": "580.95\n"}, "is not a version of the driver"),
        ({"cuda": ("13.0.*",)}, "CUDA 13.0.* is unknown"),
        ({"cuda": ("13.9.1",)}, "CUDA 13.9.1 is unknown"),
        ({"cuda": ("13.0", "13.0.2")}, "CUDA 13.0 and 13.0.2 are both requested"),
        ({"cudnn": "9.*"}, "cuDNN 9.* is unknown"),
        ({"cudnn": "9.\x1b[2J"}, "is unknown"),
    ],
)
def test_what_is_no_version_is_wrong_input(requested: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongInput) as error:
        check(RequestedSoftware("", **requested))
    assert message in str(error.value)


def test_good_versions_are_accepted() -> None:
    for driver in ("", "580", "580.95.05", "550.163.01"):
        check(RequestedSoftware("", driver, ("12.4.1", "13.0.2"), "9.14.0.64"))


LISTED = {"nvidia": {"nvidia-open-580": ["580.105.08-1", "580.65.06-1"], "cuda-toolkit-13-0": ["13.0.2-1"]}}


def test_a_version_that_its_source_does_not_have_is_refused_with_those_that_it_has() -> None:
    facts = {**machine("H100"), "versions": LISTED}
    found = made(facts, driver="580.95.05")
    assert isinstance(found, tuple)
    assert "NVIDIA's repository has no nvidia-open-580 580.95.05; wanted: one of 580.105.08-1, 580.65.06-1" in found[0]
    assert "it has none" in found[1]  # nvidia-open is not listed
    # A branch is not affected, and neither is a version that the source has.
    assert packages(facts, driver="580")
    assert packages(facts, cuda=("13.0.2",))
    assert "13.0.9; wanted: one of 13.0.2-1" in str(made(facts, cuda=("13.0.9",)))
    # Nothing is refused if the source was not read: the machine reports that instead.
    assert packages(machine("H100"), driver="580.95.05")


def test_the_distribution_has_no_exact_cuda() -> None:
    facts = machine("H100", system="debian 12")
    assert packages(facts, source="distribution", driver="535", cuda=("11.8",))
    assert "CUDA 11.8.0 is not available" in str(made(facts, source="distribution", driver="535", cuda=("11.8.0",)))


def test_an_installed_driver_of_another_version_does_not_meet_an_exact_request() -> None:
    driver = {"module": "580.65.06", "loaded": True, "origin": "nvidia-repository", "packages": {}, "flavour": "open"}
    assert packages(machine("H100", driver=driver, clients=2), driver="580")
    assert packages(machine("H100", driver=driver, clients=2), driver="580.65.06")
    assert "a driver in use is not replaced" in str(made(machine("H100", driver=driver, clients=2), driver="580.95.05"))
    idle = str(made(machine("H100", driver=driver, clients=0), driver="580.95.05"))
    assert "an installation does not replace packages" in idle
    assert "request 580.65.06" in idle


def test_sources_are_read_only_for_exact_versions() -> None:
    assert gpu_packages.exact_packages("580", ("13.0",), "9.14") == []
    assert {"nvidia-open-580", "nvidia-open", "nvidia-fabricmanager"} <= {
        *gpu_packages.exact_packages("580.95.05", (), "")
    }
    assert gpu_packages.exact_packages("", ("13.0.2", "13.1"), "") == ["cuda-toolkit-13-0", "nvidia-cuda-toolkit"]
    assert "cudnn9-cuda-13" in gpu_packages.exact_packages("", (), "9.14.0.64")


@pytest.mark.parametrize(
    ("versions", "good"),
    [
        (LISTED, True),
        ({"nvidia": {"nvidia-open": ["580\x1b[2J"]}}, False),
        ({"nvidia": {"{{ x }}": ["580"]}}, False),
        ({"nvidia": {"nvidia-open": ["1"] * 201}}, False),
    ],
)
def test_the_form_of_reported_versions(versions: Any, good: bool) -> None:
    assert (reports.machine_problem(machine_report("gpu-1", 1, versions=versions)) == "") is good
