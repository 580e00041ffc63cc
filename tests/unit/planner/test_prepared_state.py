"""Decisions for machines that are only prepared: what they get, and which checks they need not pass."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import Role
from gpunodes.planner import desired, preflight, reports
from gpunodes.planner.candidates import MachineFacts, requirements_of
from gpunodes.planner.desired import Desired
from gpunodes.planner.gpu_case import gpus_of
from gpunodes.planner.membership import membership

from tests.stand_ins import facts, given, gpu_machine, listener

EXPECTED = {"functions": [], "nvswitches": 0, "nouveau": "absent", "headers": {"running": True}, "expected": ["2330"]}
NODE = {"role": "worker", "ca_hash": "sha256:0", "server": "10.0.0.1:6443"}


def made(**more: Any) -> Desired:
    found = desired.desired(given(**more))
    assert isinstance(found, Desired), found
    return found


@pytest.mark.parametrize("prepares", [True, False])
def test_the_kubelet_of_a_machine_that_does_not_join_is_off(prepares: bool) -> None:
    kubelet = made(prepares=prepares).wanted["kubernetes"].services[0]
    assert (kubelet.name, kubelet.off) == ("kubelet", prepares)


def test_only_the_kubelet_differs_from_a_join() -> None:
    """A later join changes nothing else."""
    one, other = made(prepares=False), made(prepares=True)
    assert {name for name in other.wanted if one.wanted[name] != other.wanted[name]} == {"kubernetes"}
    assert one.wanted.keys() - other.wanted.keys() == {"registration"}, "nothing registers before the join"
    assert one.gpu == other.gpu
    assert one.images == other.images


def test_expected_gpus_get_the_driver_without_loading_it() -> None:
    own = gpu_machine()
    expected = made(found={**own, "gpu": EXPECTED}).gpu
    present = made(found=gpu_machine({"address": "1", "vendor": "10de", "device": "2330", "class": "030200"})).gpu
    assert (expected.gpus, expected.expected, present.expected) == (1, True, False)
    driver, loaded = expected.wanted["gpu_driver"], present.wanted["gpu_driver"]
    assert driver.packages == loaded.packages
    assert [each.driver.loaded for each in (driver, loaded) if each.driver] == [False, True]
    assert [service.started for service in driver.services] == [False] * len(loaded.services)
    toolkit = expected.wanted["container_toolkit"]
    assert (toolkit.devices, present.wanted["container_toolkit"].devices) == (False, True)
    assert toolkit.generated == present.wanted["container_toolkit"].generated


def test_present_gpus_decide_instead_of_expected_ones() -> None:
    """host_facts reports no expected GPUs then; a report with both would count the expected ones only."""
    assert [gpu.device for gpu in gpus_of(facts(gpu=EXPECTED))] == ["2330"]
    assert gpus_of(facts(gpu={"functions": []})) == ()


@pytest.mark.parametrize("wrong", [["{{ evil }}"], ["2330", "; reboot"], "2330", [1]])
def test_a_report_of_expected_gpus_has_a_form(wrong: Any) -> None:
    report = facts(gpu={"functions": [], "expected": ["2330"]})
    assert reports.machine_problem(report) == ""
    assert reports.machine_problem({**report, "gpu": {"functions": [], "expected": wrong}})


def test_a_bare_machine_can_be_prepared() -> None:
    assert membership("image-1", facts()) is None


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (NODE, "it is already a worker (10.0.0.1:6443)"),
        ({**NODE, "role": "control_plane", "server": None}, "it is already a control plane"),
        ({"role": None, "ca_hash": "sha256:0", "server": None}, "an interrupted join left files of a cluster on it"),
        ({"role": None, "ca_hash": None, "server": None, "unfinished": True}, "an interrupted join left"),
    ],
)
def test_a_node_cannot_be_prepared(own: dict[str, Any], words: str) -> None:
    found = membership("worker-1", facts(kubernetes=own))
    assert isinstance(found, Problem)
    assert found.found.startswith(words)
    assert "gpunodes reset worker-1" in found.remedy


def findings(prepares: bool, *reported: dict[str, Any]) -> set[str]:
    candidates = [MachineFacts(f"m-{number}", Role.WORKER, each) for number, each in enumerate(reported)]
    return {each.check for each in preflight.judge(candidates, requirements_of(None, "1.36", prepares=prepares))}


def test_name_size_and_identity_of_a_machine_that_becomes_an_image_do_not_matter() -> None:
    nginx = listener(10250, "nginx", "nginx.service")
    small = facts(hostname="localhost", cpus=0, memory_mib=100, sockets=[nginx], gpu={"functions": []})
    assert findings(False, small, small) >= {"hostname", "cpus", "memory", "ports", "machine_id"}
    assert findings(True, small, small) == set()


def test_what_the_installation_needs_is_checked() -> None:
    full = [{"path": "/var/lib", "device": 1, "mount": "/", "free_mib": 1}]
    assert findings(True, facts(arch="m68k", disks=full)) == {"arch", "disk"}
    assert findings(True, facts(kubernetes=NODE)) == {"cluster"}
    assert findings(True, facts(packages={"kubelet": "1.35.1-1.1"})) == {"version"}
