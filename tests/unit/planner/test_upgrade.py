"""The plan of an upgrade: order, versions, and everything that must be in its way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes import settings
from gpunodes.errors import WrongInput
from gpunodes.model import Role, Severity
from gpunodes.planner import reports, tables, upgrade, upgrade_checks, versions
from gpunodes.planner.upgrade_model import Part, Subject, UpgradePlan, image_parts

from tests.hostile import ATTACKS

ROLES = Path(__file__).parents[3] / "roles"
OWN: dict[str, Any] = {
    "kubeadm": "1.35.4",
    "kubelet": "1.35.4",
    "images": {},
    "arguments": {},
    "gates": {},
    "kubelet_arguments": ["node-ip"],
    "kubelet_gates": {},
    "unpackaged": [],
    "lost": [],
    "not_compared": "",
    "unfinished": False,
    "offered": {name: ["1.36.3", "1.36.1"] for name in ("kubeadm", "kubectl", "kubelet")},
    "unread": "",
    "fetched": {"version": "1.36.3", "missing": [], "unasked": ""},
    "deprecated": [],
    "metrics_unread": "",
    "cluster": None,
}
CONTROL: dict[str, Any] = {
    **OWN,
    "images": {
        "kube-apiserver": "v1.35.4",
        "kube-controller-manager": "v1.35.4",
        "kube-scheduler": "v1.35.4",
        "etcd": "3.6.6-0",
    },
    "arguments": {"kube-apiserver": ["profiling"]},
    "gates": {"kube-apiserver": {}},
    "cluster": {
        "configured": "1.35.4",
        "gates": {},
        "coredns": "registry.k8s.io/coredns/coredns:v1.13.1",
        "proxy": "registry.k8s.io/kube-proxy:v1.35.4",
        "addons": ["ghcr.io/flannel-io/flannel:v0.26.7"],
    },
}


def subject(name: str, role: Role = Role.WORKER, version: str = "1.35.4", **own: Any) -> Subject:
    base = CONTROL if role is Role.CONTROL_PLANE else OWN
    return Subject(
        name,
        role,
        facts={"cgroup": 2, "packages": {"containerd": "2.2.9-1"}},
        own={**copy.deepcopy(base), "kubelet": version, **own},
        node={"name": name, "version": f"v{version}", "ready": True, "reason": ""},
    )


def planned(requested: str, *subjects: Subject, version: str = "1.35.4") -> UpgradePlan:
    nodes = [each.node for each in subjects if each.node]
    return upgrade.plan(requested, subjects, {"version": f"v{version}", "nodes": nodes})


def errors(plan: UpgradePlan) -> list[str]:
    return [f"{each.machine}: {each.problem}" for each in plan.findings if each.severity is Severity.ERROR]


CP1, CP2 = subject("cp-1", Role.CONTROL_PLANE), subject("cp-2", Role.CONTROL_PLANE, cluster=None)
WORKER = subject("worker-1")
PROXY = "registry.k8s.io/kube-proxy:v1.36.3"


def test_all_control_planes_come_before_any_kubelet() -> None:
    plan = planned("1.36", WORKER, CP1, CP2)
    assert errors(plan) == []
    assert plan.target == "1.36.3"
    assert [(step.machine, step.part, step.present, step.drained) for step in plan.steps] == [
        ("cp-1", Part.CONTROL_PLANE, "1.35.4", False),
        ("cp-2", Part.CONTROL_PLANE, "1.35.4", False),
        ("cp-1", Part.NODE, "1.35.4", True),
        ("cp-2", Part.NODE, "1.35.4", True),
        ("worker-1", Part.NODE, "1.35.4", True),
    ]
    assert {each.name: (each.present, each.target) for each in plan.components} == {
        "etcd": ("3.6.6-0", "3.6.8-0"),
        "CoreDNS": ("v1.13.1", "v1.14.2"),
        "kube-proxy": ("v1.35.4", "v1.36.3"),
        "flannel": ("v0.26.7", ""),
    }
    assert "backup of etcd" in plan.irreversible[0]


def test_an_interrupted_upgrade_goes_on_where_it_stopped() -> None:
    images = {**CONTROL["images"], **dict.fromkeys(("kube-apiserver", "kube-scheduler"), "v1.36.3")}
    half = subject("cp-1", Role.CONTROL_PLANE, images=images, unfinished=True)
    done = subject("worker-2", version="1.36.3")
    plan = planned("1.36.3", half, WORKER, done, version="1.36.3")
    assert [(step.machine, step.part) for step in plan.steps] == [
        ("cp-1", Part.CONTROL_PLANE),
        ("cp-1", Part.NODE),
        ("worker-1", Part.NODE),
    ]


def test_nothing_is_left_to_do_afterwards() -> None:
    images = {name: "v1.36.3" for name in CONTROL["images"] if name != "etcd"}
    plan = planned("1.36", subject("cp-1", Role.CONTROL_PLANE, "1.36.3", images=images), version="1.36.3")
    assert (plan.steps, errors(plan)) == ([], [])


@pytest.mark.parametrize(
    ("requested", "version", "words"),
    [
        ("1.37", "1.35.4", ["skips a minor", "1.36", "upgrade to 1.36 first"]),
        ("1.37.2", "1.35.4", ["skips a minor"]),
        ("1.35", "1.36.3", ["is older", "cannot be downgraded"]),
        ("1.36.1", "1.36.3", ["is older"]),
        ("1.99", "1.36.3", ["cannot install"]),
        ("latest", "1.36.3", ["not a Kubernetes version"]),
    ],
)
def test_impossible_versions_are_wrong_input(requested: str, version: str, words: list[str]) -> None:
    with pytest.raises(WrongInput) as error:
        planned(requested, CP1, version=version)
    assert all(word in str(error.value) for word in words)


def silent(name: str, version: str = "1.35.4", role: Role = Role.WORKER) -> Subject:
    """A machine that is off, with its node."""
    return replace(subject(name, role, version), facts=None, own=None, unreachable="it is off")


def not_ready(each: Subject) -> Subject:
    return replace(each, node={**each.node, "ready": False, "reason": "no disk"})


@pytest.mark.parametrize(
    ("machine", "why", "holds"),
    [
        (silent("worker-1"), "it is off", False),
        (not_ready(silent("worker-1")), "it is off", True),
        (replace(silent("worker-1"), node={}), "it is off", False),
        (replace(WORKER, own=None), "it did not report its versions", False),
        (not_ready(WORKER), "its node is not ready: no disk", True),
        (replace(WORKER, maintenance="new fans, by ann"), "it is in maintenance: new fans, by ann", False),
        (replace(silent("worker-1"), maintenance="new fans"), "it is in maintenance: new fans", False),
        (replace(subject("worker-1", unpackaged=["kubelet"]), maintenance="x"), "it is in maintenance: x", False),
        (not_ready(subject("worker-1", version="1.36.3")), "its node is not ready: no disk", True),
    ],
)
def test_a_worker_that_cannot_be_upgraded_now_is_passed_over_and_stops_no_other(
    machine: Subject, why: str, holds: bool
) -> None:
    plan = planned("1.36", CP1, machine, subject("worker-2"))
    assert errors(plan) == []
    assert [(each.machine, each.present, each.why) for each in plan.passed_over] == [
        ("worker-1", machine.kubelet, why),
    ]
    assert plan.holds_addons == (["worker-1"] if holds else [])
    assert [step.machine for step in plan.steps] == ["cp-1", "cp-1", "worker-2"]


def test_what_has_the_version_already_is_not_passed_over() -> None:
    done = [
        silent("worker-1", "1.36.3"),
        replace(subject("worker-2", version="1.36.3"), maintenance="new fans"),
    ]
    plan = planned("1.36", CP1, *done, not_ready(subject("worker-3", unfinished=True)))
    assert (errors(plan), plan.passed_over) == ([], [])
    assert plan.steps[-1].machine == "worker-3", "its interrupted upgrade is continued"


@pytest.mark.parametrize("broken", [silent("cp-2", role=Role.CONTROL_PLANE), not_ready(CP2)])
def test_a_control_plane_is_never_passed_over(broken: Subject) -> None:
    found = errors(planned("1.36", CP1, broken, WORKER))
    assert len(found) == 1
    assert found[0].startswith("cp-2: ")


@pytest.mark.parametrize("names", [["kube-apiserver", "kube-controller-manager", "kube-scheduler"], ["kube-scheduler"]])
def test_each_control_plane_is_upgraded_by_one_minor(names: list[str]) -> None:
    """An upgrade that was abandoned left one behind: the API server that was asked does not show that."""
    images = {**dict.fromkeys(CONTROL["images"], "v1.36.3"), "etcd": "3.6.16-0"}
    behind = to_37("cp-2", "3.6.16-0", cluster=None)
    behind = replace(behind, own={**(behind.own or {}), "images": {**images, **dict.fromkeys(names, "v1.35.4")}})
    plan = planned("1.37", to_37("cp-1", "3.6.16-0"), behind, version="1.36.3")
    [error] = errors(plan)
    assert "cp-2: its control plane is 1.35.4" in error
    assert "`gpunodes upgrade 1.36`" in error
    assert not upgrade.of_machines(plan, ["cp-1"]).possible, "it concerns the whole cluster"
    remedy = planned("1.36", subject("cp-1", Role.CONTROL_PLANE, "1.36.3", images=images), CP2, version="1.36.3")
    assert (errors(remedy), {step.machine for step in remedy.steps}) == ([], {"cp-2"})


@pytest.mark.parametrize(
    "machine",
    [
        silent("worker-1", "1.32.9"),
        not_ready(subject("worker-1", version="1.32.9")),
        replace(subject("worker-1", version="1.32.9"), maintenance="new fans"),
    ],
)
def test_no_kubelet_that_is_too_old_is_left(machine: Subject) -> None:
    [error] = errors(planned("1.36", CP1, machine, subject("worker-2")))
    assert "worker-1: its kubelet is 1.32.9" in error
    assert "gpunodes remove" in error


def test_a_node_outside_of_the_inventory_has_no_kubelet_that_is_too_old() -> None:
    node = {"name": "other", "version": "v1.32.9"}
    plan = upgrade.plan("1.36", [CP1], {"version": "v1.35.4", "nodes": [CP1.node, node]})
    assert [each.partition(";")[0] for each in errors(plan)] == ["other: its kubelet is 1.32.9"]


def test_machines_that_are_not_upgraded_stop_no_other() -> None:
    """Those outside of --only: what is wrong with them is a warning, unless it concerns the whole cluster."""
    broken, old = subject("worker-1", unpackaged=["kubelet"]), subject("worker-3", version="1.32.9")
    plan = planned("1.36", CP1, broken, subject("worker-2"))
    narrow = upgrade.of_machines(plan, ["cp-1", "worker-2"])
    assert (plan.possible, narrow.possible) == (False, True)
    assert [(each.machine, each.severity) for each in narrow.findings] == [("worker-1", Severity.WARNING)]
    assert not upgrade.of_machines(plan, ["worker-1"]).possible
    assert not upgrade.of_machines(planned("1.36", CP1, WORKER, old), ["cp-1", "worker-1"]).possible
    lost = planned("1.36", CP1, silent("cp-2", role=Role.CONTROL_PLANE), WORKER)
    assert not upgrade.of_machines(lost, ["worker-1"]).possible, "the version of its API server is not known"


def with_cluster(**changed: Any) -> dict[str, Any]:
    return {"cluster": {**CONTROL["cluster"], **changed}}


@pytest.mark.parametrize(
    ("target", "machine", "words"),
    [
        ("1.36", replace(WORKER, node={}), ["is not a node", "gpunodes join worker-1"]),
        ("1.36", subject("worker-1", unpackaged=["kubelet"]), ["no package installed its kubelet", "/usr/bin"]),
        ("1.36", subject("worker-1", version="1.32.9"), ["its kubelet is 1.32.9", "1.33 or newer"]),
        ("1.36", subject("worker-1", version="1.37.0"), ["a kubelet is never newer"]),
        ("1.36", replace(WORKER, facts={"cgroup": 1, "packages": {}}), ["cgroup v1"]),
        ("1.36", replace(WORKER, gates={"CSIMigrationPortworx": True}), ["removed", "gpunodes_feature_gates"]),
        ("1.36", subject("worker-1", kubelet_gates={"CSIMigrationPortworx": True}), ["removed", "kubelet-config"]),
        ("1.36", subject("worker-1", offered={}, unread="timed out"), ["cannot be read: timed out"]),
        ("1.36.9", WORKER, ["has no kubeadm 1.36.9", "1.36.3, 1.36.1"]),
        (
            "1.36",
            subject("worker-1", fetched={"version": "1.36.3", "missing": [PROXY], "unasked": ""}),
            [f"no registry has {PROXY}", "gpunodes_image_mirrors"],
        ),
    ],
)
def test_what_is_in_the_way_of_a_machine(target: str, machine: Subject, words: list[str]) -> None:
    found = errors(planned(target, CP1, machine))
    assert any(all(word in each for word in words) for each in found), found


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            {"gates": {"kube-scheduler": {"CSIMigrationPortworx": True}}},
            ["the scheduler: ", "removed in Kubernetes 1.36"],
        ),
        (with_cluster(gates={"CSIMigrationPortworx": True}), ["removed in Kubernetes 1.36", "kubeadm-config"]),
        ({"deprecated": [{"api": "a/v1 b", "removed": "1.36"}]}, ["uses the API a/v1 b"]),
        (with_cluster(coredns="x/coredns:v1.15.0"), ["CoreDNS is v1.15.0"]),
        (
            {"lost": [{"component": "kube-apiserver", "name": "--oidc-issuer-url"}]},
            ["would change kube-apiserver --oidc-issuer-url", "kubeadm-config", "gpunodes_kubeadm_patches"],
        ),
    ],
)
def test_what_is_in_the_way_of_a_control_plane(own: Mapping[str, Any], words: list[str]) -> None:
    found = errors(planned("1.36", subject("cp-1", Role.CONTROL_PLANE, **own)))
    assert any(all(word in each for word in words) for each in found), found


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            {"lost": [{"component": "etcd", "name": f"spec.volumes[{number}]"} for number in range(7)]},
            "spec.volumes[3], etcd spec.volumes[4] and 2 more",
        ),
        ({"not_compared": "no kubectl"}, "what the upgrade changes in its manifests is unknown: no kubectl"),
    ],
)
def test_what_others_wrote_beside_arguments_is_a_warning(own: Mapping[str, Any], words: str) -> None:
    plan = planned("1.36", subject("cp-1", Role.CONTROL_PLANE, **own))
    assert errors(plan) == []
    assert [(each.machine, each.check, each.severity) for each in plan.findings] == [
        ("cp-1", "manifests", Severity.WARNING)
    ]
    assert words in plan.findings[0].problem.found


def test_what_is_not_yet_removed_is_not_in_the_way() -> None:
    own: dict[str, Any] = {"deprecated": [{"api": "a/v1 b", "removed": "1.37"}]}
    gate = {"kube-apiserver": {"MemoryQoS": True}}
    arguments: dict[str, Any] = {"kubelet_arguments": ["containerd", "pod-infra-container-image"]}
    assert errors(planned("1.36", subject("cp-1", Role.CONTROL_PLANE, **own, **arguments, gates=gate))) == []


def test_each_api_server_says_which_apis_it_was_asked_for() -> None:
    """A program may use one of them alone; what several report is one finding."""
    used = [{"api": "a/v1 b", "removed": "1.36"}]
    others = [subject(f"cp-{i}", Role.CONTROL_PLANE, cluster=None, deprecated=used) for i in (2, 3)]
    plan = planned("1.36", CP1, *others)
    assert [each for each in errors(plan) if "a/v1 b" in each] == errors(plan)
    assert len(errors(plan)) == 1
    plan = planned("1.36", CP1, subject("cp-2", Role.CONTROL_PLANE, cluster=None, metrics_unread="refused"))
    assert errors(plan) == []
    assert [(each.machine, each.check) for each in plan.findings] == [("cp-2", "deprecated")]
    assert "refused" in plan.findings[0].problem.found


def to_37(name: str, etcd: str, **own: Any) -> Subject:
    images = dict.fromkeys(CONTROL["images"], "v1.36.3") | {"etcd": etcd}
    offered = {each: ["1.37.2"] for each in ("kubeadm", "kubelet")}
    return subject(name, Role.CONTROL_PLANE, "1.36.3", images=images, offered=offered, **own)


@pytest.mark.parametrize(
    ("members", "refused"),
    [(["3.6.8-0"], False), (["3.6.16-0", "3.6.8-0"], True), (["3.6.11-0", "3.6.16-0"], False)],
)
def test_old_etcd_members_do_not_meet_new_ones(members: list[str], refused: bool) -> None:
    found = errors(planned("1.37", *(to_37(f"cp-{i}", tag) for i, tag in enumerate(members)), version="1.36.3"))
    assert any("etcd.local.imageTag: 3.6.16-0" in each for each in found) is refused
    assert refused or found == []


def test_an_argument_that_kubeadm_does_not_remove_is_in_the_way() -> None:
    arguments = ["containerd", "pod-infra-container-image"]
    found = errors(planned("1.37", to_37("cp-1", "3.6.8-0", kubelet_arguments=arguments), version="1.36.3"))
    assert len(found) == 1
    assert "--containerd, which Kubernetes 1.37 removes" in found[0]


@pytest.mark.parametrize(
    ("packages", "refused"),
    [
        ({"containerd": "1.7.24~ds1-6+b4"}, True),
        ({"containerd.io": "1.7.29-1~debian.13~trixie"}, True),
        ({"containerd.io": "2.0.7-1"}, False),
        ({"containerd.io": "2:2.1.4-1"}, False),
        ({}, False),
    ],
)
def test_an_old_runtime_is_in_the_way_of_the_minor_that_needs_a_newer_one(
    packages: dict[str, str], refused: bool
) -> None:
    """That minor cannot be installed yet: the row of the table is judged alone."""
    [row] = tables.read("upgrades")["runtime"]
    machine = replace(WORKER, facts={"cgroup": 2, "packages": packages})
    assert bool(list(upgrade_checks._runtime(f"{row['from']}.0", machine, {}))) is refused
    assert list(upgrade_checks._runtime("1.37.2", machine, {})) == []


def test_a_minor_that_no_source_offers_has_no_steps() -> None:
    plan = planned("1.36", subject("cp-1", Role.CONTROL_PLANE, offered={}, unread="it responds 404"))
    assert (plan.target, plan.steps) == ("", ())
    assert "offers no version of Kubernetes 1.36: it responds 404" in errors(plan)[0]


@pytest.mark.parametrize("asked", ["1.36.3", "1.36.4"])
def test_a_minor_is_no_older_patch_than_a_control_plane_runs(asked: str) -> None:
    """A mirror may lag: kubeadm would be downgraded before the machine refuses."""
    new, old = (
        subject(name, Role.CONTROL_PLANE, version, images=dict.fromkeys(CONTROL["images"], f"v{version}"))
        for name, version in (("cp-2", "1.36.4"), ("cp-1", asked))
    )
    plan = planned("1.36", old, new, version=asked)
    assert (plan.target, plan.steps) == ("", ())
    [error] = [each for each in errors(plan) if each.startswith("cluster: ")]
    assert "the package source of cp-1 offers at most 1.36.3" in error
    assert "1.36.4 or newer" in error
    assert not upgrade.of_machines(plan, ["cp-1"]).possible
    with pytest.raises(WrongInput, match=r"1\.36\.4, and 1\.36\.3 is older"):
        planned("1.36.3", old, new, version=asked)


def test_a_node_outside_the_inventory_is_a_warning() -> None:
    node = {"name": "other", "version": "v1.35.4"}
    plan = upgrade.plan("1.36", [CP1], {"version": "v1.35.4", "nodes": [CP1.node, node]})
    assert plan.possible
    assert [(each.severity, "other" in each.problem.found) for each in plan.findings] == [(Severity.WARNING, True)]


def test_a_registry_that_does_not_say_is_a_warning() -> None:
    """The roll-out fetches the images before it drains a node: that decides."""
    unasked = {"version": "1.36.3", "missing": [], "unasked": "https://mirror.example: timed out"}
    plan = planned("1.36", CP1, subject("worker-1", fetched=unasked))
    assert plan.possible
    [finding] = plan.findings
    assert (finding.machine, finding.severity) == ("worker-1", Severity.WARNING)
    assert "the images of 1.36.3 is unknown: https://mirror.example: timed out" in finding.problem.found


PLUGIN = "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"
DRA = "registry.k8s.io/dra-driver-nvidia/dra-driver-nvidia-gpu:v0.4.0"


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("ghcr.io/flannel-io/flannel:v0.25.7", "flannel is v0.25.7"),
        (f"mirror.example:5000/{PLUGIN}@sha256:{'a' * 64}", "k8s-device-plugin is v0.17.1"),
        (DRA, "dra-driver-nvidia-gpu is v0.4.0"),
        ("ghcr.io/flannel-io/flannel:v0.28.10", ""),
        (f"nvcr.io/nvidia/k8s-device-plugin@sha256:{'a' * 64}", ""),
        ("site.example/flannel-like:v0.1.0", ""),
    ],
)
def test_an_old_add_on_is_a_warning_before_anything(image: str, words: str) -> None:
    controls = (subject(name, Role.CONTROL_PLANE, **with_cluster(addons=[image])) for name in ("cp-1", "cp-2"))
    plan = planned("1.36", *controls)
    assert plan.possible
    assert [(each.machine, each.check, each.severity, each.problem.found) for each in plan.findings] == (
        [("cluster", "add-ons", Severity.WARNING, words)] if words else []
    )
    [shown] = [each for each in plan.components if each.name not in {"etcd", "CoreDNS", "kube-proxy"}]
    assert bool(shown.target) is bool(words), "an older one gets a version that the minor is known to work with"
    for finding in plan.findings:
        assert "with Kubernetes 1.36" in finding.problem.wanted
        assert "`gpunodes addon upgrade`" in finding.problem.remedy


def test_add_ons_of_an_untested_minor_are_not_said_to_have_run() -> None:
    own = with_cluster(addons=[PLUGIN])
    [finding] = planned("1.37", to_37("cp-1", "3.6.8-0", **own), version="1.36.3").findings
    assert "none was run on machines" in finding.problem.wanted


def test_the_add_ons_of_this_gpunodes_fit_every_minor() -> None:
    """Else the remedy, `gpunodes addon upgrade`, would not help."""
    given = settings.resolve({})
    wired = yaml.safe_load((ROLES / "settings/vars/main.yml").read_text())
    own = [
        wired["settings_network_images"]["flannel"]["daemon"],
        *(given[f"gpunodes_{name}_image"] for name in ("device_plugin", "dra_driver")),
    ]
    rows = tables.read("upgrades")["addons"]
    assert [row["minor"] for row in rows] == list(versions.minors())
    for row in rows:
        assert {name for name, _ in map(image_parts, own)} == set(row) - {"minor"}
        assert upgrade_checks.old_addons(f"{row['minor']}.1", own) == {}


def test_images_of_another_version_say_nothing() -> None:
    """A source that offers another patch than the control plane's is its own finding."""
    other = {"version": "1.36.1", "missing": [PROXY], "unasked": ""}
    assert errors(planned("1.36.3", CP1, subject("worker-1", fetched=other))) == []


def test_images_of_a_machine() -> None:
    assert upgrade.images("1.36.3", control_plane=False) == [
        "registry.k8s.io/kube-proxy:v1.36.3",
        "registry.k8s.io/pause:3.10.2",
    ]
    assert "registry.k8s.io/etcd:3.6.8-0" in upgrade.images("1.36.3", control_plane=True)
    assert upgrade.images("1.36", control_plane=False)[0] == "registry.k8s.io/kube-proxy:v{version}"


CHANGES: list[Callable[[dict[str, Any], Any], None]] = [
    lambda own, odd: own.update(kubelet=odd),
    lambda own, odd: own["images"].update(etcd=odd),
    lambda own, odd: own.update(kubelet_arguments=[odd]),
    lambda own, odd: own["gates"].update({"kube-apiserver": {odd: True}}),
    lambda own, odd: own["offered"].update(kubeadm=[odd]),
    lambda own, odd: own["fetched"].update(missing=[odd]),
    lambda own, odd: own["fetched"].update(version=odd),
    lambda own, odd: own["cluster"].update(coredns=odd),
    lambda own, odd: own.update(deprecated=[{"api": odd, "removed": "1.37"}]),
]


@pytest.mark.parametrize("change", CHANGES)
def test_odd_reports_are_refused(change: Callable[[dict[str, Any], Any], None]) -> None:
    assert reports.upgrade_problem(CONTROL) == reports.upgrade_problem(OWN) == ""
    for odd in (*ATTACKS, "$(reboot)", "{{ 1 }}", "a\nb", 7):
        own = copy.deepcopy(CONTROL)
        change(own, odd)
        assert reports.upgrade_problem(own), odd
