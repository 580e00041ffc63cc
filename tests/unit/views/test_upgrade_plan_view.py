"""The plan of an upgrade, as people and programs see it."""

from __future__ import annotations

import json

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import PreflightFinding, Severity
from gpunodes.planner.upgrade_model import Component, Part, PassedOver, Step, UpgradePlan
from gpunodes.views import upgrade

STEPS = (
    Step("cp-1", Part.CONTROL_PLANE, "1.35.4", "1.36.3", drained=False),
    Step("worker-1", Part.NODE, "1.35.4", "1.36.3", drained=True),
)
FINDINGS = (
    PreflightFinding("worker-1", "skew", Problem("its kubelet is \x1b[2J", "1.33", "upgrade it")),
    PreflightFinding("cluster", "nodes", Problem("odd", "", ""), Severity.WARNING),
)
PLAN = UpgradePlan(
    "1.36", "1.36.3", "1.35.4", STEPS, (Component("etcd", "3.6.6-0", "3.6.8-0"),), FINDINGS, ("It does not return.",)
)


def test_a_plan_for_people() -> None:
    text = upgrade.table_of(PLAN, 100)
    assert "\x1b" not in text
    order = ["1.35.4 -> 1.36.3", "cp-1", "control plane", "worker-1", "drained", "etcd", "In the way:", "worker-1: its"]
    assert [text.index(each) for each in order[:3]] == sorted(text.index(each) for each in order[:3])
    assert all(each in text for each in [*order, "Warnings:", "What cannot be rolled back:", "It does not return."])


def test_nothing_to_do() -> None:
    text = upgrade.table_of(UpgradePlan("1.36", "1.36.3", "1.36.3", (), (), (), ()), 100)
    assert text == "Kubernetes 1.36.3 -> 1.36.3\n\nAll machines have this version."


def test_what_is_passed_over() -> None:
    left = [
        PassedOver("w-1", "1.35.4", "its node is not ready: \x1b[2J", holds_addons=True),
        PassedOver("w-2", "", "off on purpose", holds_addons=False),
    ]
    text = upgrade.table_of(UpgradePlan("1.36", "1.36.3", "1.36.3", (), (), (), (), left), 100)
    assert "\x1b" not in text
    assert "All other machines have this version." in text
    assert "  w-2 (of an unknown version): off on purpose" in text
    assert "The add-ons stay as they are, since w-1 is not ready" in text


def test_a_plan_for_programs() -> None:
    document = json.loads(upgrade.document_of(PLAN))
    assert document["schema"] == "gpunodes.upgrade-plan/1"
    assert not document["possible"]
    assert document["steps"][0] == {
        "machine": "cp-1",
        "part": "control_plane",
        "present": "1.35.4",
        "target": "1.36.3",
        "drained": False,
    }
    assert [(each["machine"], each["severity"]) for each in document["findings"]] == [
        ("worker-1", "error"),
        ("cluster", "warning"),
    ]
