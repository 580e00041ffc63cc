"""Drift of kubelets: which feature gates differ from the settings, in sentences."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes import settings
from gpunodes.model import Severity
from gpunodes.planner import drift, gates, kubelet_drift
from gpunodes.planner.drift import DriftDifference, MachineDrift
from gpunodes.planner.kubelet_drift import Kubelet

from tests.hostile import ATTACKS

PATCH = "kubeletconfiguration0+strategic"


def kubelet(name: str = "w-1", *, version: str = "v1.36.3", gpus: bool = False, **given: Any) -> Kubelet:
    made = settings.resolve({f"gpunodes_{key}": value for key, value in given.items()})
    return Kubelet(name, f"node-{name}", version, gpus, made)


def report(*, cluster: Any = None, silent: Any = None, **nodes: Any) -> dict[str, Any]:
    named = {f"node-{name.replace('_', '-')}": value for name, value in nodes.items()}
    return {"problem": "", "cluster": cluster or {}, "nodes": named, "silent": silent or {}}


def texts(running: dict[str, bool], cluster: Any = None, **more: Any) -> list[str]:
    found = kubelet_drift.compare(report(w_1=running, cluster=cluster), [kubelet(**more)])
    assert found.unknown == ""
    return [one.text for each in found.machines for one in each.differences]


def test_a_gate_of_the_settings_has_another_or_no_running_value() -> None:
    wanted = {"AllBeta": True}
    assert texts({"AllBeta": True}, feature_gates=wanted) == []
    assert texts({"AllBeta": False}, feature_gates=wanted) == [
        "kubelet feature gate AllBeta is false, the settings say true"
    ]
    assert texts({}, feature_gates=wanted) == ["kubelet feature gate AllBeta is not set, the settings say true"]
    assert texts({"AllBeta": False}, {"AllBeta": False}, feature_gates=wanted) == [
        "kubelet feature gate AllBeta is false, the settings say true"
    ]


def test_a_running_gate_that_nothing_sets() -> None:
    said = ["kubelet feature gate AllBeta is true, neither the settings nor the cluster set it"]
    assert texts({"AllBeta": True}) == said
    assert texts({"AllBeta": True}, {"AllAlpha": False}) == said
    assert texts({"AllBeta": True}, {"AllBeta": True}) == []
    assert texts({"AllBeta": True}, kubeadm_patches={PATCH: {"featureGates": {"AllBeta": True}}}) == []
    assert texts({"AllBeta": True}, kubeadm_patches={"etcd0": {"featureGates": {"AllBeta": True}}}) == said


@pytest.mark.parametrize(
    ("patches", "found"),
    [
        ({PATCH: {"featureGates": {"A": True, "B": False}}, "kubeletconfiguration+merge": {"maxPods": 9}}, {"A", "B"}),
        ({"kubeletconfiguration+json": [{"op": "add", "path": "/featureGates/A", "value": True}]}, {"A"}),
        ({"kubeletconfiguration+json": [{"op": "add", "path": "/featureGates", "value": {"B": True}}]}, {"B"}),
        ({"kubeletconfiguration+json": ["no", {"path": 1}], PATCH: {"featureGates": "{{ x }}"}, 7: {}}, set()),
        ({PATCH: "{{ template }}"}, set()),
    ],
)
def test_gates_of_patches(patches: Any, found: set[str]) -> None:
    assert kubelet_drift.patched(patches) == found


def test_templates_and_texts_are_passed_over() -> None:
    """The plan refuses a gate that is no boolean; only Ansible renders a template."""
    assert texts({"AllBeta": False}, feature_gates={"AllBeta": "{{ beta }}"}) == []
    assert texts({"AllBeta": False}, feature_gates="{{ all }}") == []
    assert texts({"AllBeta": False}, kubeadm_patches="{{ all }}") == []
    assert texts({"AllBeta": False}, feature_gates=None) != []


@pytest.mark.parametrize("gpus", [False, True])
def test_the_gates_of_gpunodes_itself_are_those_of_the_plan(gpus: bool) -> None:
    needed = gates.needed("1.9")
    assert needed
    assert gates.wanted("1.9", {"X": True}, gpus=gpus) == ({**needed, "X": True} if gpus else {"X": True})
    assert gates.wanted("1.99", {"X": True}, gpus=gpus) == {"X": True}
    assert bool(texts({}, version="v1.9.0", gpus=gpus)) == gpus
    assert texts(needed, version="v1.9.0", gpus=True) == []


def test_the_form_of_a_difference_and_a_roll_out_that_does_not_claim_it() -> None:
    [found] = kubelet_drift.compare(report(w_1={}), [kubelet(feature_gates={"AllBeta": True})]).machines
    assert found == MachineDrift(
        "w-1",
        [
            DriftDifference(
                component="kubelet",
                name="feature gate AllBeta",
                running=None,
                wanted="true",
                kind="kubelet",
                text="kubelet feature gate AllBeta is not set, the settings say true",
            )
        ],
    )
    assert (found.differs, found.pending) == (True, False)


def test_a_control_plane_and_its_kubelet_are_one_entry() -> None:
    own = DriftDifference("kube-apiserver", "--v", "2", "4", "settings", "kube-apiserver --v is 2, the settings say 4")
    controls = [MachineDrift("cp-1", [own]), MachineDrift("cp-2", unverified=True)]
    wanted = {"AllBeta": True}
    machines = [kubelet(name, feature_gates=wanted) for name in ("w-1", "cp-1")]
    kubelets = kubelet_drift.compare(report(w_1={}, cp_1={}), machines).machines
    found = kubelet_drift.merged(controls, kubelets)
    assert [(each.machine, [one.kind for one in each.differences], each.pending) for each in found] == [
        ("cp-1", ["settings", "kubelet"], True),
        ("cp-2", [], True),
        ("w-1", ["kubelet"], False),
    ]


def test_kubelets_that_are_not_in_the_report_are_not_compared() -> None:
    wanted = {"AllBeta": True}
    assert kubelet_drift.compare(report(), [kubelet(feature_gates=wanted)]) == kubelet_drift.KubeletDrift()
    assert kubelet_drift.compare(report(foreign={"AllBeta": True}), [kubelet()]) == kubelet_drift.KubeletDrift()


def test_kubelets_that_did_not_respond_are_counted() -> None:
    names = ["w-1", "w-2", "w-3", "w-4", "w-5"]
    silent = {f"node-{name}": "no complete answer within 4 s" for name in names}
    found = kubelet_drift.compare(report(silent=silent), [kubelet(name) for name in names])
    assert found.machines == ()
    assert found.unknown == (
        "5 kubelets did not report feature gates: w-1, w-2, w-3 and 2 more (w-1: no complete answer within 4 s)"
    )
    found = kubelet_drift.compare(report(silent=silent), [kubelet("w-2")])
    assert found.unknown == "1 kubelet did not report feature gates: w-2 (w-2: no complete answer within 4 s)"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (None, "they were not reported"),
        ([], "its answer is invalid: expected a mapping"),
        ({"problem": ""}, "its answer is invalid: cluster is missing"),
        (report(w_1={"AllBeta": "true"}), "its answer is invalid: expected bool in nodes"),
        (report(w_1={f"G{number}": True for number in range(501)}), "its answer is invalid: expected a mapping of at"),
        ({**report(), "problem": "the API is away"}, "the API is away"),
        *((report(w_1={attack: True}), "its answer is invalid: expected feature gate") for attack in ATTACKS),
        *(({**report(), "nodes": {attack: {}}}, "its answer is invalid: expected node's name") for attack in ATTACKS),
    ],
)
def test_a_report_that_cannot_be_used_is_said(wrong: Any, why: str) -> None:
    found = kubelet_drift.compare(wrong, [kubelet(feature_gates={"AllBeta": True})])
    assert found.machines == ()
    assert found.unknown.startswith(f"the feature gates of the kubelets are unknown: {why}")
    assert kubelet_drift.compare(wrong, []).unknown == "", "nobody needs them"


def test_preflight_warns_once_for_each_machine() -> None:
    wanted = dict.fromkeys(("A", "B", "C", "D", "E"), True)
    machines = [kubelet("w-1", feature_gates=wanted), kubelet("w-2")]
    silent = {"node-w-2": "x" * 5000}
    found = kubelet_drift.findings(kubelet_drift.compare(report(w_1={}, silent=silent), machines), "cp-1")
    assert [(each.machine, each.check, each.severity) for each in found] == [
        ("w-1", drift.CHECK, Severity.WARNING),
        ("cp-1", drift.CHECK, Severity.WARNING),
    ]
    assert str(found[0].problem) == (
        "settings of the kubelet differ from the running one: kubelet feature gate A is not set, the settings say "
        "true; kubelet feature gate B is not set, the settings say true; kubelet feature gate C is not set, the "
        "settings say true; and 2 more; `gpunodes up` applies them, `gpunodes status` lists all"
    )
    assert len(str(found[1].problem)) < 400
