"""Verifies shared storage: claims are bound, and pods on two nodes write and read there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import kube_api
from ..kube_api import ApiError, Client
from ..problem import MachineProblem
from .nodes import event_text, not_ready, pod_problem

_POLL_S = 2.0
_ENDED = {"Succeeded", "Failed"}
_USER = 65532
"""The user of the pods: not root, which a server may squash."""
_PREFIX = "gpunodes-storage-"
_LABEL = "app.kubernetes.io/managed-by"
_DENIED = ("Permission denied", "Read-only file system", "Operation not permitted")


def _script(command: str) -> str:
    """A command with its error as the pod's message."""
    return f'out=$(busybox sh -c "{command}" 2>&1) || {{{{ echo "$out" >/dev/termination-log; exit 1; }}}}'


# Closing the file sends it to the server; the name is new, so no node has it in its cache.
_WRITE = _script("echo {text} >/share/{file}")
_READ = _script("busybox grep -qx {text} /share/{file} && busybox rm -f /share/{file}")


def verify(claims: Sequence[tuple[str, str]], image: str, limit_s: float) -> list[str]:
    """Verify the claims (namespace, name); returns sentences about each share.

    Of the claims with the same name, which have the same share, one is used by pods. Raises MachineProblem for the
    first problem.
    """
    client = kube_api.admin()
    _clean(client, claims)
    _wait_bound(client, claims, limit_s)
    bound = f"{len(claims)} claim{'s are' if len(claims) > 1 else ' is'} bound"
    nodes = ready_nodes(client.get("/api/v1/nodes")["items"]) if image else []
    if len(nodes) < 2:  # noqa: PLR2004 - one writes, another one reads
        why = f"{len(nodes)} of 2 nodes are ready for them" if image else "there is no image for them"
        return [f"{bound}; not verified that pods on two nodes write and read: {why}"]
    shares = {name: namespace for namespace, name in reversed(claims)}
    return [bound, *(_use(client, (shares[name], name), nodes[:2], image, limit_s) for name in sorted(shares))]


def is_leftover(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is of a verification that was interrupted, and has ended: nothing else deletes it."""
    meta = pod["metadata"]
    own = (meta.get("labels") or {}).get(_LABEL) == "gpunodes" and str(meta["name"]).startswith(_PREFIX)
    return own and (pod.get("status") or {}).get("phase") in _ENDED


def _clean(client: Client, claims: Sequence[tuple[str, str]]) -> None:
    """Delete what an interrupted verification left: it would keep its claim."""
    for namespace in dict.fromkeys(namespace for namespace, _ in claims):
        folder = f"/api/v1/namespaces/{namespace}/pods"
        for pod in client.get(folder, labelSelector=f"{_LABEL}=gpunodes")["items"]:
            if is_leftover(pod):
                client.delete(f"{folder}/{pod['metadata']['name']}")


def _wait_bound(client: Client, claims: Sequence[tuple[str, str]], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while reasons := [reason for claim in claims if (reason := _unbound(client, *claim))]:
        if time.monotonic() >= deadline:
            raise MachineProblem(
                f"{reasons[0]}, after {limit_s:.0f} s",
                "a claim that is bound",
                "run `gpunodes storage up`, and see `kubectl describe pvc`",
            )
        time.sleep(_POLL_S)


def _unbound(client: Client, namespace: str, name: str) -> str:
    found = client.find(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}")
    phase = str(((found or {}).get("status") or {}).get("phase") or "without a state") if found else "missing"
    return "" if phase == "Bound" else f"the claim {namespace}/{name} is {phase}"


def ready_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the nodes that can take a pod now, workers first."""
    usable = [each for each in nodes if not (each.get("spec") or {}).get("unschedulable") and not not_ready(each)]
    control = "node-role.kubernetes.io/control-plane"
    return [
        str(each["metadata"]["name"])
        for each in sorted(usable, key=lambda each: control in (each["metadata"].get("labels") or {}))
    ]


def _use(client: Client, claim: tuple[str, str], nodes: Sequence[str], image: str, limit_s: float) -> str:
    """A pod writes on the first node, a pod on the second reads; a sentence about it."""
    token = secrets.token_hex(4)
    values = {"text": token, "file": f".gpunodes-{token}"}
    for node, script, verb in zip(nodes, (_WRITE, _READ), ("write", "read"), strict=True):
        pod = pod_on(node, f"{_PREFIX}{verb}-{token}", claim, image, script.format(**values))
        problem = _run(client, pod, limit_s)
        if verb == "write" and any(each in problem for each in _DENIED):
            return f"{claim[1]}: mounted on {node}, where user {_USER} may not write ({problem})"
        if problem:
            raise MachineProblem(
                f"a pod on {node} cannot {verb} in the share {claim[1]}: {problem}",
                f"pods on {' and '.join(nodes)} that write and read there",
                "check that the server exports the share to this node, and the folder's mode",
            )
    return f"{claim[1]}: {nodes[0]} wrote, {nodes[1]} read"


def _run(client: Client, pod: Mapping[str, Any], limit_s: float) -> str:
    """Run a pod to its end; returns why it failed, "" if it did not. It is gone afterwards, with its mount."""
    folder = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods"
    path, deadline, reason = f"{folder}/{pod['metadata']['name']}", time.monotonic() + limit_s, "it was not started"
    try:
        client.call("POST", folder, pod)
        while time.monotonic() < deadline:
            found = client.find(path)
            phase = ((found or {}).get("status") or {}).get("phase")
            if found and phase in _ENDED:
                return "" if phase == "Succeeded" else _message(found)
            reason = (found and pod_problem(found)) or "it has not started"
            time.sleep(_POLL_S)
        return f"{_event(client, pod) or reason}, after {limit_s:.0f} s"
    finally:
        _delete(client, path)


def _message(pod: Mapping[str, Any]) -> str:
    statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
    ended = ((statuses[0].get("state") or {}).get("terminated") or {}).get("message")
    return " ".join(str(ended or (pod.get("status") or {}).get("message") or "its program failed").split())[:300]


def _event(client: Client, pod: Mapping[str, Any]) -> str:
    """The last warning about a pod: a failed mount is reported only in events."""
    meta = pod["metadata"]
    try:
        selector = f"involvedObject.name={meta['name']},type=Warning"
        found = client.get(f"/api/v1/namespaces/{meta['namespace']}/events", fieldSelector=selector)["items"]
    except ApiError:
        return ""
    found.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return event_text(found[-1]) if found else ""


def _delete(client: Client, path: str) -> None:
    """Delete a pod and wait a moment until it is gone: its mount must not stop `gpunodes storage down`."""
    try:
        client.delete(path)
        deadline = time.monotonic() + 30
        while client.find(path) is not None and time.monotonic() < deadline:
            time.sleep(1)
    except ApiError:
        return  # activeDeadlineSeconds ends it


def pod_on(node: str, name: str, claim: tuple[str, str], image: str, script: str) -> dict[str, Any]:
    """A pod for one node that mounts the claim at /share; it meets the Pod Security Standard "restricted"."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": claim[0],
            "labels": {_LABEL: "gpunodes"},
        },
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "activeDeadlineSeconds": 600,
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "verify",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["busybox", "sh", "-c", script],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "16Mi"},
                        "limits": {"cpu": "100m", "memory": "64Mi"},
                    },
                    "volumeMounts": [{"name": "share", "mountPath": "/share"}],
                }
            ],
            "volumes": [{"name": "share", "persistentVolumeClaim": {"claimName": claim[1]}}],
        },
    }
