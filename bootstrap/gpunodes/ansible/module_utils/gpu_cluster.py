"""Verifies nodes' GPUs in the cluster: their kubelets offer them, and a pod gets one."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from . import devices, kube_api
from .cluster import gpu_pods, slices
from .cluster.nodes import GPU_BOOT, event_text, on_node, pod_problem
from .gpu_verify import Level
from .kube_api import ApiError, Client

PLUGIN = "name=nvidia-device-plugin-ds"
DRA_DRIVER = "name=nvidia-dra-driver"
_TEMPLATES = f"{slices.API}/namespaces/kube-system/resourceclaimtemplates"
_JOBS = "/apis/batch/v1/namespaces/kube-system/jobs"
_PODS = f"{kube_api.SYSTEM}/pods"
_POLL_S = 2.0
_REFUSED = "UnexpectedAdmissionError"
"""The reason of a pod whose devices the kubelet could not allocate. Source: github.com/kubernetes/kubernetes,
pkg/kubelet/cm/admission/errors.go."""


@dataclass
class _Watch:
    """Progress of one node's verification."""

    node: str
    gpus: int
    levels: list[Level]
    offered: dict[str, int] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    """The MIG instances of each GPU, by the node's label."""
    dra: bool = False
    """Whether its GPUs are in ResourceSlices, and not allocatable."""

    @property
    def logs(self) -> str:
        """What to do about GPUs that are not served."""
        return f"see `kubectl -n kube-system logs -l {DRA_DRIVER if self.dra else PLUGIN}`"

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
                _delete(client, watch)
    return {watch.node: [asdict(level) for level in watch.levels] for watch in watches}


def pods_with_gpus(node: str, client: Client | None = None) -> list[str]:
    """The pods to which GPUs of a node are allocated, as NAMESPACE/NAME; they may be idle."""
    client = client or kube_api.admin()
    pods = client.get("/api/v1/pods", fieldSelector=f"spec.nodeName={node}")["items"]
    spaces = {pod["metadata"]["namespace"] for pod in pods if pod["spec"].get("resourceClaims")}
    claims = {space: slices.claims(client, space) for space in spaces}
    return sorted(f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in pods if _has_gpu(pod, claims))


def _has_gpu(pod: Mapping[str, Any], claims: Mapping[str, Sequence[Mapping[str, Any]] | None]) -> bool:
    """Whether a pod has a GPU by a request or by a claim; the device plugin, which serves them, has none."""
    if gpu_pods.has_request(pod):
        return True
    claimed = {**pod, "spec": {**pod["spec"], "runtimeClassName": None, "volumes": []}}
    return bool(pod["spec"].get("resourceClaims")) and gpu_pods.uses_gpu(
        claimed, claims.get(pod["metadata"]["namespace"])
    )


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
    watch.layout, watch.dra = devices.layout(label), slices.is_served(node)
    if watch.dra:
        _check_slices(client, watch)
        return
    # Sharing and slicing offer more resources than GPUs. gpu_verify checks each GPU on the machine.
    watch.offered = devices.counts(node["status"].get("allocatable", {}))
    message = f"allocatable {_formatted(watch.offered)}"
    pods = on_node(client.get(_PODS, labelSelector=PLUGIN)["items"], watch.node)
    replaced = [pod["metadata"]["name"] for pod in pods if _is_replaced(pod, label)]
    if _is_enough(watch, label) and not replaced:
        watch.levels.append(Level("kubelet", "ok", message))
        return
    problems = [f"pod {name} of the device plugin is being replaced" for name in replaced]
    problems += [problem for problem in map(pod_problem, pods) if problem]
    plugin = problems[0] if problems else "" if pods else "no pod of the device plugin runs on it"
    watch.reason = message + (f"; {plugin}" if plugin else "")


def _is_replaced(plugin: Mapping[str, Any], label: str) -> bool:
    """Whether a pod of the device plugin leaves the node: what it offered is void, and may still be allocatable."""
    metadata = plugin["metadata"]
    return bool(metadata.get("deletionTimestamp")) or (metadata.get("labels") or {}).get(devices.SHARING, "") != label


def _check_slices(client: Client, watch: _Watch) -> None:
    gpus = slices.offered(client, watch.node).get(watch.node, set())
    message = f"{len(gpus)} GPUs in ResourceSlices"
    if len(gpus) >= watch.gpus:
        watch.levels.append(Level("kubelet", "ok", message))
        return
    pods = on_node(client.get(_PODS, labelSelector=DRA_DRIVER)["items"], watch.node)
    problems = [problem for problem in map(pod_problem, pods) if problem]
    driver = problems[0] if problems else "" if pods else "no pod of the DRA driver runs on it"
    watch.reason = message + (f"; {driver}" if driver else "")


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
    if watch.dra:
        _start_claiming_job(client, watch, image)
        return
    pods = client.get("/api/v1/pods", fieldSelector=f"spec.nodeName={watch.node}")["items"]
    allocated = sum(map(gpu_pods.requested, pods), Counter[str]())
    free = [name for name, count in watch.offered.items() if allocated[name] < count]
    if not free:
        watch.levels.append(Level("pod", "skipped", f"pods use all of {_formatted(watch.offered)}"))
        _record(client, watch)
        return
    # Six digits with the suffix of an Event, which etcd may log, would look like a bootstrap token.
    watch.job = f"gpunodes-verify-{secrets.token_hex(4)}"
    client.call("POST", _JOBS, job(watch.job, watch.node, image, free[0]))
    watch.reason = "the job's pod has not started yet"


def _start_claiming_job(client: Client, watch: _Watch, image: str) -> None:
    """The same by a claim."""
    gpus = slices.offered(client, watch.node).get(watch.node, set())
    if gpus and gpus <= slices.allocated(client):
        watch.levels.append(Level("pod", "skipped", f"claims have all of {len(gpus)} GPUs"))
        _record(client, watch)
        return
    watch.job = f"gpunodes-verify-{secrets.token_hex(4)}"
    client.call("POST", _TEMPLATES, slices.claim_template(watch.job))
    client.call("POST", _JOBS, claiming_job(watch.job, watch.node, image))
    watch.reason = "the job's pod has not started yet"


def _check_job(client: Client, watch: _Watch) -> None:
    # Another node can make a mirror pod with the job's label: it proves nothing of this one.
    pods = on_node(client.get(_PODS, labelSelector=f"job-name={watch.job}")["items"], watch.node)
    if not pods:
        return
    pod = pods[0]
    name, phase = pod["metadata"]["name"], pod["status"].get("phase")
    if phase not in {"Succeeded", "Failed"}:
        watch.reason = pod_problem(pod) or f"pod {name} has not ended"
        return
    if pod["status"].get("reason") == _REFUSED:
        # The kubelet still offered devices of a plugin that has just ended.
        _delete(client, watch)
        watch.job, watch.reason = "", f"pod {name}: {_REFUSED}: {pod['status'].get('message') or ''}".rstrip(": ")
        watch.levels.clear()
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
    watch.levels.append(Level("pod", "failed", fact or message.strip()[-200:], f"one {what}", watch.logs))
    watch.done = True


def _record(client: Client, watch: _Watch) -> None:
    """Record in an annotation of the node that its GPUs are verified in this boot."""
    patch = {"metadata": {"annotations": {GPU_BOOT: watch.boot_id}}}
    client.call("PATCH", f"/api/v1/nodes/{watch.node}", patch, {"fieldManager": kube_api.MANAGER}, kube_api.MERGE)
    watch.done = True


def _give_up(client: Client, watch: _Watch, limit_s: float) -> None:
    if not watch.levels:
        wanted = f"{watch.gpus} GPUs in ResourceSlices" if watch.dra else f"{devices.GPU}: {watch.gpus}"
        if watch.layout:
            each = ", ".join(f"{count} x {name}" for name, count in watch.layout.items())
            wanted = f"{watch.gpus} MIG instances ({each} of each GPU)"
        watch.levels.append(Level("kubelet", "failed", f"{watch.reason}, after {limit_s:.0f} s", wanted, watch.logs))
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


def _delete(client: Client, watch: _Watch) -> None:
    # ttlSecondsAfterFinished deletes a job that stays.
    with contextlib.suppress(ApiError):
        client.delete(f"{_JOBS}/{watch.job}", propagationPolicy="Background")
    if watch.dra:
        with contextlib.suppress(ApiError):
            client.delete(f"{_TEMPLATES}/{watch.job}")


def claiming_job(name: str, node: str, image: str) -> dict[str, Any]:
    """A job that gets one GPU of a node by a claim, from the template of the same name, and lists it."""
    made = job(name, node, image, devices.GPU)
    pod = made["spec"]["template"]["spec"]
    pod["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": name}]
    pod["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    return made


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
