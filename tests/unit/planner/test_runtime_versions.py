"""The versions of the container runtime and the container toolkit: new machines, nodes, and upgrades."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from gpunodes.ansible.filter import general
from gpunodes.ansible.module_utils.host.spec import Spec
from gpunodes.ansible.module_utils.packages import RequestedPackage, fits
from gpunodes.model import Role, Severity
from gpunodes.planner.candidates import MachineFacts, requirements_of
from gpunodes.planner.desired import Desired, desired
from gpunodes.planner.preflight import judge
from gpunodes.planner.runtime_upgrade import PlannedRuntime, ReplacedPackage, RuntimePlans, planned
from gpunodes.planner.runtime_versions import pattern
from gpunodes.settings import problems

from tests.hostile import ATTACKS, hostile
from tests.stand_ins import facts, filtered, given, gpu_machine

GPU = {"address": "0000:3b:00.0", "vendor": "10de", "device": "2330", "class": "030200", "driver": None}
NODE = {"role": "worker", "ca_hash": None, "server": None}
TOOLKIT = {"nvidia-container-toolkit": "1.19.0-1", "nvidia-container-toolkit-base": "1.19.0-1"}


def machine(containerd: str = "", *, node: bool = False, toolkit: bool = False) -> dict[str, Any]:
    made = gpu_machine(GPU, packages={"containerd": containerd or None})
    if node:
        made["kubernetes"] = NODE
    if toolkit:
        made["gpu"]["toolkit"] = TOOLKIT
    return made


def state(found: dict[str, Any], **more: Any) -> Desired:
    made = desired(given(found, **more))
    assert isinstance(made, Desired), made
    return made


def packages(part: Spec) -> list[tuple[str, str, bool]]:
    return [(package.name, package.version, package.replace) for package in part.packages]


@pytest.mark.parametrize(
    ("requested", "good", "bad"),
    [
        ("2.1", ["2.1.4-1", "2.1.0-0ubuntu3"], ["2.10.4-1", "2.2.0-1"]),
        ("2.1.4", ["2.1.4-1~debian.13~trixie", "2.1.4~ds1-6", "2.1.4+ds1-1"], ["2.1.40-1", "2.1.3-1"]),
        ("", ["1.7.24-1", "2.1.4-1"], []),
    ],
)
def test_the_pattern_of_a_version(requested: str, good: list[str], bad: list[str]) -> None:
    wanted = RequestedPackage("containerd", pattern(requested))
    assert all(fits(wanted, version) for version in good)
    assert not any(fits(wanted, version) for version in bad)


def test_a_new_machine_gets_the_requested_versions() -> None:
    made = state(machine(), gpunodes_containerd_version="2.1")
    assert packages(made.wanted["containerd"]) == [("containerd", "2.1.*", False)]
    assert packages(made.gpu.wanted["container_toolkit"])[0] == ("nvidia-container-toolkit", "1.20.*", False)
    assert packages(state(machine()).wanted["containerd"]) == [("containerd", "", False)]


def test_a_node_keeps_its_versions_and_gets_only_what_it_lacks() -> None:
    made = state(machine("1.7.24-1", node=True, toolkit=True), gpunodes_containerd_version="2.1")
    assert packages(made.wanted["containerd"]) == [("containerd", "", False)]
    toolkit = {name: version for name, version, _ in packages(made.gpu.wanted["container_toolkit"])}
    assert toolkit["nvidia-container-toolkit"] == toolkit["nvidia-container-toolkit-base"] == ""
    # Without GPU software, a node gets the requested version of that.
    first = state(machine("1.7.24-1", node=True)).gpu.wanted["container_toolkit"]
    assert {version for _, version, _ in packages(first)} == {"1.20.*"}


def test_an_upgrade_replaces_them() -> None:
    made = filtered(
        given(machine("1.7.24-1", node=True, toolkit=True), gpunodes_containerd_version="2.1", replaces_runtime=True)
    )
    wanted = general.runtime_wanted(made)
    assert list(wanted) == ["containerd", "container_toolkit"]
    found = [(each["name"], each["version"], each["replace"]) for each in wanted["containerd"]["packages"]]
    assert found == [("containerd", "2.1.*", True), ("runc", "", True)]
    assert {(each["version"], each["replace"]) for each in wanted["container_toolkit"]["packages"]} == {
        ("1.20.*", True)
    }
    # The kubelet's packages are no part of it.
    assert not any(each["replace"] for each in made["wanted"]["kubernetes"]["packages"])


def test_an_upgrade_of_docker_replaces_it_too() -> None:
    found = facts(kubernetes=NODE, packages={"docker-ce": "5:28.0-1", "containerd.io": "1.7.28-1"})
    made = filtered(given(found, gpunodes_runtime="docker", replaces_runtime=True, node={"runtime": "docker"}))
    wanted = general.runtime_wanted(made)
    assert list(wanted) == ["containerd", "docker", "cri_dockerd"]
    assert [each["name"] for each in wanted["containerd"]["packages"]] == ["containerd.io"]
    # Docker for people, on a node of containerd, is theirs.
    people = filtered(given(found, replaces_runtime=True, node={"runtime": "containerd"}))
    assert list(general.runtime_wanted(people)) == ["containerd"]


def _warnings(found: dict[str, Any], containerd: str = "") -> list[str]:
    candidate = MachineFacts("gpu-1", Role.WORKER, {**facts(), **found}, containerd=containerd)
    findings = judge([candidate], requirements_of(None, "1.36"))
    return [str(each) for each in findings if each.check == "runtime" and each.severity is Severity.WARNING]


def test_preflight_says_which_versions_a_node_keeps() -> None:
    found = machine("1.7.24~ds1-6", node=True, toolkit=True)
    [containerd, toolkit] = _warnings(found, "2.0.1")
    assert "it has containerd 1.7.24~ds1-6, and keeps it; wanted: 2.0.1; `gpunodes runtime upgrade gpu-1`" in containerd
    assert "it has nvidia-container-toolkit 1.19.0-1, and keeps it; wanted: 1.20; " in toolkit
    assert _warnings(machine("1.7.24~ds1-6", node=True), "1.7") == []
    assert _warnings(machine("1.7.24~ds1-6", node=True)) == []
    # A machine that is no node keeps nothing: there the installation itself judges what is installed.
    assert _warnings(machine("1.7.24~ds1-6"), "2.0.1") == []


@pytest.mark.parametrize("value", ["2", "2.1.4-1", "2.1.*", "latest", "2.1; reboot"])
def test_a_wrong_version_is_refused(value: str) -> None:
    assert list(problems({"gpunodes_containerd_version": value}))
    assert not [*problems({"gpunodes_containerd_version": "2.1"}), *problems({"gpunodes_containerd_version": "2.1.4"})]


PENDING: dict[str, Any] = {
    "packages": [{"name": "containerd", "old": "1.7.24-1", "new": "2.1.4-1"}, {"name": "x", "old": "", "new": "1"}],
    "changes": ["write /etc/containerd/config.toml"],
}


def test_what_an_upgrade_would_do() -> None:
    made = planned("gpu-1", PENDING)
    assert made.packages == [ReplacedPackage("containerd", "1.7.24-1", "2.1.4-1"), ReplacedPackage("x", "", "1")]
    assert made.needed == "containerd becomes 2.1.4-1, x becomes 1"
    assert planned("gpu-1", {**PENDING, "packages": []}).needed == "its configuration changes"
    assert planned("gpu-1", {"packages": [], "changes": []}).needed == ""
    assert RuntimePlans([made, planned("gpu-2", None, "no SSH")]).exit_code == 3
    assert dataclasses.replace(RuntimePlans([made]), interrupted=True).exit_code == 130


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_report_is_that_machines_failure(attack: str) -> None:
    row = {"name": "containerd", "old": "1", "new": attack}
    reports: list[Any] = [{**PENDING, "packages": [row]}, hostile(PENDING), [], attack, {}]
    for bad in reports:
        assert planned("gpu-1", bad).unreadable.startswith("its report is invalid")
    assert planned("gpu-1", None) == PlannedRuntime("gpu-1", unreadable="it did not report what is pending")
