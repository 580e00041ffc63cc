"""Verifies that a node runs the version to which it was upgraded."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import kube_api
from ..kube_api import ApiError, Client
from ..kubeadm.versions import COMPONENTS, ETCD
from ..problem import MachineProblem
from .nodes import not_ready, pod_problem

_POLL_S = 2.0
_CRITICAL = ("system-node-critical", "system-cluster-critical")
"""Priority classes of what a node or cluster needs to work."""


def wait(name: str, kubelet: str, components: str, limit_s: float, runtime: str = "", *, daemons: bool = True) -> None:
    """Wait until the node ``name`` runs these exact versions, "" for one that is not verified.

    ``runtime`` is the container runtime without the revision of a distribution: containerd://2.1.4.

    It must be Ready and renew its Lease, so that the condition is not that of the kubelet before. Its static pods must
    run, and the daemons that the cluster needs: a user's daemon that fails stops no upgrade. Without ``daemons`` only
    the node is verified: one that returns has its pods as they were. ``components`` is the version of its static pods;
    etcd, which has its own, must be ready.

    Raises MachineProblem with the last reason.
    """
    client = kube_api.admin()
    deadline = time.monotonic() + limit_s
    first = ""
    while True:
        try:
            renewed = _renewed(client, name)
            first = first or renewed
            reason = _reason(client, name, kubelet, runtime) or (
                _pods_reason(client, name, components) if daemons else ""
            )
            if not reason:
                if renewed and renewed != first:
                    return
                reason = "its kubelet has not renewed the node's Lease since"
        except ApiError as error:
            reason = str(error)
        if time.monotonic() >= deadline:
            raise MachineProblem(
                f"the node {name} is not upgraded: {reason}",
                f"version {kubelet or components or runtime} in {limit_s:.0f} s",
                "see `journalctl -u kubelet` and `crictl ps -a` on the machine, then run the same command again",
            )
        time.sleep(_POLL_S)


def _renewed(client: Client, name: str) -> str:
    """When the kubelet last renewed the node's Lease, "" if it has none."""
    lease = client.find(f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}")
    return str(((lease or {}).get("spec") or {}).get("renewTime") or "")


def _reason(client: Client, name: str, kubelet: str, runtime: str) -> str:
    """What the node still lacks, "" if nothing."""
    node = client.find(f"/api/v1/nodes/{name}")
    if node is None:
        return "it is not a node of the cluster"
    version = str(node["status"]["nodeInfo"]["kubeletVersion"])
    if kubelet and version != f"v{kubelet}":
        return f"its kubelet is {version}"
    reported = str(node["status"]["nodeInfo"].get("containerRuntimeVersion", ""))
    # Kubelets report revisions of distributions (1.7.24~ds1) or leave them out.
    if runtime and not re.fullmatch(rf"{re.escape(runtime)}(?![.0-9]).*", reported):
        return f"its runtime is {reported or 'unknown'}"
    if problem := not_ready(node):
        return f"its kubelet reports: {problem}"
    return ""


def _pods_reason(client: Client, name: str, components: str) -> str:
    """Which of the node's pods does not run yet, "" for none."""
    pods = client.get("/api/v1/pods", fieldSelector=f"spec.nodeName={name}")["items"]
    return (_component_problem(name, components, pods) if components else "") or _pod_problem(pods)


def _component_problem(node: str, version: str, pods: Sequence[Mapping[str, Any]]) -> str:
    """Why a control plane's static pods do not run with a version, "" if they do."""
    own = {str(pod["metadata"]["name"]): pod for pod in pods if pod["metadata"]["namespace"] == "kube-system"}
    for name in COMPONENTS:
        pod = own.get(f"{name}-{node}")
        if pod is None:
            return f"its {name} has no pod"
        image = str(pod["spec"]["containers"][0]["image"])
        if not image.endswith(f":v{version}"):
            return f"its {name} is {image.rpartition(':')[2]}"
        if problem := pod_problem(pod):
            return problem
    return pod_problem(own[f"{ETCD}-{node}"]) if f"{ETCD}-{node}" in own else ""


def _pod_problem(pods: Sequence[Mapping[str, Any]]) -> str:
    """The problem of the first static pod, or daemon of the cluster, that does not run; a drain leaves these."""
    return next(filter(None, map(pod_problem, filter(_is_needed, pods))), "")


def _is_needed(pod: Mapping[str, Any]) -> bool:
    owners = [owner.get("kind") for owner in pod["metadata"].get("ownerReferences") or ()]
    system = pod["metadata"]["namespace"] == "kube-system" or pod["spec"].get("priorityClassName") in _CRITICAL
    return "Node" in owners or ("DaemonSet" in owners and system)
