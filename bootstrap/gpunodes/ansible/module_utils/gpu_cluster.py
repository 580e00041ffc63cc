"""Verifies nodes' GPUs in the cluster: their kubelets offer them, and a pod gets one."""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from . import devices, kube_api
from .cluster.nodes import GPU_BOOT, event_text, on_node, pod_problem
from .gpu_verify import Level
from .kube_api import ApiError, Client

PLUGIN = "name=nvidia-device-plugin-ds"
_JOBS = "/apis/batch/v1/namespaces/kube-system/jobs"
_PODS = f"{kube_api.SYSTEM}/pods"
_POLL_S = 2.0


@dataclass
class _Watch:
    """Progress of one node's verification."""

    node: str
    gpus: int
    levels: list[Level]
    offered: dict[str, int] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    """The MIG instances of each GPU, by the node's label."""
    boot_id: str = ""
    reason: str = ""
    job: str = ""
    done: bool = False


def verify(nodes: Mapping[str, int], image: str, limit_s: float) -> dict[str, list[dict[str, str]]]:
    """Results of the levels kubelet and pod by node; ``nodes`` maps names to numbers of GPUs."""
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
                        watch.reason = str(error)
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


def pods_with_gpus(node: str, client: Client | None = None) -> list[str]:
    """The pods to which GPUs of a node are allocated, as NAMESPACE/NAME; they may be idle."""
    client = client or kube_api.admin()
    pods = client.get("/api/v1/pods", fieldSelector=f"spec.nodeName={node}")["items"]
    return sorted(f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in pods if _allocated(pod))


def _advance(client: Client, watch: _Watch, image: str) -> None:
    """Perform the next possible steps for one node."""
    if not watch.levels:
        _check_kubelet(client, watch)
    if watch.levels and not watch.job and not watch.done:
        _start_job(client, watch, image)
    if watch.job:
        _check_job(client, watch)


def _check_kubelet(client: Client, watch: _Watch) -> None:
    node = client.find(f"/api/v1/nodes/{watch.node}")
    if node is None:
        watch.reason = "it is not a node of the cluster"
        return
    watch.boot_id = node["status"]["nodeInfo"]["bootID"]
    label = (node["metadata"].get("labels") or {}).get(devices.SHARING, "")
    watch.layout = devices.layout(label)
    # Sharing and slicing offer more resources than GPUs. gpu_verify checks each GPU on the machine.
    watch.offered = devices.counts(node["status"].get("allocatable", {}))
    message = f"allocatable {_formatted(watch.offered)}"
    if _is_enough(watch, label):
        watch.levels.append(Level("kubelet", "ok", message))
        return
    pods = on_node(client.get("/api/v1/pods", labelSelector=PLUGIN)["items"], watch.node)
    problems = [problem for problem in map(pod_problem, pods) if problem]
    plugin = problems[0] if problems else "" if pods else "no pod of the device plugin runs on it"
    watch.reason = message + (f"; {plugin}" if plugin else "")


def _is_enough(watch: _Watch, label: str) -> bool:
    """Whether a node offers all GPUs; of MIG instances exactly those of the layout, by their names."""
    if not watch.layout:
        return sum(watch.offered.values()) >= watch.gpus
    wanted = devices.offered(label, watch.gpus // sum(watch.layout.values()))
    return wanted == {name: count for name, count in watch.offered.items() if count}


def _formatted(offered: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in (offered or {devices.GPU: 0}).items())


def _start_job(client: Client, watch: _Watch, image: str) -> None:
    """Start a job that requests one GPU of the node; if all are allocated, pods evidently get them."""
    pods = client.get("/api/v1/pods", fieldSelector=f"spec.nodeName={watch.node}")["items"]
    allocated = sum(map(_allocated, pods), Counter[str]())
    free = [name for name, count in watch.offered.items() if allocated[name] < count]
    if not free:
        watch.levels.append(Level("pod", "skipped", f"pods use all of {_formatted(watch.offered)}"))
        _record(client, watch)
        return
    # Six digits with the suffix of an Event, which etcd may log, would look like a bootstrap token.
    watch.job = f"gpunodes-verify-{secrets.token_hex(4)}"
    client.call("POST", _JOBS, job(watch.job, watch.node, image, free[0]))
    watch.reason = "the job's pod has not started yet"


def _allocated(pod: Mapping[str, Any]) -> Counter[str]:
    """GPU resources that are allocated to a pod, by name; none after it ended."""
    allocated = Counter[str]()
    if pod["status"].get("phase") not in {"Succeeded", "Failed"}:
        for container in pod["spec"]["containers"]:
            allocated.update(devices.counts((container.get("resources") or {}).get("limits") or {}))
    return allocated


def _check_job(client: Client, watch: _Watch) -> None:
    pods = client.get(_PODS, labelSelector=f"job-name={watch.job}")["items"]
    if not pods:
        return
    pod = pods[0]
    name, phase = pod["metadata"]["name"], pod["status"].get("phase")
    if phase not in {"Succeeded", "Failed"}:
        watch.reason = pod_problem(pod) or f"pod {name} has not ended"
        return
    message = str(client.get(f"{_PODS}/{name}/log").get("message", ""))
    # nvidia-smi lists slices below their GPU, with separate identities (MIG-...).
    kind, what = ("MIG", "MIG instance") if watch.layout else ("GPU", "GPU")
    listed = re.findall(rf"UUID: ({kind}-\S+?)\)", message)
    if phase == "Succeeded" and len(listed) == 1:
        watch.levels.append(Level("pod", "ok", f"a job that requested one {what} got {listed[0]}"))
        _record(client, watch)
        return
    fact = f"the job's nvidia-smi listed {len(listed)} {what}s" if phase == "Succeeded" else pod_problem(pod)
    remedy = "see `kubectl -n kube-system logs -l name=nvidia-device-plugin-ds`"
    watch.levels.append(Level("pod", "failed", fact or message.strip()[-200:], f"one {what}", remedy))
    watch.done = True


def _record(client: Client, watch: _Watch) -> None:
    """Record in an annotation of the node that its GPUs are verified in this boot."""
    patch = {"metadata": {"annotations": {GPU_BOOT: watch.boot_id}}}
    client.call("PATCH", f"/api/v1/nodes/{watch.node}", patch, {"fieldManager": kube_api.MANAGER}, kube_api.MERGE)
    watch.done = True


def _give_up(client: Client, watch: _Watch, limit_s: float) -> None:
    logs = "see `kubectl -n kube-system logs -l name=nvidia-device-plugin-ds`"
    if not watch.levels:
        wanted = f"{devices.GPU}: {watch.gpus}"
        if watch.layout:
            each = ", ".join(f"{count} x {name}" for name, count in watch.layout.items())
            wanted = f"{watch.gpus} MIG instances ({each} of each GPU)"
        watch.levels.append(Level("kubelet", "failed", f"{watch.reason}, after {limit_s:.0f} s", wanted, logs))
        return
    for event in _events(client, watch.job):
        watch.reason = event
    watch.levels.append(
        Level("pod", "failed", f"{watch.reason}, after {limit_s:.0f} s", "a job that gets a GPU and completes",
              f"see `kubectl describe node {watch.node}`")
    )  # fmt: skip


def _events(client: Client, job_name: str) -> list[str]:
    """The last warning about a job's pod: failed image pulls are reported only in events."""
    try:
        found = client.get(f"{kube_api.SYSTEM}/events", fieldSelector="type=Warning")["items"]
    except ApiError:
        return []
    matching = [event for event in found if str(event.get("involvedObject", {}).get("name", "")).startswith(job_name)]
    matching.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return [event_text(event) for event in matching[-1:]]


def _delete(client: Client, name: str) -> None:
    try:
        client.delete(f"{_JOBS}/{name}", propagationPolicy="Background")
    except ApiError:
        return  # ttlSecondsAfterFinished deletes it


def job(name: str, node: str, image: str, resource: str) -> dict[str, Any]:
    """A job that requests one GPU of a node (or a share or slice of one: ``resource``) and lists the GPU."""
    this_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
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
                            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [this_node]}
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
