"""Removes nodes from the cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import kube_api, kubeconfig, scaling
from ..kube_api import ApiError, Client
from ..problem import MachineProblem
from ..process import run
from ..report import Difference, Report
from . import removed_nodes
from .nodes import CONTROL_PLANE, describe, not_ready

_MIRROR = "kubernetes.io/config.mirror"
_GONE = (404, 409)
"""Status codes for a pod that no longer exists, or whose name another pod has."""
_SILENT_S = 300
"""Within this time the node of a stopped kubelet is not ready: twice kube-controller-manager's limit, and some."""
_POLL_S = 2.0


# Long: the arguments of a removal, and its steps in their order.
def remove(
    name: str,
    drain_limit_s: float,
    force: bool,
    check: bool,
    expected: Mapping[str, Any] | None = None,
    *,
    control_plane: bool = False,
    keep: bool = False,
    returns: bool = False,
) -> tuple[Report, list[str]]:
    """Cordon, drain and delete a node; returns the report, empty if the node does not exist, and notes for the user.

    ``keep``: the node is drained and stays. ``control_plane``: it may be that of a control plane, whose member of etcd
    has its own module. Unless the machine ``returns`` at once, the API refuses it from then on. A worker that
    returns has no kubelet: raises MachineProblem, after a while, if the node stays ready, and is another machine's.

    ``force`` deletes the remaining pods regardless of their disruption budgets. Pods of a node that is not ready always
    remain, because nothing confirms that they ended. Without ``force``, raises MachineProblem with their names.

    ``expected`` are values that the node must still have (``uid``, ``boot_id``, ... of :func:`nodes.describe`): raises
    MachineProblem if another machine has the name now.
    """
    client = kube_api.admin()
    node = client.find(f"/api/v1/nodes/{name}")
    report = Report()
    if node is None:
        return report, []
    if not control_plane and CONTROL_PLANE in (node["metadata"].get("labels") or {}):
        raise MachineProblem(
            f"{name} is a control plane", "a worker", "use the playbook remove.yml, or gpunodes remove"
        )
    _check_same(node, expected or {})
    if returns and not control_plane and not check:
        node = _silent(client, node)
    problem = not_ready(node)
    pods = _remaining(client, name)
    remaining = pods if problem else []
    if remaining and not force:
        raise MachineProblem(
            f"{name} is not ready ({problem}): nothing confirms that these pods have ended: {_listed(remaining)}",
            "a ready node, from which pods can be evicted within their disruption budgets",
            f"repair it (`gpunodes repair {name}`), or delete the pods by force: --force-drain (gpunodes_drain_force)",
        )
    if pods or not keep or not node.get("spec", {}).get("unschedulable"):
        report.add(f"drain {name}", Difference("pods", dict.fromkeys(map(_full_name, pods), f"on {name}"), {}))
    if not keep:
        refused = [] if returns else [Difference("refused nodes", {}, {name: "removed"})]
        report.add(f"delete node {name}", Difference("nodes", {name: "present"}, {}), *refused)
    notes: list[str] = []
    if not check:
        if problem:
            client.call("PATCH", f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}}, None, kube_api.MERGE)
        elif not _drain(name, drain_limit_s, force):
            remaining = _remaining(client, name)
        for pod in remaining:
            _delete_now(client, pod)
        if not keep:
            notes += [] if returns else [*removed_nodes.refuse(client, name), *_leave_off(client, node)]
            _delete_node(client, node)
    notes += [f"pods of {name} deleted by force: {_listed(remaining, len(remaining))}"] if remaining else []
    return report, notes


def _delete_node(client: Client, node: Mapping[str, Any]) -> None:
    """Delete exactly this node, not another one that has its name now."""
    body = {"preconditions": {"uid": node["metadata"]["uid"]}}
    try:
        client.call("DELETE", f"/api/v1/nodes/{node['metadata']['name']}", body)
    except ApiError as error:
        if error.status != kube_api.NOT_FOUND:
            raise


def _leave_off(client: Client, node: Mapping[str, Any]) -> list[str]:
    """Have the power server leave the machine of a removed node alone until it joins again; a note for the user.

    Without that record it would switch on, and off again, a machine that another one may use.
    """
    name = node["metadata"]["name"]
    if not str((node.get("spec") or {}).get("providerID") or "").startswith(scaling.PROVIDER):
        return []
    path = f"{kube_api.SYSTEM}/configmaps"
    body = {"data": {name: scaling.entry(scaling.REMOVED, time.time(), "")}}
    try:
        client.call("PATCH", f"{path}/{scaling.KEPT_OFF}", body, None, kube_api.MERGE)
    except ApiError as error:
        if error.status != kube_api.NOT_FOUND:
            raise
        labels = {"app.kubernetes.io/managed-by": "gpunodes"}
        client.call("POST", path, {"metadata": {"name": scaling.KEPT_OFF, "labels": labels}, **body})
    return [
        f"the autoscaler leaves {name} alone; `gpunodes autoscale up` takes the password of its BMC from the cluster"
    ]


def _check_same(node: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise MachineProblem if the node no longer belongs to the machine for which it was chosen."""
    if not expected:
        return
    now = describe(node, ())
    changed = [f"{key} {now[key]} instead of {value}" for key, value in expected.items() if now.get(key) != value]
    if changed:
        raise MachineProblem(
            f"node {now['name']} belongs to another machine now: it reports {', '.join(changed)}",
            "the node that was chosen",
            "check which machine it is, and run the command again",
        )


def _silent(client: Client, node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Wait until a node is not ready; it stays ready for some seconds after its kubelet was stopped.

    The machine whose node it should be says who it is: it can report the identity of another one, which works.
    """
    name, deadline = node["metadata"]["name"], time.monotonic() + _SILENT_S
    while not not_ready(node):
        if time.monotonic() >= deadline:
            raise MachineProblem(
                f"node {name} stays ready: a kubelet runs on its machine",
                "the node that this machine left, on which none runs",
                f"check which machine it is (`kubectl describe node {name}`); if it is no other, delete that node",
            )
        time.sleep(_POLL_S)
        found = client.get(f"/api/v1/nodes/{name}")
        _check_same(found, {"uid": node["metadata"]["uid"]})
        node = found
    return node


def _drain(name: str, limit_s: float, force: bool) -> bool:
    """Drain a node within its pods' disruption budgets; raises MachineProblem if that fails without ``force``."""
    # For kubectl, 0 means no limit.
    limit_s = max(1, limit_s)
    result = run(
        [
            "kubectl",
            f"--kubeconfig={kubeconfig.ADMIN}",
            "drain",
            name,
            "--ignore-daemonsets",
            "--delete-emptydir-data",
            "--force",
            f"--timeout={limit_s:.0f}s",
        ],
        limit_s + 60,
    )
    if not result.ok and not force:
        errors = [line.strip() for line in result.err.splitlines() if line.startswith(("error", "There are pending"))]
        first = (errors or result.err.splitlines()[-1:] or [""])[0]
        raise MachineProblem(
            f"{name} cannot be drained within {limit_s:.0f} s and stays cordoned: {first}",
            "all its pods evicted",
            f"see `kubectl get pods -A --field-selector spec.nodeName={name}` and disruption budgets, or delete the "
            "remaining pods by force: --force-drain (gpunodes_drain_force)",
        )
    return result.ok


def _remaining(client: Client, name: str) -> list[Mapping[str, Any]]:
    """The pods that a drain must evict: excludes pods of DaemonSets, mirror pods and ended pods."""
    return [
        pod
        for pod in client.get("/api/v1/pods", fieldSelector=f"spec.nodeName={name}")["items"]
        if pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"}
        and _MIRROR not in (pod["metadata"].get("annotations") or {})
        and not any(owner["kind"] == "DaemonSet" for owner in pod["metadata"].get("ownerReferences") or ())
    ]


def _listed(pods: Sequence[Mapping[str, Any]], limit: int = 5) -> str:
    names = [_full_name(pod) for pod in pods]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _full_name(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _delete_now(client: Client, pod: Mapping[str, Any]) -> None:
    """Delete exactly this pod, not another one with its name, without waiting for its node."""
    body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
    path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
    try:
        client.call("DELETE", path, body)
    except ApiError as error:
        if error.status not in _GONE:
            raise
