"""kubeadm join of another control plane."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import facts, kube_api, kubeconfig, ledger
from ..cluster import schedulable as taint
from ..ledger import Ledger
from ..masking import Secret
from ..problem import MachineProblem
from ..report import Difference, Report, of_file
from . import certificates, command, reset
from .certificates import Shared


@dataclass(frozen=True)
class Cluster:
    """The cluster to join: host and port of its API, the hash of its CA's public key, and a bootstrap token."""

    endpoint: str
    ca_hash: str
    token: str


@dataclass(frozen=True)
class Place:
    """This machine in the cluster."""

    node: str
    address: str
    """At which its API server and etcd are reached."""
    registered: bool
    """Whether the cluster has its node, as that of a control plane."""
    schedulable: bool
    """Whether ordinary pods may run on it."""


def join(
    cluster: Cluster,
    place: Place,
    shared: Shared,
    patches: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    limit_s: float,
    check: bool,
) -> Report:
    """Make this machine a control plane of the cluster; the report is empty if it is one.

    An interrupted join is reset and started again. Raises MachineProblem for a machine of another cluster, a worker,
    and a control plane that was complete once: what remains of it may hold the only copy of something.
    """
    machine_ledger = ledger.load()
    report = Report()
    if _joined(cluster.ca_hash) and place.registered:
        _finish(report, machine_ledger, check)
        _schedule(report, place, check)
        return report
    leftovers = reset.leftovers(control_plane=True)
    if leftovers:
        _check_unfinished(machine_ledger.kubeadm, leftovers)
        report.add("reset an earlier join", _became_control_plane("interrupted"))
    document = _document(cluster, place, shared, settings)
    report.add(
        "kubeadm join",
        _became_control_plane("none"),
        Difference("configuration of kubeadm join", {}, {"document": document, "patches": patches}),
        *(each for path, text in shared.files.items() for each in of_file(path, text, 0o600)),
    )
    if check:
        return report
    if not (cluster.token and shared.key):
        raise MachineProblem(
            "no token and certificate key to join with",
            "fresh ones",
            "run the complete playbook, without --tags or --start-at-task",
        )
    certificates.check_files(shared.files, shared.required)
    command.begin(machine_ledger, "join started", taken_over=bool(leftovers))
    if leftovers:
        reset.reset()
    certificates.place(shared.files, shared.required)
    command.run("join", [document], limit_s, (), patches)
    command.end(machine_ledger, "join done")
    _schedule(report, place, check)
    return report


def _finish(report: Report, machine_ledger: Ledger, check: bool) -> None:
    """Finish a join that was interrupted after kubeadm had succeeded."""
    if machine_ledger.kubeadm.endswith(" started"):
        report.add("finish an interrupted kubeadm join", _became_control_plane("interrupted"))
        if not check:
            command.end(machine_ledger, "join done")


def _document(cluster: Cluster, place: Place, shared: Shared, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "JoinConfiguration",
        "discovery": {
            "bootstrapToken": {
                "token": Secret(cluster.token),
                "apiServerEndpoint": cluster.endpoint,
                "caCertHashes": [cluster.ca_hash],
            },
        },
        "controlPlane": {
            "localAPIEndpoint": {"advertiseAddress": place.address},
            "certificateKey": Secret(shared.key),
        },
        "patches": {"directory": f"{command.PRIVATE}/patches"},
        **settings,
    }


def _schedule(report: Report, place: Place, check: bool) -> None:
    """Let ordinary pods run on this node, or undo that."""
    if check and not place.registered:
        return
    if difference := taint.converge(kube_api.admin(), place.node, schedulable=place.schedulable, check=check):
        report.add(taint.ACTIONS[place.schedulable], difference)


def _check_unfinished(progress: str, leftovers: list[str]) -> None:
    """Raise MachineProblem unless these files are those of a join or init that gpunodes started and did not finish."""
    if progress.endswith(" started"):
        return
    raise MachineProblem(
        f"{leftovers[0]} exists, but this machine is no complete control plane of the cluster"
        + ("" if progress else ", and gpunodes did not join it"),
        "a control plane, or a machine outside any cluster",
        "run `gpunodes remove` of this machine, which removes what remains of it, then join it again",
    )


def _became_control_plane(before: str) -> Difference:
    return Difference("kubeadm", {"control plane": before}, {"control plane": "complete"})


def _joined(ca_hash: str) -> bool:
    """Whether this machine is a control plane of the cluster with this CA, according to the machine's files."""
    state = facts.kubernetes()
    if state["ca_hash"] and state["ca_hash"] != ca_hash and os.path.exists(kubeconfig.KUBELET):
        raise MachineProblem(
            f"this machine belongs to another cluster ({state['server']})",
            "a machine of this cluster, or outside any cluster",
            "if that cluster no longer exists, run gpunodes reset",
        )
    if state["role"] == "worker":
        raise MachineProblem(
            "this machine is a worker of the cluster",
            "a machine outside any cluster",
            "run `gpunodes remove` of this machine while it is in the group workers, then join it",
        )
    return bool(state["role"] == "control_plane" and state["ca_hash"] == ca_hash and state["etcd"])
