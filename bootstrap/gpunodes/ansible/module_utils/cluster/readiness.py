"""Verifies that nodes are ready: pods on them reach the API service."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import kube_api
from ..kube_api import ApiError, Client
from .nodes import NETWORK_PODS, READY_BOOT, event_text, is_network, is_proxy, not_ready, on_node, pod_problem

_PODS = f"{kube_api.SYSTEM}/pods"
_POLL_S = 2.0
_FEW = 10
"""Up to this number, nodes are requested one by one: the lists of a large cluster have megabytes."""
_NO_CONDITION_S = 20
_NO_NETWORK_S = 60
_NO_NETWORK = "reason:NetworkPluginNotReady"
"""In the message of a kubelet whose container runtime has no CNI configuration. Sources: containerd 2.2
internal/cri/server/status.go (networkNotReadyReason); kubelet 1.36 pkg/kubelet/nodestatus/setters.go."""
_LOG_LINES = "50"
_ERRORS = (
    re.compile(r"^(?:F\d{4} |panic: |fatal error: )"),
    re.compile(r"^E\d{4} |\blevel=\"?(?:error|fatal)\b|\"level\":\"(?:error|fatal)\""),
)
"""Lines that tell why a program ended, by klog, by Go, and by loggers with levels; the surest first."""
_SERVICE = "kubernetes.default.svc.cluster.local"
# Rules and endpoints reach a new node shortly after its pods start: retry for a minute. The API server closes an idle
# connection, which ends nc.
_SCRIPT = (
    "n=0; "
    f"until busybox nslookup {_SERVICE} >/tmp/out 2>&1 && busybox nc -w 5 {_SERVICE} 443 </dev/null >/tmp/out 2>&1; do "
    "n=$((n + 1)); [ $n -lt 30 ] || { busybox tail -n 1 /tmp/out >/dev/termination-log; exit 1; }; "
    "busybox sleep 2; done"
)


@dataclass
class _Watch:
    """Progress of one node's verification."""

    name: str
    reason: str = "it is not a node of the cluster"
    probe: str = ""
    boot_id: str = ""
    no_network_since: float = 0.0
    """When its kubelet was first seen to wait for a network add-on."""
    running_since: float = 0.0
    """When all pods of kube-proxy and the network add-on first ran."""
    done: bool = False


def wait_until_ready(names: Sequence[str], image: str, limit_s: float, *, own_network: bool = False) -> dict[str, str]:
    """Wait until each node is verified as ready; returns by node why it is not, "" if it is.

    A verified node is Ready, runs kube-proxy and the network add-on, and a pod on it resolves the name of the API
    service and reaches it. The condition Ready alone is not enough: it can be true before the network works.

    ``own_network``: the network add-on is the administrator's, so only the node and the pod are examined. In a cluster
    that has none yet, waiting ends early.
    """
    client = kube_api.admin()
    watches = [_Watch(name) for name in names]
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            try:
                _advance(client, watches, image, own_network)
                if own_network and _has_no_network(client, watches):
                    break
            except ApiError as error:
                for watch in watches:
                    if not watch.done:
                        watch.reason = str(error)
            if all(watch.done for watch in watches):
                break
            time.sleep(_POLL_S)
        for watch in watches:
            if watch.probe and not watch.done:
                watch.reason = _network_problem(client, watch.name) or _event(client, watch.probe) or watch.reason
    finally:
        _clean(client, watches)
    return {watch.name: "" if watch.done else watch.reason for watch in watches}


def _advance(client: Client, watches: Sequence[_Watch], image: str, own_network: bool) -> None:
    """Perform the next possible steps for each node, with few API requests, and record what it waits for."""
    probing = [watch for watch in watches if watch.probe and not watch.done]
    waiting = [watch for watch in watches if not watch.probe and not watch.done]
    nodes, pods = _read(client, [watch.name for watch in waiting])
    networked = [
        watch
        for watch in waiting
        if watch.name in nodes
        and (own_network or _parts_run(watch, on_node(pods, watch.name)))
        and _network_works(watch, nodes[watch.name])
    ]
    if networked and (problem := _dns_problem(client)):
        for watch in networked:
            watch.reason = problem
        networked = []
    for watch in [*probing, *networked]:
        _probe(client, watch, image)


def _read(client: Client, names: Sequence[str]) -> tuple[dict[str, Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The existing nodes by name, and at least the pods of kube-system and of the network add-on on them."""
    if len(names) > _FEW:
        nodes = client.get("/api/v1/nodes")["items"]
        pods = client.get(_PODS)["items"] + client.get(NETWORK_PODS)["items"]
    else:
        nodes = [node for name in names if (node := client.find(f"/api/v1/nodes/{name}"))]
        pods = [
            pod
            for node in nodes
            for pod in client.get("/api/v1/pods", fieldSelector=f"spec.nodeName={node['metadata']['name']}")["items"]
        ]
    return {node["metadata"]["name"]: node for node in nodes}, pods


def _dns_problem(client: Client) -> str:
    """Why the cluster's DNS does not run, "" if one of its pods runs, or it has no pods."""
    pods = client.get(_PODS, labelSelector="k8s-app=kube-dns")["items"]
    problems = [problem for problem in map(pod_problem, pods) if problem]
    return f"the cluster's DNS does not run: {problems[0]}" if pods and len(problems) == len(pods) else ""


def _parts_run(watch: _Watch, pods: Sequence[Mapping[str, Any]]) -> bool:
    """Whether kube-proxy and the network add-on run on the node; otherwise records what the node waits for."""
    parts = {"kube-proxy": filter(is_proxy, pods), "network add-on": filter(is_network, pods)}
    for title, found in ((title, list(own)) for title, own in parts.items()):
        if not found:
            watch.reason = f"no pod of the {title} is on it yet"
            return False
        problems = [problem for problem in map(pod_problem, found) if problem]
        if problems:
            watch.reason = problems[0]
            return False
    return True


def _network_works(watch: _Watch, node: Mapping[str, Any]) -> bool:
    """Whether the probe pod can be started on the node; otherwise records what the node waits for."""
    watch.boot_id = node["status"]["nodeInfo"]["bootID"]
    if problem := not_ready(node):
        watch.reason = f"its kubelet reports: {problem}"
        waits = _NO_NETWORK in problem
        watch.no_network_since = (watch.no_network_since or time.monotonic()) if waits else 0.0
        return False
    watch.running_since = watch.running_since or time.monotonic()
    watch.reason = _network_unavailable(node, time.monotonic() - watch.running_since)
    return not watch.reason


def _has_no_network(client: Client, watches: Sequence[_Watch]) -> bool:
    """Whether all nodes have waited for a network add-on for a while, and no other node has one; adds what to do."""
    left = [watch for watch in watches if not watch.done]
    since = [watch.no_network_since for watch in left]
    if not left or not all(since) or time.monotonic() - max(since) < _NO_NETWORK_S:
        return False
    if not all(not_ready(node) for node in client.get("/api/v1/nodes")["items"]):
        return False
    for watch in left:
        watch.reason += "; the cluster has no network add-on yet: install yours, then run the command again"
    return True


def _network_unavailable(node: Mapping[str, Any], running_s: float) -> str:
    """Why the node's network is not up yet, "" if it is.

    Most network add-ons report it in a condition of the node. An add-on that has run for a while without such a
    condition counts as up. A pod that starts too early would wait longer than this check.
    """
    for condition in node["status"].get("conditions", ()):
        if condition["type"] == "NetworkUnavailable":
            return "" if condition["status"] == "False" else str(condition.get("message") or "its network is not up")
    return "" if running_s > _NO_CONDITION_S else "its network has not reported yet"


def _probe(client: Client, watch: _Watch, image: str) -> None:
    if not watch.probe:
        # Six digits with the suffix of an Event, which etcd may log, would look like a bootstrap token.
        watch.probe = f"gpunodes-ready-{secrets.token_hex(4)}"
        client.call("POST", _PODS, probe_pod(watch.probe, watch.name, image))
        watch.reason = "the probe pod has not started yet"
        return
    pod = client.find(f"{_PODS}/{watch.probe}")
    if pod is None:
        watch.probe = ""
    elif pod["status"].get("phase") == "Succeeded":
        client.call(
            "PATCH",
            f"/api/v1/nodes/{watch.name}",
            {"metadata": {"annotations": {READY_BOOT: watch.boot_id}}},
            {"fieldManager": kube_api.MANAGER},
            kube_api.MERGE,
        )
        watch.done = True
    elif pod["status"].get("phase") == "Failed":
        ended = pod["status"].get("containerStatuses", [{}])[0].get("state", {}).get("terminated", {})
        message = (ended.get("message") or pod["status"].get("message") or "").strip().replace("\n", "; ")
        watch.reason = f"a pod on it does not reach the API service: {message or 'its program failed'}"
        client.delete(f"{_PODS}/{watch.probe}", gracePeriodSeconds="0")
        watch.probe = ""
    else:
        watch.reason = pod_problem(pod) or f"a pod on it has not reached {_SERVICE} yet"


def _network_problem(client: Client, node: str) -> str:
    """Why the node's network does not run, "" if it does; this is the cause of problems of other pods on the node.

    For a program that exits repeatedly, the line of its output that tells why is included.
    """
    try:
        _, pods = _read(client, [node])
        for pod in on_node(pods, node):
            if (is_proxy(pod) or is_network(pod)) and (problem := pod_problem(pod)):
                meta = pod["metadata"]
                path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/log"
                line = _telling(str(client.get(path, tailLines=_LOG_LINES).get("message", "")))
                return f"{problem}; its log: {line[-300:]}" if line else problem
    except ApiError:
        pass
    return ""


def _telling(log: str) -> str:
    """The last line of a log that is an error: programs tell afterwards how they end. Else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern in _ERRORS:
        if found := [line for line in lines if pattern.search(line)]:
            return found[-1]
    return lines[-1] if lines else ""


def _event(client: Client, pod: str) -> str:
    """The last warning about a pod: failed image pulls and networks are reported only in events."""
    try:
        selector = f"involvedObject.name={pod},type=Warning"
        found = client.get(f"{kube_api.SYSTEM}/events", fieldSelector=selector)["items"]
    except ApiError:
        return ""
    found.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return event_text(found[-1]) if found else ""


def probe_pod(name: str, node: str, image: str) -> dict[str, Any]:
    """A pod for one node that succeeds if it can resolve and reach the API service."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "gpunodes"}},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "activeDeadlineSeconds": 600,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": "probe",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["busybox", "sh", "-c", _SCRIPT],
                    "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
                }
            ],
        },
    }


def _clean(client: Client, watches: Sequence[_Watch]) -> None:
    """Delete the probe pods of this run, and finished ones of interrupted runs."""
    own = {watch.probe for watch in watches}
    try:
        for pod in client.get(_PODS, labelSelector="app.kubernetes.io/managed-by=gpunodes")["items"]:
            name = pod["metadata"]["name"]
            ended = pod["status"].get("phase") in {"Succeeded", "Failed"}
            if name.startswith("gpunodes-ready-") and (ended or name in own):
                client.delete(f"{_PODS}/{name}", gracePeriodSeconds="0")
    except ApiError:
        return  # activeDeadlineSeconds ends the remaining pods
