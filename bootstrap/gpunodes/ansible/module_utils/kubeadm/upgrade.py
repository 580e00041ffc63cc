"""kubeadm upgrade: the control plane and the kubelet's configuration of this machine, to one exact version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .. import disk, facts, kube_api, ledger, tree
from ..problem import MachineProblem
from ..report import Difference, Report
from . import command, versions

BACKUPS = "/etc/kubernetes/tmp"
"""Where kubeadm moves what it replaces: manifests, the kubelet's configuration, a copy of etcd's data."""
_API_LIMIT_S = 300
"""Seconds for an API server that an interrupted upgrade has just replaced."""


def upgrade(
    target: str,
    patches: Mapping[str, Mapping[str, Any]],
    timeouts: Mapping[str, str],
    limit_s: float,
    check: bool,
) -> Report:
    """Bring the control plane, or the kubelet's configuration of a worker, to ``target``, an exact version.

    What is done follows from the machine and its cluster. The ledger has only whether a run of kubeadm has ended, since
    its last steps leave no trace; kubeadm repeats those that were done.

    The machine may be a node that others made by kubeadm. Raises MachineProblem, before anything is changed, for one
    that is no node, for a downgrade, for a control plane that would skip a minor, and for another kubeadm than that of
    ``target``.
    """
    machine_ledger = ledger.load()
    role = facts.kubernetes()["role"]
    if role is None:
        raise MachineProblem("this machine is not a node", "a node of the cluster", "join it, or leave it out")
    report = Report()
    if machine_ledger.upgrade:
        _restore_manifests(report, check)
    cluster = versions.configured(kube_api.admin(_API_LIMIT_S)) if role == "control_plane" else ""
    running, kubelet = versions.images(), versions.program("kubelet")
    present = running.get("kube-apiserver", "").removeprefix("v") if role == "control_plane" else kubelet
    _check_order(present, cluster, target)
    _check_minor(running, target)
    if not machine_ledger.upgrade and versions.complete(role, target, kubelet, running, cluster):
        return report
    # Only the first control plane finds a cluster of the old version: kubeadm writes the new one near the end.
    applies = role == "control_plane" and (cluster != target or machine_ledger.upgrade == "apply")
    verb = "apply" if applies else "node"
    document = _document(target, timeouts, patched=role == "control_plane")
    report.add(
        f"kubeadm upgrade {verb}",
        Difference("kubeadm upgrade", {"version": present or "unknown"}, {"version": target}),
        Difference(f"configuration of kubeadm upgrade {verb}", {}, {"document": document, "patches": patches}),
    )
    if check:
        return report
    _check_kubeadm(target)
    machine_ledger.upgrade = verb
    if kubelet != target:
        machine_ledger.kubelet_before = kubelet
    machine_ledger.save()
    flags = ("--yes",) if verb == "apply" else ()
    command.run(f"upgrade {verb}", [document], limit_s, flags, patches, finishes=True)
    # kubeadm writes it anew, readable by everyone.
    os.chmod(command.KUBELET_CONFIG, 0o600)
    machine_ledger.upgrade = ""
    machine_ledger.save()
    _remove_old_backups()
    return report


def _check_order(present: str, cluster: str, target: str) -> None:
    newer = max(filter(None, (present, cluster)), key=versions.numbers, default="")
    if newer and versions.numbers(newer) > versions.numbers(target):
        raise MachineProblem(
            f"it runs Kubernetes {newer}", f"{target} or older: a downgrade is not possible", "choose a newer version"
        )


def _check_minor(running: Mapping[str, str], target: str) -> None:
    """kubeadm itself compares only the cluster's version, which another control plane may have raised already."""
    present = min((running[name] for name in versions.COMPONENTS if name in running), key=versions.numbers, default="")
    major, minor, *_ = versions.numbers(target)
    if versions.numbers(present) and versions.numbers(present)[:2] < (major, minor - 1):
        raise MachineProblem(
            f"its control plane is {present}",
            f"{major}.{minor - 1}: kubeadm upgrades a control plane by one minor at a time",
            f"upgrade it to {major}.{minor - 1} first",
        )


def _check_kubeadm(target: str) -> None:
    installed = versions.program("kubeadm")
    if installed != target:
        raise MachineProblem(
            f"kubeadm {installed} is installed" if installed else "kubeadm is not installed",
            f"kubeadm {target}",
            "run the whole playbook, without --tags of single roles",
        )


def _document(target: str, timeouts: Mapping[str, str], *, patched: bool) -> dict[str, Any]:
    """kubeadm's configuration (v1beta4). The exact version makes it ask no server of the Internet."""
    patches = {"patches": {"directory": f"{command.PRIVATE}/patches"}} if patched else {}
    common = {"imagePullSerial": False, **patches}
    return {
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "UpgradeConfiguration",
        "apply": {"kubernetesVersion": f"v{target}", **common},
        "node": common,
        "timeouts": dict(timeouts),
    }


def _restore_manifests(report: Report, check: bool) -> None:
    """Put back manifests that an interrupted kubeadm has moved away without a new one in their place.

    kubeadm moves the old one to its backups, then the new one to its place, and refuses a control plane that lacks one.
    """
    for name in (*versions.COMPONENTS, versions.ETCD):
        path = f"{versions.MANIFESTS}/{name}.yaml"
        folders = versions.backups(BACKUPS, "kubeadm-backup-manifests")
        kept = [text for folder in folders if (text := disk.read(f"{folder}/{name}.yaml"))]
        if kept and not os.path.exists(path):
            report.add(f"restore {path}", Difference("static pods", {name: "missing"}, {name: "present"}))
            if not check:
                disk.write(path, kept[-1], 0o600)


def _remove_old_backups() -> None:
    """Remove kubeadm's copies of etcd's data except the newest: each is as large as etcd, and has all Secrets."""
    for path in versions.backups(BACKUPS, "kubeadm-backup-etcd")[:-1]:
        tree.remove(path)
