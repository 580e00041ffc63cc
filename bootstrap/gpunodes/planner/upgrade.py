"""Judges and orders an upgrade of Kubernetes: facts and a requested version in, a plan out. Pure.

The rules are those of Kubernetes: one minor at a time, all control planes before any kubelet, and no kubelet newer than
its control plane.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import WrongInput
from gpunodes.model import PreflightFinding, Role, Severity
from gpunodes.planner import upgrade_checks, versions
from gpunodes.planner.upgrade_model import (
    CLUSTER,
    PROGRAMS,
    Component,
    Part,
    PassedOver,
    Step,
    Subject,
    UpgradePlan,
    image_parts,
)
from gpunodes.planner.versions import numbers


def plan(requested: str, subjects: Sequence[Subject], cluster: Mapping[str, Any]) -> UpgradePlan:
    """The upgrade of ``cluster`` (from cluster_info) to ``requested``, a minor or an exact version.

    Raises WrongInput for a version that gpunodes does not know, for a downgrade, and for a skipped minor.
    """
    wanted = versions.check(requested)
    present = str(cluster["version"]).removeprefix("v")
    # The API server that was asked may be older than others, after an upgrade that was not finished.
    newest = max(present, *(each.control_plane for each in subjects), key=numbers)
    check_order(wanted, newest)
    target, problem = resolve(wanted, subjects, newest)
    findings = [PreflightFinding(CLUSTER, "packages", problem)] if problem else []
    findings += upgrade_checks.judge(target or wanted, subjects, cluster)
    return UpgradePlan(
        requested=wanted,
        target=target,
        version=present,
        steps=_steps(target, subjects) if target else (),
        components=_components(target or wanted, subjects),
        findings=findings,
        irreversible=_irreversible(target or wanted, present, subjects),
        passed_over=_passed_over(target, subjects),
    )


def of_machines(plan: UpgradePlan, names: Collection[str]) -> UpgradePlan:
    """The same for some machines: what is in the way of others is a warning, unless it concerns the whole cluster."""
    concerned, everywhere = {CLUSTER, *names}, {upgrade_checks.REACHABLE, upgrade_checks.SKEW}
    return replace(
        plan,
        findings=[
            each if each.machine in concerned or each.check in everywhere else replace(each, severity=Severity.WARNING)
            for each in plan.findings
        ],
    )


def check_order(wanted: str, present: str) -> None:
    """Raise WrongInput for a downgrade and for a skipped minor."""
    before, after = numbers(present)[:2], numbers(wanted)[:2]
    exact = versions.is_exact(wanted)
    if after < before or (exact and numbers(wanted) < numbers(present)):
        raise WrongInput(
            f"the cluster runs Kubernetes {present}, and {wanted} is older",
            "a newer version: a control plane cannot be downgraded",
            "workers alone can return to an older kubelet: see `gpunodes help --page upgrades`",
        )
    allowed = versions.control_plane_skew()
    if after[1] > before[1] + allowed:
        following = f"{before[0]}.{before[1] + allowed}"
        raise WrongInput(
            f"the cluster runs Kubernetes {present}, and {wanted} skips a minor",
            f"the next minor, {following}: kubeadm upgrades by one at a time",
            f"upgrade to {following} first",
        )


def resolve(wanted: str, subjects: Sequence[Subject], present: str) -> tuple[str, Problem | None]:
    """The exact version, and why there is none: the newest that the control plane's package source offers.

    One that is older than ``present``, the newest that a control plane runs, is none.
    """
    if versions.is_exact(wanted):
        return wanted, None
    first = next((each for each in subjects if each.role is Role.CONTROL_PLANE and each.own), None)
    if first is None or first.own is None:
        return "", Problem(
            "no control plane reported the versions in its package source",
            "a control plane that responds",
            f"correct its finding, or name an exact version such as {wanted}.1",
        )
    offered = [each for each in first.own["offered"].get("kubeadm", ()) if versions.minor_of(each) == wanted]
    best = max(offered, key=numbers, default="")
    if best and numbers(best) < numbers(present):
        return "", Problem(
            f"the package source of {first.name} offers at most {best}, and the cluster runs {present}",
            f"{present} or newer: a control plane cannot be downgraded",
            f"add a newer version to that package source, or name {present}",
        )
    if best:
        return best, None
    reason = first.own["unread"] or "its index lists none"
    return "", Problem(
        f"the package source of {first.name} offers no version of Kubernetes {wanted}: {reason}",
        f"kubeadm {wanted}.*",
        "check gpunodes_kubernetes_packages_url, or name an exact version",
    )


def _steps(target: str, subjects: Sequence[Subject]) -> list[Step]:
    """All control planes, then all kubelets, those of the control planes first.

    What has the version is left out, and what is passed over.
    """
    control = [each for each in subjects if each.role is Role.CONTROL_PLANE]
    workers = [each for each in subjects if each.role is Role.WORKER]
    steps = [
        Step(each.name, Part.CONTROL_PLANE, each.control_plane, target, drained=False)
        for each in control
        if each.control_plane != target or (each.own or {}).get("unfinished")
    ]
    steps += [
        Step(each.name, Part.NODE, each.kubelet, target, drained=True)
        for each in (*control, *workers)
        if not each.left and (each.kubelet != target or (each.own or {}).get("unfinished"))
    ]
    return steps


def _passed_over(target: str, subjects: Sequence[Subject]) -> list[PassedOver]:
    """The machines that are left as they are; one that is ready and has the version needs nothing."""
    return [
        PassedOver(each.name, each.kubelet, each.left, holds_addons=each.is_down)
        for each in subjects
        if each.left and (each.is_down or each.kubelet != target or (each.own or {}).get("unfinished"))
    ]


def _components(target: str, subjects: Sequence[Subject]) -> list[Component]:
    """What kubeadm replaces, and the add-ons, which their roles bring to the versions of this gpunodes afterwards."""
    own = next((each.own for each in subjects if each.own and each.own.get("cluster")), None)
    if own is None:
        return []
    row = versions.minors()[versions.minor_of(target)]
    cluster = own["cluster"]
    found = [Component("etcd", own["images"]["etcd"], row["etcd"])] if "etcd" in own["images"] else []
    if cluster["coredns"]:
        found.append(Component("CoreDNS", image_parts(cluster["coredns"])[1], row["coredns"]))
    if cluster["proxy"]:
        found.append(Component("kube-proxy", image_parts(cluster["proxy"])[1], f"v{target}"))
    old = upgrade_checks.old_addons(target, cluster["addons"])
    return found + [Component(*image_parts(image), old.get(image, "")) for image in cluster["addons"]]


def _irreversible(target: str, present: str, subjects: Sequence[Subject]) -> list[str]:
    if versions.minor_of(target) == versions.minor_of(present):
        return []
    older = versions.minor_of(present)
    found = [f"The control plane does not return to {older}: a backup of etcd brings back objects, not versions."]
    row = versions.minors()[versions.minor_of(target)]
    tags = [str(each.own["images"].get("etcd", "")) for each in subjects if each.own]
    if any(tag and numbers(tag)[:2] < numbers(row["etcd"])[:2] for tag in tags):
        minor = ".".join(map(str, numbers(row["etcd"])[:2]))
        found.append(f"etcd converts its data to {minor}, which an older etcd does not read.")
    return found


def no_way_back(before: str, cluster: str) -> str:
    """Why a worker cannot return to the version ``before``, its kubelet's before its last upgrade; "" if it can."""
    if not before:
        return "no earlier version of its kubelet is known"
    allowed = versions.kubelet_skew()
    if not 0 <= numbers(cluster)[1] - numbers(before)[1] <= allowed:
        plain = cluster.removeprefix("v")
        return f"its kubelet was {before}, and {plain} accepts kubelets that are at most {allowed} minors older"
    return ""


def images(target: str, control_plane: bool) -> list[str]:
    """The images that a machine fetches before it is drained; those of a minor have ``{version}`` for an exact one."""
    row = versions.minors().get(versions.minor_of(target))
    exact = target if versions.is_exact(target) else "{version}"
    names = ["kube-proxy", *(PROGRAMS if control_plane else ())]
    found = [f"registry.k8s.io/{name}:v{exact}" for name in names]
    if row is None:
        return found
    if control_plane:
        found += [f"registry.k8s.io/etcd:{row['etcd']}", f"registry.k8s.io/coredns/coredns:{row['coredns']}"]
    return [*found, f"registry.k8s.io/pause:{row['pause']}"]
