"""A Deployment of gpunodes and its pods: whether it is ready, and why it is not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from gpunodes import shape
from gpunodes.ansible.module_utils.cluster.nodes import event_text, pod_problem
from gpunodes.engine.cluster.api import NOT_FOUND, Api
from gpunodes.engine.cluster.errors import Refused, check
from gpunodes.engine.cluster.pages import PODS_AT_ONCE
from gpunodes.engine.cluster.pods import is_ready as is_pod_ready
from gpunodes.errors import GpunodesError
from gpunodes.model import printable
from gpunodes.shape import Many, Maybe, Optional

_POLL_S = 1.0
_GONE_S = 120.0
_LONGEST = 400
_TEXT = Optional(str)
_STATE = {
    "waiting": Optional({"reason": _TEXT, "message": _TEXT}),
    "terminated": Optional({"exitCode": Optional(int), "reason": _TEXT, "message": _TEXT}),
}
_CONTAINERS = Optional(Many({"state": _STATE, "lastState": Optional(_STATE), "imageID": _TEXT}, 100))
_CONDITIONS = Optional(Many({"type": str, "status": str, "message": _TEXT, "reason": _TEXT}, 100))
_NAME = shape.Pattern("a name", r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_OWNED = {
    "ownerReferences": Optional(Maybe(Many({"kind": str, "name": str, "uid": str, "controller": Optional(bool)}, 100)))
}
_POD = {
    "metadata": {"name": _NAME, **_OWNED},
    "spec": {"nodeName": _TEXT},
    "status": {
        "phase": _TEXT,
        "reason": _TEXT,
        "message": _TEXT,
        "conditions": _CONDITIONS,
        "containerStatuses": _CONTAINERS,
        "initContainerStatuses": _CONTAINERS,
    },
}
_DEPLOYMENT = {
    "metadata": {"generation": Optional(int)},
    "status": Optional(
        Maybe({
            "observedGeneration": Optional(int),
            "readyReplicas": Optional(int),
            "updatedReplicas": Optional(int),
            "conditions": _CONDITIONS,
        })
    ),
}  # fmt: skip
_EVENT = {"reason": _TEXT, "message": Optional(Maybe(str)), "lastTimestamp": Optional(Maybe(str))}
_MIRROR = "kubernetes.io/config.mirror"
"""The annotation of a pod that a kubelet made for a file of its machine."""
_KEEP = (
    "metadata.name",
    "metadata.deletionTimestamp",
    "metadata.ownerReferences",
    "metadata.annotations",
    "spec.nodeName",
    "status",
)


class Workloads(Api):
    """Deployments and their pods. The methods raise as those of ``Api``."""

    def is_ready(self, deployment: Mapping[str, Any]) -> bool:
        """Whether the pod of a Deployment is ready, and no older one."""
        check(deployment, _DEPLOYMENT, "a Deployment")
        status = deployment.get("status") or {}
        newest = status.get("observedGeneration") == deployment["metadata"].get("generation")
        return bool(newest and status.get("readyReplicas") and status.get("updatedReplicas"))

    def deployment_of(self, namespace: str, name: str) -> dict[str, Any] | None:
        """A Deployment; None without it."""
        found: dict[str, Any] | None = self._find(f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}")
        return found

    def labelled_pods(self, namespace: str, label: str) -> list[dict[str, Any]]:
        """The pods with a label; those that have ended, or are being deleted, last, and none whose status is invalid.

        A pod that failed, as after an eviction, stays in the list beside the one that replaced it. Those that a kubelet
        made for files of its machine are left out: root of any node can give them any namespace, labels and status.
        """
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={quote(label)}"
        pods = [each for each in self._list(path, _KEEP, PODS_AT_ONCE) if not shape.wrong(each, _POD)]
        return sorted((each for each in pods if not _is_of_kubelet(each)), key=_is_over)

    def serving_pod(self, namespace: str, label: str, deployment: Mapping[str, Any]) -> dict[str, Any] | None:
        """A pod of this very Deployment that is ready; None without one. What is secret may be sent to it.

        A label is no proof: nodes may create pods with any label. Only the cluster's controllers, and administrators,
        make one that belongs to a ReplicaSet of the Deployment.
        """
        for each in self.labelled_pods(namespace, label):
            if not _is_over(each) and is_pod_ready(each) and self._is_of(namespace, each, deployment):
                return each
        return None

    def _is_of(self, namespace: str, pod: Mapping[str, Any], deployment: Mapping[str, Any]) -> bool:
        """Whether a pod belongs to a ReplicaSet that the cluster has, and that to this Deployment."""
        kind, name, uid = _controller(pod)
        if kind != "ReplicaSet" or shape.wrong(name, _NAME):
            return False
        found = self._find(f"/apis/apps/v1/namespaces/{namespace}/replicasets/{name}")
        if found is None or not uid or found["metadata"]["uid"] != uid:
            return False
        check(found, {"metadata": _OWNED}, "a ReplicaSet")
        own = deployment["metadata"]
        return _controller(found) == ("Deployment", own["name"], own["uid"])

    def reason_of(self, namespace: str, label: str, deployment: Mapping[str, Any]) -> str:
        """Why a Deployment is not ready, as scheduler, kubelet or API server report it; on one line."""
        check(deployment, _DEPLOYMENT, "a Deployment")
        for each in (deployment.get("status") or {}).get("conditions") or ():
            # No pod may be made: a quota, or Pod Security.
            if each["type"] == "ReplicaFailure" and each["status"] == "True":
                return line(each.get("message") or each["type"])
        pods = self.labelled_pods(namespace, label)
        if not pods:
            return "it has no pod yet"
        current = [each for each in pods if not _is_over(each)] or pods[:1]
        problems = (self.problem_of(namespace, each) for each in current)
        return next(filter(None, problems), "") or line(
            f"pod {current[0]['metadata']['name']} is not counted as ready yet"
        )

    def problem_of(self, namespace: str, pod: Mapping[str, Any]) -> str:
        """Why a pod is not ready, "" if it is; on one line."""
        status = pod["status"]
        if status.get("phase") == "Failed" and status.get("reason"):
            # Refused or evicted by the kubelet, which says why here.
            name = pod["metadata"]["name"]
            return line(f"pod {name}: {status['reason']}: {status.get('message') or ''}".rstrip(": "))
        reason = pod_problem(pod)
        if pod["spec"].get("nodeName") and reason.endswith(("is pending", "is running")):
            reason = self._warning(namespace, pod["metadata"]["name"]) or reason
        return line(reason)

    def _warning(self, namespace: str, pod: str) -> str:
        """The last warning about a pod: a failed mount or probe is reported only in events."""
        selector = quote(f"involvedObject.name={pod},type=Warning")
        path = f"/api/v1/namespaces/{namespace}/events?fieldSelector={selector}"
        events = self._list(path, ("metadata.name", "reason", "message", "lastTimestamp"))
        valid = [each for each in events if not shape.wrong(each, _EVENT)]
        newest = max(valid, key=lambda each: str(each.get("lastTimestamp") or ""), default=None)
        return event_text(newest) if newest else ""

    def remove_object(self, path: str, uid: str) -> None:
        """Delete this very object, with what belongs to it; one that is gone is no error."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        try:
            self._call("DELETE", path, {**body, "propagationPolicy": "Background"})
        except Refused as error:
            if error.status != NOT_FOUND:
                raise

    def wait_gone(self, namespace: str, label: str) -> None:
        """Wait until no pod with a label is left; raises GpunodesError if one stays."""
        deadline = time.monotonic() + _GONE_S
        while pods := self.labelled_pods(namespace, label):
            if time.monotonic() > deadline:
                name = pods[0]["metadata"]["name"]
                raise GpunodesError(
                    f"the pod {namespace}/{name} is still there after {_GONE_S:.0f} s",
                    "a pod that ends",
                    f"see `kubectl -n {namespace} describe pod {name}`, then run the same command again",
                )
            time.sleep(_POLL_S)


def _is_over(pod: Mapping[str, Any]) -> bool:
    """Whether a pod has ended, or is being deleted."""
    return pod["status"].get("phase") in {"Succeeded", "Failed"} or "deletionTimestamp" in pod["metadata"]


def _controller(found: Mapping[str, Any]) -> tuple[str, str, str]:
    """Kind, name and uid of what an object belongs to; empty for nothing."""
    for each in found["metadata"].get("ownerReferences") or ():
        if each.get("controller"):
            return str(each["kind"]), str(each["name"]), str(each["uid"])
    return "", "", ""


def _is_of_kubelet(pod: Mapping[str, Any]) -> bool:
    """Whether a kubelet made a pod: the API server lets nodes make no others than these."""
    return _MIRROR in (pod["metadata"].get("annotations") or {}) or _controller(pod)[0] == "Node"


def line(text: Any) -> str:
    """A text of the cluster on one line, of limited length."""
    return printable(" ".join(str(text).split()))[:_LONGEST]
