"""Drift of kubelets: which settings differ from those of the machines, in sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from gpunodes import settings
from gpunodes.model import Severity
from gpunodes.planner import drift, gates, kubelet_drift, kubelet_layers
from gpunodes.planner.drift import DriftDifference, MachineDrift
from gpunodes.planner.kubelet_layers import Kubelet

from tests.hostile import ATTACKS

PATCH = "kubeletconfiguration0+strategic"


def kubelet(
    name: str = "w-1",
    *,
    version: str = "v1.36.3",
    gpus: bool = False,
    control_plane: bool = False,
    groups: tuple[str, ...] = (),
    **given: Any,
) -> Kubelet:
    made = settings.resolve({f"gpunodes_{key}": value for key, value in given.items()})
    return Kubelet(name, f"node-{name}", version, gpus, made, control_plane, groups)


def texts_of(configuration: Mapping[str, Any]) -> dict[str, str]:
    """The fields as the module reports them."""
    return {name: json.dumps(value) for name, value in configuration.items()}


LIMIT = settings.resolve({})["gpunodes_pod_pids_limit"]


def report(*, cluster: Any = None, silent: Any = None, **nodes: Any) -> dict[str, Any]:
    """A report of nodes by name: their feature gates, with the limit of the settings."""
    named = {
        f"node-{name.replace('_', '-')}": texts_of({"featureGates": value, "podPidsLimit": LIMIT})
        for name, value in nodes.items()
    }
    return {
        "problem": "",
        "cluster": texts_of({"featureGates": cluster} if cluster else {}),
        "nodes": named,
        "silent": silent or {},
    }


def texts(running: dict[str, bool], cluster: Any = None, **more: Any) -> list[str]:
    """The differences of a kubelet with these gates."""
    found = kubelet_drift.compare(report(w_1=running, cluster=cluster), [kubelet(**more)])
    assert found.unknown == ""
    return [one.text for each in found.machines for one in each.differences]


def differing(running: dict[str, Any], cluster: Any = None, **more: Any) -> list[str]:
    """The differences of a kubelet with this configuration, in which the limit need not be."""
    shown = {"podPidsLimit": LIMIT, **running}
    made = {**report(), "cluster": texts_of(cluster or {}), "nodes": {"node-w-1": texts_of(shown)}}
    found = kubelet_drift.compare(made, [kubelet(**more)])
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
    patch = {PATCH: {"featureGates": {"AllBeta": True}}}
    assert texts({"AllBeta": True}) == said
    assert texts({"AllBeta": True}, {"AllBeta": True}) == []
    assert texts({"AllBeta": True}, control_plane=True, kubeadm_patches=patch) == []
    assert texts({"AllBeta": True}, kubeadm_patches=patch) == said, "kubeadm gets patches on control planes only"
    assert texts({"AllBeta": True}, control_plane=True, kubeadm_patches={"etcd0": patch[PATCH]}) == said


def test_the_cluster_and_patches_apply_at_the_next_upgrade() -> None:
    [said] = texts({}, {"AllAlpha": False})
    assert said.startswith(
        "kubelet feature gate AllAlpha is not set, the cluster's kubelet-config says false; the next"
    )
    patch = {PATCH: {"featureGates": {"AllAlpha": True}}}
    assert texts({"AllAlpha": False}, {"AllAlpha": False}, control_plane=True, kubeadm_patches=patch) == [
        "kubelet feature gate AllAlpha is false, the settings say true; the next `gpunodes upgrade` applies it"
    ]


@pytest.mark.parametrize(
    ("limit", "running", "cluster", "found"),
    [
        (100, 100, None, []),
        (100, -1, None, ["kubelet podPidsLimit is -1, the settings say 100"]),
        (100, None, None, ["kubelet podPidsLimit is not set, the settings say 100"]),
        (100, True, None, ["kubelet podPidsLimit is true, the settings say 100"]),
        (100, 7, 7, ["kubelet podPidsLimit is 7, the settings say 100"]),
        (-1, -1, None, []),
        (-1, 100, None, ["kubelet podPidsLimit is 100, neither the settings nor the cluster set it"]),
        (-1, [7], None, ["kubelet podPidsLimit is [7], neither the settings nor the cluster set it"]),
        (-1, 7, 7, []),
        (
            -1,
            -1,
            7,
            ["kubelet podPidsLimit is -1, the cluster's kubelet-config says 7; the next `gpunodes upgrade` ap"],
        ),
        ("{{ template }}", 7, None, []),
    ],
)
def test_the_limit_of_processes(limit: Any, running: Any, cluster: Any, found: list[str]) -> None:
    of_cluster = {} if cluster is None else {"podPidsLimit": cluster}
    made = differing({"podPidsLimit": running}, of_cluster, pod_pids_limit=limit)
    assert [each[: len(wanted)] for each, wanted in zip(made, found, strict=True)] == found


def test_what_a_cluster_was_created_with() -> None:
    """kubeadm writes all durations and structures, also those with their default."""
    cluster = {"serverTLSBootstrap": True, "cgroupDriver": "systemd", "podPidsLimit": None}
    assert differing({"serverTLSBootstrap": True, "cgroupDriver": "systemd"}, cluster) == []
    assert differing({"cgroupDriver": "cgroupfs"}, cluster) == [
        f"kubelet {name}, the cluster's kubelet-config says {value}; the next `gpunodes upgrade` applies it"
        for name, value in (
            ("cgroupDriver is cgroupfs", "systemd"),
            ("serverTLSBootstrap is not set", "true"),
        )
    ]
    assert differing({"serverTLSBootstrap": False}, {"cgroupDriver": ""}, serving_certificates=True) == [], (
        "the control plane's drift has that"
    )


SCALES: dict[str, Any] = {"pools": {"h100": {"max": 2}}, "groups": ("h100",)}
REGISTERED: dict[str, Any] = {
    "providerID": "gpunodes://node-w-1",
    "registerWithTaints": [{"key": "gpunodes.dev/starting", "effect": "NoSchedule"}],
}


def test_how_a_machine_of_a_pool_that_scales_registers() -> None:
    assert differing(REGISTERED, **SCALES) == []
    tainted = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    taints = [tainted, *REGISTERED["registerWithTaints"]]
    more = {**SCALES, "gpu_taint": True, "gpus": True}
    assert differing({**REGISTERED, "registerWithTaints": taints}, **more) == []
    [found] = differing(REGISTERED, **more)
    assert found.startswith("kubelet registerWithTaints is [")
    assert "the settings say [{" in found
    assert len(differing({}, **SCALES)) == 2
    assert len(differing(REGISTERED)) == 2, "its pool scales no longer"
    assert differing(REGISTERED, **{**SCALES, "pools": "{{ pools }}"}) == []
    assert differing(REGISTERED, **{**SCALES, "pools": {"h100": {}, "v100": {}}, "groups": ("h100", "v100")}) == []
    others = {"providerID": "aws:///i-1", "registerWithTaints": [{"key": "x", "effect": "NoSchedule"}]}
    assert differing(others) == []
    assert len(differing(REGISTERED, control_plane=True, **SCALES)) == 2, "control planes never scale"


PATCHED = "is not set, the settings say {}; the next `gpunodes upgrade` applies it"


@pytest.mark.parametrize(
    ("patches", "running", "found"),
    [
        ({PATCH: {"maxPods": 250}}, {"maxPods": 250}, []),
        ({PATCH: {"maxPods": 250}}, {}, [f"kubelet maxPods {PATCHED.format(250)}"]),
        ({PATCH: {"systemReserved": {"cpu": "1"}}}, {"systemReserved": {"cpu": "1", "memory": "1Gi"}}, []),
        ({PATCH: {"systemReserved": {"cpu": "1"}}}, {}, [f"kubelet systemReserved.cpu {PATCHED.format(1)}"]),
        ({PATCH: {"syncFrequency": "90s"}}, {"syncFrequency": "1m30s"}, []),
        ({PATCH: {"syncFrequency": "90s"}}, {"syncFrequency": "1m"}, ["kubelet syncFrequency is 1m, the settings say"]),
        ({PATCH: {"kind": "KubeletConfiguration", "apiVersion": "x"}}, {}, []),
        ({PATCH: {"maxPods": None, "systemReserved": {"$patch": "delete"}}}, {}, []),
        ({PATCH: {"maxPods": "{{ many }}"}}, {"maxPods": 1}, []),
        ({PATCH: {"maxPods": 9}, "kubeletconfiguration1": {"maxPods": 8}}, {"maxPods": 8}, []),
        ({"kubeletconfiguration+json": [{"op": "add", "path": "/maxPods", "value": 9}]}, {"maxPods": 9}, []),
        (
            {"kubeletconfiguration+json": [{"op": "replace", "path": "/maxPods", "value": 9}]},
            {},
            [f"kubelet maxPods {PATCHED.format(9)}"],
        ),
        ({"kubeletconfiguration+json": [{"op": "remove", "path": "/maxPods"}]}, {}, []),
        ({"kubeletconfiguration+json": [{"op": "add", "path": "/clusterDNS/-", "value": "10.0.0.1"}]}, {}, []),
        (
            {"kubeletconfiguration+json": [{"op": "add", "path": "/featureGates", "value": {"B": True}}]},
            {"featureGates": {"A": True, "B": True}},
            ["kubelet feature gate A is true, neither the settings nor the cluster set it"],
        ),
        ({"kubeletconfiguration+json": ["no", {"path": 1}, {"path": ""}], PATCH: "{{ x }}", 7: {}}, {}, []),
        ({"etcd+json": [{"op": "add", "path": "/maxPods", "value": 9}]}, {}, []),
    ],
)
def test_patches_of_the_kubelet_of_a_control_plane(patches: Any, running: Any, found: list[str]) -> None:
    made = differing(running, control_plane=True, kubeadm_patches=patches)
    assert [each[: len(wanted)] for each, wanted in zip(made, found, strict=True)] == found
    if running.keys() == {"maxPods"}:
        assert kubelet_layers.fields(settings.resolve({"gpunodes_kubeadm_patches": patches})) == {"maxPods"}


def test_fields_that_patches_name() -> None:
    patches = {PATCH: {"maxPods": 9, "featureGates": {"A": True}}, "kubelet": {"x": 1}}
    assert kubelet_layers.fields(settings.resolve({"gpunodes_kubeadm_patches": patches})) == {"maxPods", "featureGates"}
    assert kubelet_layers.fields(settings.resolve({"gpunodes_kubeadm_patches": "{{ all }}"})) == set()


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
        "the settings of 5 kubelets were not read: w-1, w-2, w-3 and 2 more (w-1: no complete answer within 4 s)"
    )
    found = kubelet_drift.compare(report(silent=silent), [kubelet("w-2")])
    assert found.unknown == "the settings of 1 kubelet were not read: w-2 (w-2: no complete answer within 4 s)"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (None, "they were not reported"),
        ([], "its answer is invalid: expected a mapping"),
        ({"problem": ""}, "its answer is invalid: cluster is missing"),
        ({**report(), "nodes": {"a": {"maxPods": 1}}}, "its answer is invalid: expected str in nodes"),
        ({**report(), "nodes": {"a": dict.fromkeys(map(str, range(101)), "1")}}, "its answer is invalid: expected a m"),
        ({**report(), "problem": "the API is away"}, "the API is away"),
        ({**report(), "cluster": {"featureGates": "["}}, "the ConfigMap kubelet-config is no JSON"),
        ({**report(), "cluster": {"featureGates": "[1]"}}, "the ConfigMap kubelet-config has no valid feature gates"),
        *(
            ({**report(), "nodes": {"a": {attack: "1"}}}, "its answer is invalid: expected field of")
            for attack in ATTACKS
        ),
        *(({**report(), "nodes": {attack: {}}}, "its answer is invalid: expected node's name") for attack in ATTACKS),
    ],
)
def test_a_report_that_cannot_be_used_is_said(wrong: Any, why: str) -> None:
    found = kubelet_drift.compare(wrong, [kubelet(feature_gates={"AllBeta": True})])
    assert found.machines == ()
    assert found.unknown.startswith(f"the settings of the kubelets are unknown: {why}")
    assert kubelet_drift.compare(wrong, []).unknown == "", "nobody needs them"


@pytest.mark.parametrize("depth", [50, 900, 949, 970, 5000])
@pytest.mark.parametrize("form", ["[{}]", '{{"a": {}}}'], ids=["list", "mapping"])
@pytest.mark.parametrize("name", ["podPidsLimit", "registerWithTaints", "featureGates", "providerID"])
def test_a_deep_answer_names_its_kubelet(name: str, form: str, depth: int) -> None:
    """json read it, and could not write it again deeper in the stack: every command ended with a bug of gpunodes."""
    before, after = form.format("|").split("|")
    text = before * depth + "1" + after * depth
    made = {**report(w_2={}), "nodes": {"node-w-1": {name: text}, **report(w_2={})["nodes"]}}
    found = kubelet_drift.compare(made, [kubelet("w-1"), kubelet("w-2")])
    assert found.machines == ()
    assert list(found.unread) == ["w-1"]
    assert found.unread["w-1"] in {"its answer is nested too deeply", "its answer is no JSON"}
    of_cluster = kubelet_drift.compare({**report(w_1={}), "cluster": {name: text}}, [kubelet("w-1")])
    assert of_cluster.unknown.startswith("the settings of the kubelets are unknown: the ConfigMap kubelet-config is n")


@pytest.mark.parametrize(
    "gates_text",
    [
        "",
        "[" * 9000,
        '["AllBeta"]',
        '{"AllBeta": "true"}',
        '{"AllBeta": 1}',
        json.dumps({"x" * 101: True}),
        json.dumps({f"Gate{number}": True for number in range(501)}),
        *(json.dumps({attack: True}) for attack in ATTACKS),
        *ATTACKS,
    ],
)
def test_an_answer_that_is_no_configuration_names_its_kubelet(gates_text: str) -> None:
    made = {**report(w_2={}), "nodes": {"node-w-1": {"featureGates": gates_text}, **report(w_2={})["nodes"]}}
    found = kubelet_drift.compare(made, [kubelet("w-1"), kubelet("w-2")])
    assert found.machines == ()
    assert found.unknown.startswith("the settings of 1 kubelet were not read: w-1 (w-1: its answer ")


@pytest.mark.parametrize("attack", [*ATTACKS, "y" * 5000, {"x" * 5000: 1}, [[["x"]]], None, 1e300])
def test_what_a_kubelet_may_answer_in_other_fields(attack: Any) -> None:
    running = {"maxPods": attack, "registerWithTaints": [attack], "podPidsLimit": attack, "providerID": attack}
    patches = {PATCH: {"maxPods": 9, "systemReserved": {"cpu": "1"}}}
    found = differing(
        {**running, "systemReserved": attack}, control_plane=True, pod_pids_limit=-1, kubeadm_patches=patches, **SCALES
    )
    assert len(found) >= 2
    assert max(map(len, found)) < 600


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
