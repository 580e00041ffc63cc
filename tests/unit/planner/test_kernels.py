"""Which kernels a machine may get, and the plan of an upgrade of its operating system."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpunodes.planner import kernels, reports
from gpunodes.planner.os_upgrade import OsPlans, planned
from gpunodes.views import os_plan

from tests.unit.planner.test_gpu_plan import machine

RELEASE = "6.1.0-56-cloud-amd64"
DRIVER = {"module": "535.261.03", "loaded": True, "origin": "distribution", "packages": {}, "flavour": "open"}


def facts(card: str = "A100", **driver: Any) -> dict[str, Any]:
    return machine(card, system="debian 12", driver={**DRIVER, **driver})


def package(name: str, old: str = "1", *, security: bool = False, meta: bool = False) -> dict[str, Any]:
    return {"name": name, "old": old, "new": "2", "security": security, "kernel_meta": meta}


PENDING: dict[str, Any] = {
    "packages": [
        package("bash"),
        package("libssl3", security=True),
        package("kubelet", security=True),
        package("libnvidia-ml1"),
        package("linux-image-cloud-amd64", security=True, meta=True),
        package(f"linux-image-{RELEASE}", "", security=True),
        package(f"linux-headers-{RELEASE}", "", security=True),
    ],
    "kernels": [RELEASE],
    "kept_back": ["containerd.io", "theirs"],
    "held": [],
    "reboot": [],
}


def test_a_kernel_for_which_the_driver_does_not_build_is_refused_with_its_source() -> None:
    found = kernels.refused(facts(), [RELEASE, "6.1.0-40-cloud-amd64"])
    assert list(found) == [RELEASE]
    assert found[RELEASE].startswith("the open modules of driver 535.261.03 do not build for it: pci_resize_resource()")
    assert "github.com/NVIDIA" in found[RELEASE]


@pytest.mark.parametrize(
    "found",
    [
        facts(flavour="proprietary"),
        facts(module="580.126.09", origin="nvidia-repository"),
        facts(module=None, origin=None),
        machine(system="debian 12"),
        {"os": {"id": "debian", "version": "12"}, "gpu": {"functions": []}},
    ],
)
def test_other_machines_get_it(found: dict[str, Any]) -> None:
    assert kernels.refused(found, [RELEASE]) == {}


def test_the_running_kernel_does_not_excuse_the_next_one() -> None:
    """The driver was built for the running kernel: that says nothing about another one."""
    assert kernels.refused({**facts(), "kernel": RELEASE}, [RELEASE])


def test_machines_whose_kernels_need_a_driver() -> None:
    assert kernels.has_built_driver(facts())
    assert not kernels.has_built_driver(facts(module=None))
    assert not kernels.has_built_driver({"os": {}, "gpu": {"functions": []}})


def test_a_plan_leaves_out_what_gpunodes_installed() -> None:
    made = planned("a", machine("A100", system="debian 13"), PENDING, security=False)
    names = [each.name for each in made.packages]
    assert names == ["bash", "libssl3", "linux-image-cloud-amd64", f"linux-image-{RELEASE}", f"linux-headers-{RELEASE}"]
    assert (made.kernels, made.reboot_due, made.kept_back) == ([RELEASE], True, ["theirs"])
    only = planned("a", machine(), PENDING, security=True)
    assert "bash" not in {each.name for each in only.packages}


def test_a_refused_kernel_is_left_out_of_a_plan_with_all_that_brings_it() -> None:
    made = planned("a", facts(), PENDING, security=False)
    assert [each.name for each in made.packages] == ["bash", "libssl3"]
    assert (made.kernels, list(made.refused), made.reboot_due) == ([], [RELEASE], False)
    text = os_plan.plan(OsPlans(False, [made]), 100)
    assert f"held       the kernel {RELEASE}: the open modules of driver 535.261.03 do not build" in text
    assert "reboot     not due" in text


def test_a_refused_kernel_is_held_once() -> None:
    before = planned("a", facts(), PENDING, security=False)
    assert before.needed(reboot=True) == f"2 packages, a hold of the kernel {RELEASE}"
    only = {**PENDING, "packages": PENDING["packages"][4:], "held": ["linux-image-cloud-amd64"]}
    after = planned("a", facts(), only, security=False)
    assert (list(after.refused), after.held, after.needed(reboot=True)) == ([RELEASE], True, "")


def test_a_refused_kernel_that_is_split_is_held_by_what_is_installed() -> None:
    """The first kernel of Debian's backports with parts brings a package for each of them, which nothing can hold."""
    parts = [package(f"linux-{part}-cloud-amd64", "", meta=True) for part in ("base", "modules")]
    only = {**PENDING, "packages": [*PENDING["packages"][4:], *parts], "held": ["linux-image-cloud-amd64"]}
    after = planned("a", facts(), only, security=False)
    assert (list(after.refused), after.held, after.needed(reboot=True)) == ([RELEASE], True, "")
    assert after.packages == []


@pytest.mark.parametrize(
    "changed",
    [
        {"packages": [package("{{ x }}")]},
        {"packages": [{**package("a"), "new": "1\x1b[2J"}]},
        {"kernels": ["$(x)"]},
        {"kept_back": ["a b"]},
        {"held": ["{{ x }}"]},
        {"packages": None},
        {"reboot": 5},
        {"more": 1},
    ],
)
def test_a_report_of_another_form_is_the_failure_of_its_machine(changed: dict[str, Any]) -> None:
    assert reports.pending_problem(PENDING) == ""
    report = {**PENDING, **changed}
    if changed == {"more": 1}:
        assert planned("a", machine(), report, security=False).packages is not None
        return
    made = planned("a", machine(), report, security=False)
    assert made.unreadable.startswith("its report is invalid: ")
    assert OsPlans(False, [made]).exit_code == 1


def test_documents() -> None:
    silent = planned("b", None, None, security=False, why="it does not respond")
    found = OsPlans(True, [planned("a", facts(), PENDING, security=True), silent])
    document = json.loads(os_plan.plan_document(found))
    assert (document["schema"], document["exit_code"], document["security"]) == ("gpunodes.os-plan/1", 3, True)
    assert document["machines"][0]["packages"][0]["name"] == "libssl3"
    assert document["machines"][1]["unreadable"] == "it does not respond"
    assert "b: NOT READ: it does not respond" in os_plan.plan(found)
