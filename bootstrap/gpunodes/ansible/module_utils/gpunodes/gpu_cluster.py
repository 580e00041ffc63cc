"""Proves nodes' GPUs from the cluster's side: their kubelets offer them, and a pod gets one."""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from . import cluster, devices, kube_api
from .gpu_verify import Level
from .kube_api import ApiError, Client

PLUGIN = "name=nvidia-device-plugin-ds"
_MERGE = "application/merge-patch+json"
_JOBS = "/apis/batch/v1/namespaces/kube-system/jobs"
_PODS = "/api/v1/namespaces/kube-system/pods"
_POLL_S = 2.0


@dataclass
class _Watch:
    """How far one node has come."""

    node: str
    gpus: int
    levels: list[Level]
    offered: dict[str, int] = field(default_factory=dict)
    boot_id: str = ""
    why: str = ""
    job: str = ""
    done: bool = False


def prove(nodes: Mapping[str, int], image: str, limit_s: float) -> dict[str, list[dict[str, str]]]:
    """By node, its levels kubelet and pod; ``nodes`` are their names with the numbers of their GPUs."""
    client = kube_api.admin()
    watches = [_Watch(name, gpus, []) for name, gpus in nodes.items()]
    deadline = time.monotonic() + limit_s
    try:
        while True:
            for watch in watches:
                if not watch.done:
                    try:
                        _advance(client, watch, image)
                    except ApiError as error:
                        watch.why = str(error)
            if all(watch.done for watch in watches) or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        for watch in watches:
            if not watch.done:
                _give_up(client, watch, limit_s)
    finally:
        for watch in watches:
            if watch.job:
                _delete(client, watch.job)
    return {watch.node: [asdict(level) for level in watch.levels] for watch in watches}


def users(node: str) -> list[str]:
    """The pods of a node that have GPUs of it, as NAMESPACE/NAME; whether they use them now nobody knows."""
    pods = kube_api.admin().get("/api/v1/pods", fieldSelector=f"spec.nodeName={node}")["items"]
    return sorted(f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in pods if _taken(pod))


def _advance(client: Client, watch: _Watch, image: str) -> None:
    """Take one node as far as it goes now."""
    if not watch.levels:
        _kubelet(client, watch)
    if watch.levels and not watch.job and not watch.done:
        _ask(client, watch, image)
    if watch.job:
        _hear(client, watch)


def _kubelet(client: Client, watch: _Watch) -> None:
    node = client.find(f"/api/v1/nodes/{watch.node}")
    if node is None:
        watch.why = "it is no node of the cluster"
        return
    watch.boot_id = node["status"]["nodeInfo"]["bootID"]
    # Shared or cut into slices there are more of them than GPUs; each is looked at from the machine's side as well.
    watch.offered = devices.counts(node["status"].get("allocatable", {}))
    message = f"allocatable {_told(watch.offered)}"
    if sum(watch.offered.values()) >= watch.gpus:
        watch.levels.append(Level("kubelet", "ok", message))
        return
    pods = cluster.on_node(client.get("/api/v1/pods", labelSelector=PLUGIN)["items"], watch.node)
    problems = [problem for problem in map(cluster.pod_problem, pods) if problem]
    plugin = problems[0] if problems else "" if pods else "no pod of the device plugin is on it"
    watch.why = message + (f"; {plugin}" if plugin else "")


def _told(offered: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in (offered or {devices.GPU: 0}).items())


def _ask(client: Client, watch: _Watch, image: str) -> None:
    """Start a job that asks for one GPU of the node, unless all are in use: then pods have them already."""
    pods = client.get("/api/v1/pods", fieldSelector=f"spec.nodeName={watch.node}")["items"]
    taken = sum(map(_taken, pods), Counter[str]())
    free = [name for name, count in watch.offered.items() if taken[name] < count]
    if not free:
        watch.levels.append(Level("pod", "skipped", f"pods use all of {_told(watch.offered)}"))
        _note(client, watch)
        return
    watch.job = f"gpunodes-verify-{secrets.token_hex(3)}"
    client.call("POST", _JOBS, job(watch.job, watch.node, image, free[0]))
    watch.why = "the job's pod was not started yet"


def _taken(pod: Mapping[str, Any]) -> Counter[str]:
    """By resource, what of a node's GPUs a pod has; nothing once it has ended."""
    taken = Counter[str]()
    if pod["status"].get("phase") not in {"Succeeded", "Failed"}:
        for container in pod["spec"]["containers"]:
            taken.update(devices.counts((container.get("resources") or {}).get("limits") or {}))
    return taken


def _hear(client: Client, watch: _Watch) -> None:
    pods = client.get(_PODS, labelSelector=f"job-name={watch.job}")["items"]
    if not pods:
        return
    pod = pods[0]
    name, phase = pod["metadata"]["name"], pod["status"].get("phase")
    if phase not in {"Succeeded", "Failed"}:
        watch.why = cluster.pod_problem(pod) or f"pod {name} has not ended"
        return
    message = str(client.get(f"{_PODS}/{name}/log").get("message", ""))
    # Its slices, or the one that was given, are listed below a GPU with identities of their own: MIG-...
    seen = re.findall(r"UUID: (GPU-\S+?)\)", message)
    if phase == "Succeeded" and len(seen) == 1:
        watch.levels.append(Level("pod", "ok", f"a job that asked for one GPU got {seen[0]}"))
        _note(client, watch)
        return
    fact = f"the job's nvidia-smi listed {len(seen)} GPUs" if phase == "Succeeded" else cluster.pod_problem(pod)
    remedy = "see `kubectl -n kube-system logs -l name=nvidia-device-plugin-ds`"
    watch.levels.append(Level("pod", "failed", fact or message.strip()[-200:], "one GPU", remedy))
    watch.done = True


def _note(client: Client, watch: _Watch) -> None:
    """Note at the node that its GPUs are proven in this boot."""
    patch = {"metadata": {"annotations": {cluster.GPU_BOOT: watch.boot_id}}}
    client.call("PATCH", f"/api/v1/nodes/{watch.node}", patch, {"fieldManager": kube_api.MANAGER}, _MERGE)
    watch.done = True


def _give_up(client: Client, watch: _Watch, limit_s: float) -> None:
    logs = "see `kubectl -n kube-system logs -l name=nvidia-device-plugin-ds`"
    if not watch.levels:
        watch.levels.append(
            Level("kubelet", "failed", f"{watch.why}, after {limit_s:.0f} s", f"{devices.GPU}: {watch.gpus}", logs)
        )
        return
    for event in _events(client, watch.job):
        watch.why = event
    watch.levels.append(
        Level("pod", "failed", f"{watch.why}, after {limit_s:.0f} s", "a job that gets a GPU and ends",
              f"see `kubectl describe node {watch.node}`")
    )  # fmt: skip


def _events(client: Client, job_name: str) -> list[str]:
    """The last warning about a job's pod: image pulls that fail are only told there."""
    try:
        found = client.get("/api/v1/namespaces/kube-system/events", fieldSelector="type=Warning")["items"]
    except ApiError:
        return []
    ours = [event for event in found if str(event.get("involvedObject", {}).get("name", "")).startswith(job_name)]
    ours.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return [f"{event['reason']}: {event['message']}" for event in ours[-1:]]


def _delete(client: Client, name: str) -> None:
    try:
        client.delete(f"{_JOBS}/{name}", propagationPolicy="Background")
    except ApiError:
        return  # it is deleted some minutes after its end


def job(name: str, node: str, image: str, resource: str) -> dict[str, Any]:
    """A job that asks for one GPU of a node (or a share or slice of one: ``resource``) and lists what it got."""
    here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "gpunodes"}},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": 900,
            "ttlSecondsAfterFinished": 300,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 0,
                    "tolerations": [{"operator": "Exists"}],
                    "affinity": {
                        "nodeAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}
                        }
                    },
                    "containers": [
                        {
                            "name": "verify",
                            "image": image,
                            "imagePullPolicy": "IfNotPresent",
                            "command": ["nvidia-smi", "-L"],
                            "terminationMessagePolicy": "FallbackToLogsOnError",
                            "resources": {"limits": {resource: "1"}},
                        }
                    ],
                }
            },
        },
    }
