"""The taint that keeps pods off a node while its GPUs are burnt in, and until they passed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from . import gpu_cluster, kube_api, kubeconfig, registration
from .kube_api import ApiError, Client
from .problem import MachineProblem
from .report import Difference

KEY = "gpunodes.dev/burn-in"
TAINT = {"key": KEY, "effect": "NoSchedule"}
LABEL = "gpunodes.dev/burn-in"
"""Label of the pods of a burn-in, which are no foreign ones."""
_CONFLICT = 409
_POLL_S = 2.0
_OWN_PODS_S = 60.0
_LISTED = 5


def hold(
    node: str, *, only_tainted: bool, drain: bool, limit_s: float, check: bool
) -> tuple[bool, list[Difference], list[str]]:
    """Taint a node on which no pod uses GPUs; returns whether a burn-in is due, the differences, and evicted pods.

    ``only_tainted``: a burn-in is due only if the node has the taint already, or the one of nodes that are starting.
    ``drain`` evicts pods that use GPUs, within their disruption budgets and ``limit_s``. Raises MachineProblem if pods
    use GPUs; the taint is as before.
    """
    if check and kubeconfig.load(kubeconfig.ADMIN) is None:
        return False, [], []
    client = kube_api.admin()
    if check and client.find(f"/api/v1/nodes/{node}") is None:
        # In check mode a join has not made it.
        return False, [], []
    found = _find(client, node)
    tainted = has_taint(found)
    if only_tainted and not tainted and not registration.is_starting(found):
        return False, [], []
    # The pods of an interrupted burn-in.
    if not check:
        _delete_own_pods(client, node)
    users = gpu_cluster.pods_with_gpus(node, client)
    if users and not drain:
        raise _in_use(node, users)
    differences = [] if tainted else [Difference(f"Node {node}", {"taints": []}, {"taints": [TAINT]})]
    if check:
        return True, differences, users
    if not tainted:
        change(client, node, present=True)
    try:
        # A pod may have been scheduled before the taint.
        evicted = _evict(client, node, limit_s) if drain else []
        if not drain and (users := gpu_cluster.pods_with_gpus(node, client)):
            raise _in_use(node, users)
    except MachineProblem:
        if not tainted:
            change(client, node, present=False)
        raise
    return True, differences, evicted


def release(node: str, check: bool) -> list[Difference]:
    """Remove the taint; returns the differences, none if the node does not have it."""
    client = kube_api.admin()
    if not has_taint(_find(client, node)):
        return []
    if not check:
        change(client, node, present=False)
    return [Difference(f"Node {node}", {"taints": [TAINT]}, {"taints": []})]


def has_taint(node: Mapping[str, Any]) -> bool:
    """Whether a Node object has the taint."""
    return any(taint.get("key") == KEY for taint in (node.get("spec") or {}).get("taints") or ())


def change(client: Client, name: str, *, present: bool) -> None:
    """Add or remove the taint; others stay."""
    while True:
        node = _find(client, name)
        taints = [taint for taint in (node.get("spec") or {}).get("taints") or () if taint.get("key") != KEY]
        patch = {
            # The patch replaces the whole list of taints: it must fail if the node was changed meanwhile.
            "metadata": {"resourceVersion": node["metadata"]["resourceVersion"]},
            "spec": {"taints": ([*taints, TAINT] if present else taints) or None},
        }
        try:
            client.call("PATCH", f"/api/v1/nodes/{name}", patch, {"fieldManager": kube_api.MANAGER}, kube_api.MERGE)
        except ApiError as error:
            if error.status != _CONFLICT:
                raise
        else:
            return


def _find(client: Client, name: str) -> Mapping[str, Any]:
    node: Mapping[str, Any] | None = client.find(f"/api/v1/nodes/{name}")
    if node is None:
        raise MachineProblem(f"the cluster has no node {name}", "the machine's node", "see `gpunodes status`")
    return node


def _delete_own_pods(client: Client, node: str) -> None:
    """Delete the pods of an earlier burn-in, and wait until they have left."""
    query = {"labelSelector": LABEL, "fieldSelector": f"spec.nodeName={node}"}
    deadline = time.monotonic() + _OWN_PODS_S
    while pods := client.get(f"{kube_api.SYSTEM}/pods", **query)["items"]:
        for pod in pods:
            client.delete(f"{kube_api.SYSTEM}/pods/{pod['metadata']['name']}")
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def _in_use(node: str, users: list[str]) -> MachineProblem:
    more = f" and {len(users) - _LISTED} more" if len(users) > _LISTED else ""
    verb = "uses" if len(users) == 1 else "use"
    return MachineProblem(
        f"{', '.join(users[:_LISTED])}{more} {verb} GPUs of {node}",
        "a node without pods that use GPUs",
        "wait until they end, or evict them: --drain; nothing was changed",
    )


def _evict(client: Client, node: str, limit_s: float) -> list[str]:
    """Evict the pods that use GPUs and wait until they are gone; raises MachineProblem with the pods that remain."""
    deadline = time.monotonic() + limit_s
    # A refusal by a disruption budget is final for this attempt, and not repeated as a busy API is.
    client = kube_api.admin(patience_s=0)
    evicted: dict[str, None] = {}
    why = ""
    while users := gpu_cluster.pods_with_gpus(node, client):
        for full_name in users:
            namespace, _, name = full_name.partition("/")
            body = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": name, "namespace": namespace},
            }
            try:
                client.call("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)
                evicted[full_name] = None
            except ApiError as error:
                # A disruption budget, or a pod that is gone.
                why = str(error)
        if time.monotonic() > deadline:
            raise MachineProblem(
                f"{', '.join(users[:_LISTED])} still use GPUs of {node} after {limit_s:.0f} s"
                + (f": {why}" if why else ""),
                "all pods that use GPUs evicted",
                "see their disruption budgets and gpunodes_drain_timeout",
            )
        time.sleep(_POLL_S)
    return list(evicted)
