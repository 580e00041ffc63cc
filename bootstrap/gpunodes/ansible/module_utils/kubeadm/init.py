"""kubeadm init."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import disk, etcd_data, kube_api, kubeconfig, ledger, pools
from ..cluster import schedulable as taint
from ..cluster.tokens import new_token
from ..host import services
from ..kube_api import ApiError, Client
from ..ledger import Ledger
from ..problem import MachineProblem, Problem
from ..process import run
from ..report import Difference, Report, of_file
from . import command, reset, static_pods
from .errors import cause_of_wait

RANDOM_KEY = "{random key}"
_INIT_DESCRIPTION = "kubeadm init"
"""Description of the bootstrap token for kubeadm init."""
_POLL_S = 1.0
_BOOT_S = 300
"""Seconds that a control plane may take to respond after its machine has booted."""
_BACKOFF_S = 300
"""The most seconds between two starts of a component that ends (kubelet, MaxContainerBackOff)."""
_APPS = "/apis/apps/v1/namespaces/kube-system"
_LABELS = "label the node"


@dataclass(frozen=True)
class Node:
    """What the control plane's node is to have beside what kubeadm gives it."""

    schedulable: bool = False
    """Whether ordinary pods may run on it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that are added to a node with the name of its machine; others stay."""


def init(
    documents: Sequence[Mapping[str, Any]],
    patches: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, Mapping[str, Any]],
    limit_s: float,
    check: bool,
    node: Node = Node(),
) -> Report:
    """Make this machine a control plane, unless it is one already.

    ``files`` are JSON files to which the documents refer, by path; readable by root only, and written when the control
    plane is created. ``RANDOM_KEY`` in them is replaced by a key that is generated here.

    A cluster that was usable at any time is never touched: if its API does not respond, this waits, then reports it. An
    init that gpunodes started and that did not finish is reset and started again.
    """
    machine_ledger = ledger.load()
    report = _started_again(machine_ledger, check)
    if report.actions and check:
        return report  # whether the rest works is known only when they run
    if any(map(os.path.exists, (reset.MANIFEST, kubeconfig.ADMIN, reset.ETCD))):
        if _control_plane_works(machine_ledger, limit_s, check):
            if machine_ledger.kubeadm == "init started":
                report.add("finish an interrupted kubeadm init", _became_control_plane("interrupted"))
                if not check:
                    _end_init(machine_ledger)
            _finish_node(report, documents, node, check)
            return report
        report.add("reset an interrupted kubeadm init", _became_control_plane("interrupted"))
    elif os.path.exists(kubeconfig.KUBELET):
        raise MachineProblem(
            "this machine is a worker of a cluster",
            "a machine outside any cluster",
            "run gpunodes reset on it",
        )
    leftovers = _leftovers(machine_ledger, report)
    configuration = {"documents": documents, "patches": patches}
    report.add(
        "kubeadm init",
        _became_control_plane("none"),
        Difference("configuration of kubeadm init", {}, configuration),
        *(each for path, content in files.items() for each in of_file(path, json.dumps(content), 0o600)),
    )
    if check:
        if node.schedulable:
            report.add(taint.ACTIONS[True], taint.planned())
        if node.labels:
            report.add(_LABELS, *pools.planned(_name(documents), node.labels))
        return report
    command.begin(machine_ledger, "init started")
    if leftovers:
        reset.reset()
    _write(files)
    complete = [_complete(document, new_token()) for document in documents]
    command.run("init", complete, limit_s, ("--skip-token-print",), patches)
    _end_init(machine_ledger)
    _finish_node(report, documents, node, check)
    return report


def _leftovers(machine_ledger: Ledger, report: Report) -> list[str]:
    """What earlier attempts left, which is removed first, and reported. Raises MachineProblem for files of others.

    But kubeadm uses a CA that its user put there.
    """
    found = reset.leftovers(control_plane=True)
    if machine_ledger.kubeadm:
        if found and not report.actions:
            report.add("reset an interrupted kubeadm init", _became_control_plane("interrupted"))
        return found
    foreign = [path for path in found if path != kubeconfig.CA]
    if foreign:
        reset.check_own(foreign, "")
    return []


def _write(files: Mapping[str, Mapping[str, Any]]) -> None:
    for path, content in files.items():
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        disk.write(path, json.dumps(content, indent=1).replace(RANDOM_KEY, _random_key()) + "\n", 0o600)


def _started_again(machine_ledger: Ledger, check: bool) -> Report:
    """Put manifests back that an interrupted restart left away: without them the control plane never works again.

    Raises MachineProblem if others have files where etcd is to have its data.
    """
    if etcd_data.is_in_the_way(machine_ledger):
        # kubeadm would fail at it, and the next attempt would take it for that of the first. Preflight says so, too.
        raise MachineProblem(f"{etcd_data.FOLDER} has files, and they are of no cluster of kubeadm", "an empty folder")
    report = Report()
    for name in static_pods.heal(machine_ledger, check):
        difference = Difference(f"static pod {name}", {"manifest": "away"}, {"manifest": "present"})
        report.add(f"start {name}, which an interrupted run stopped", difference)
    return report


def _finish_node(report: Report, documents: Sequence[Mapping[str, Any]], node: Node, check: bool) -> None:
    """Let ordinary pods run on this node, or undo that, and label it."""
    client, name = kube_api.admin(), _name(documents)
    if difference := taint.converge(client, name, schedulable=node.schedulable, check=check):
        report.add(taint.ACTIONS[node.schedulable], difference)
    # kubeadm init ends with a registered node. That of others may not have its machine's name: the role pool labels it.
    if not node.labels or client.find(f"/api/v1/nodes/{name}") is None:
        return
    if differences := pools.add(name, node.labels, check):
        report.add(_LABELS, *differences)


def _name(documents: Sequence[Mapping[str, Any]]) -> str:
    """The name of the node that kubeadm makes of this machine by these documents."""
    registrations = [document.get("nodeRegistration") or {} for document in documents]
    return next(filter(None, (each.get("name") for each in registrations)), socket.gethostname()).lower()


def _became_control_plane(before: str) -> Difference:
    return Difference("kubeadm", {"control plane": before}, {"control plane": "complete"})


def _end_init(machine_ledger: Ledger) -> None:
    """Finish after kubeadm succeeded. If this is interrupted, the next run does it."""
    client = kube_api.admin()
    # kubeadm needs a token to set up bootstrapping; joins create their own.
    for token in client.get(f"{kube_api.SYSTEM}/secrets", fieldSelector="type=bootstrap.kubernetes.io/token")["items"]:
        if (token.get("data") or {}).get("description") == base64.b64encode(_INIT_DESCRIPTION.encode()).decode():
            client.delete(f"{kube_api.SYSTEM}/secrets/{token['metadata']['name']}")
    command.end(machine_ledger, "init done")


def _control_plane_works(machine_ledger: Ledger, limit_s: float, check: bool) -> bool:
    """Whether the control plane on this machine works; False if it never worked and may be reset.

    Starts a stopped kubelet, except with ``check``.

    Raises MachineProblem if it may have worked at any time, or if gpunodes did not start its init.
    """
    began = time.time()
    unfinished = machine_ledger.kubeadm == "init started"
    client = kube_api.admin(patience_s=0) if kubeconfig.load(kubeconfig.ADMIN) else None
    complete = client is not None and os.path.exists(reset.MANIFEST)
    # The control plane may be starting, because the machine booted a moment ago.
    patience_s = min(limit_s, _BOOT_S if not unfinished or _finalised() else 60)
    if complete and client and _responds(client, patience_s, check):
        # With the default patience, so that a brief failure does not look like a missing part.
        client = kube_api.admin()
        try:
            missing = _missing_parts(client)
        except ApiError as error:
            # kubeadm lets the administrator in as soon as the API server responds: nobody has used this cluster.
            if error.status == kube_api.FORBIDDEN and unfinished and not _finalised():
                return False
            raise
        if not missing:
            return True
        if unfinished and not _in_use(client):
            return False
        raise MachineProblem(
            f"the cluster on this machine lacks {missing[0]}",
            "all parts that kubeadm init creates",
            "finish its init by hand (`kubeadm init phase ...`), or run gpunodes reset, which destroys the cluster",
        )
    if unfinished and not _finalised():
        return False
    cause = cause_of_wait(began - _BACKOFF_S) or Problem("its API server does not respond")
    see = "see `journalctl -u kubelet` and `crictl ps -a`; gpunodes reset destroys the cluster and frees the machine"
    raise MachineProblem(
        f"the control plane on this machine does not work: {cause.found}",
        "a working control plane, or none",
        f"{cause.remedy}; {see}" if cause.remedy else see,
    )


def _finalised() -> bool:
    """Whether the API worked: kubeadm init's second last phase gives the kubelet a certificate from the API."""
    return "kubelet-client-current.pem" in (disk.read(kubeconfig.KUBELET) or "")


def _responds(client: Client, limit_s: float, check: bool) -> bool:
    deadline = time.monotonic() + limit_s
    if not services.states(["kubelet"]).get("kubelet", {}).get("active"):
        if check:
            deadline = 0  # without a kubelet, nothing starts the API server
        else:
            run(["systemctl", "start", "kubelet"])
    while True:
        with contextlib.suppress(ApiError):
            client.get("/readyz")
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def _missing_parts(client: Client) -> list[str]:
    """The parts that a finished kubeadm init creates and that are missing."""
    parts = {
        f"{kube_api.SYSTEM}/configmaps/kubeadm-config": "its own configuration (ConfigMap kubeadm-config)",
        "/api/v1/namespaces/kube-public/configmaps/cluster-info": "discovery data for joins (ConfigMap cluster-info)",
        f"{_APPS}/deployments/coredns": "its DNS (Deployment coredns)",
        f"{_APPS}/daemonsets/kube-proxy": "kube-proxy (DaemonSet kube-proxy)",
    }
    return [title for path, title in parts.items() if client.find(path) is None]


def _in_use(client: Client) -> bool:
    """Whether the cluster is in use: it has a second node, or pods outside kube-system."""
    nodes = client.get("/api/v1/nodes")["items"]
    pods = client.get("/api/v1/pods")["items"]
    return len(nodes) > 1 or any(pod["metadata"]["namespace"] != "kube-system" for pod in pods)


def _complete(document: Mapping[str, Any], token: str) -> Mapping[str, Any]:
    if document["kind"] != "InitConfiguration":
        return document
    tokens = [{"token": token, "ttl": "1h0m0s", "description": _INIT_DESCRIPTION}]
    return {**document, "bootstrapTokens": tokens, "patches": {"directory": f"{command.PRIVATE}/patches"}}


def _random_key() -> str:
    """32 random bytes in base64: a key for secretbox (kubernetes.io, EncryptionConfiguration)."""
    return base64.b64encode(secrets.token_bytes(32)).decode("ascii")
