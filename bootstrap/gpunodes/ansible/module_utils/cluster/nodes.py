"""The nodes of the cluster, and their pods, as the API describes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .. import causes, certificates, devices, kube_api, kubeconfig, pools, registration
from ..kube_api import ApiError, Client
from . import registry, slices

READY_BOOT = "gpunodes.dev/ready-boot"
"""Node annotation: the machine's boot id when it was verified as ready."""
GPU_BOOT = "gpunodes.dev/gpu-boot"
"""Node annotation: the machine's boot id when its GPUs were verified."""
MAINTENANCE = "gpunodes.dev/maintenance"
"""Node annotation: an administrator has taken the node out of service."""
CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
"""Node label: the node is a control plane."""
NETWORK_LABEL = "gpunodes.dev/network"
"""Label of the network add-on's pods."""
_NETWORK = "kube-flannel"
"""The namespace of the network add-on. Its users give pods of other namespaces any label."""
NETWORK_PODS = f"/api/v1/namespaces/{_NETWORK}/pods"
NETWORK_SETS = f"/apis/apps/v1/namespaces/{_NETWORK}/daemonsets"
_PATTERNS = {
    "address": r"[0-9A-Fa-f:.]{0,45}",
    "version": r"[A-Za-z0-9][A-Za-z0-9.+:~^_-]{0,127}",
    "runtime": r"[a-z0-9-]{0,50}",
    "provider_id": r"[!-~]{0,300}",
}
"""Values that a node reports, and their valid form (planner/reports.py)."""
_MOST = 1000
"""The most addresses of a node, and managed labels and taints, as there: a kubelet can write far more."""


def info(required: bool) -> dict[str, Any] | None:
    """The cluster of this control-plane machine; None if there is none and it is not ``required``.

    Raises ApiError if its API does not respond, after a longer wait if it is ``required``.
    """
    config = kubeconfig.load(kubeconfig.ADMIN)
    if config is None:
        if required:
            kube_api.admin()
        return None
    client = Client(config) if required else Client(config, patience_s=20)
    version = client.get("/version")["gitVersion"]
    nodes = client.get("/api/v1/nodes")["items"]
    pods = part_pods(client)
    # GPUs of these nodes are not allocatable.
    gpus = slices.offered(client) if any(map(slices.is_served, nodes)) else {}
    return {
        "version": version,
        "endpoint": config.server.partition("://")[2],
        "leader_election": _has_leader_election(client.find(f"{kube_api.SYSTEM}/configmaps/kubeadm-config")),
        "ca_hash": config.ca_hash,
        "nodes": [describe(node, pods, gpus) for node in nodes],
        "registry": registry.published(client),
        # Of this machine; every command can warn of certificates that end.
        "certificates": certificates.report(),
    }


def _has_leader_election(configuration: Any) -> bool:
    """Whether controller manager and scheduler elect leaders, by kubeadm's ConfigMap: without it, one only may run.

    kubeadm writes each argument as two lines, in this order. Source: kubeadm v1beta4, Arg.
    """
    text = str(((configuration or {}).get("data") or {}).get("ClusterConfiguration") or "")
    return not re.search(
        r"^ *- name: [\"']?leader-elect[\"']?\n *value: [\"']?(?i:false|f|0)[\"']?$", text, re.MULTILINE
    )


def report(required: bool) -> dict[str, Any]:
    """The cluster, or why its API does not respond if it is not ``required``: the result of ``cluster_info``."""
    try:
        return {"cluster": info(required)}
    except ApiError as error:
        if required:
            raise
        return {"cluster": None, "unresponsive": str(error)}


def describe(
    node: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], claimable: Mapping[str, Collection[str]] | None = None
) -> dict[str, Any]:
    """A node as ``cluster_info`` returns it. ``verified``: it was verified as ready since it booted, and still is.

    ``claimable`` are the GPUs in ResourceSlices, by node.
    """
    about = node["status"]["nodeInfo"]
    name = node["metadata"]["name"]
    annotations = node["metadata"].get("annotations") or {}
    labels = node["metadata"].get("labels") or {}
    addresses = [(entry["type"], entry["address"]) for entry in node["status"].get("addresses", ())]
    problem = not_ready(node)
    waiting = [reason for reason in map(pod_problem, on_node(pods, name)) if reason]
    described: dict[str, Any] = {
        "name": name,
        "role": "control_plane" if CONTROL_PLANE in labels else "worker",
        "uid": node["metadata"].get("uid", ""),
        "address": next((address for kind, address in addresses if kind == "InternalIP"), ""),
        "addresses": sorted({address for _, address in addresses}),
        "version": about["kubeletVersion"],
        "runtime": about.get("containerRuntimeVersion", "").partition(":")[0],
        "ready": not problem,
        "reason": problem or (waiting[0] if waiting else ""),
        "maintenance": annotations.get(MAINTENANCE, ""),
        "schedulable": not node.get("spec", {}).get("unschedulable", False),
        "provider_id": node.get("spec", {}).get("providerID") or "",
        "starting": registration.is_starting(node),
        "machine_id": about["machineID"],
        "product_uuid": about["systemUUID"].lower(),
        "boot_id": about["bootID"],
        "verified": not problem and not waiting and annotations.get(READY_BOOT) == about["bootID"],
        "gpus": len((claimable or {}).get(name, ()))
        if slices.is_served(node)
        else sum(devices.counts(node["status"].get("allocatable", {})).values()),
        "gpus_verified": annotations.get(GPU_BOOT) == about["bootID"],
        "plugin_away": pools.plugin_is_away(node),
        "managed": pools.managed(node),
    }
    return _without_odd_values(described)


def _without_odd_values(described: dict[str, Any]) -> dict[str, Any]:
    """Only this node is affected by them: it counts as not ready, and they are dropped."""
    invalid = [key for key, pattern in _PATTERNS.items() if not re.fullmatch(pattern, described[key])]
    managed = described["managed"]
    counts = {"addresses": described["addresses"], "managed labels": managed["labels"], "taints": managed["taints"]}
    many = [key for key, values in counts.items() if len(values) > _MOST]
    if not invalid and not many:
        return described
    reasons = [f"its kubelet reports an invalid {' and '.join(invalid)}"] if invalid else []
    if many:
        reasons.append(f"its Node object has more than {_MOST} {' and '.join(many)}: see `kubectl describe node`")
    empty: dict[str, Any] = dict.fromkeys(invalid, "")
    if "addresses" in many:
        empty["addresses"] = []
    if len(many) > ("addresses" in many):
        empty["managed"] = {"labels": {}, "taints": []}
    unverified = dict.fromkeys(("ready", "verified", "gpus_verified"), False)
    return {**described, **empty, **unverified, "reason": "; ".join(reasons)}


def unreadable(name: str, why: str) -> dict[str, Any]:
    """The same as ``describe`` for a Node object that is not as it must be, and ``why`` it is not."""
    info = dict.fromkeys(("kubeletVersion", "machineID", "systemUUID", "bootID"), "")
    described = describe({"metadata": {"name": name}, "status": {"nodeInfo": info}}, ())
    return {**described, "reason": f"its Node object cannot be read: {why}"}


def not_ready(node: Mapping[str, Any]) -> str:
    """The kubelet's message why the node is not Ready, "" if it is Ready."""
    for condition in node["status"].get("conditions", ()):
        if condition["type"] == "Ready":
            if condition["status"] == "True":
                return ""
            return str(condition.get("message") or condition.get("reason") or "not Ready")
    return "its kubelet has not reported yet"


def part_pods(client: Client) -> list[Mapping[str, Any]]:
    """The pods of kube-proxy and of the network add-on."""
    found: list[Mapping[str, Any]] = client.get(f"{kube_api.SYSTEM}/pods", labelSelector="k8s-app=kube-proxy")["items"]
    return found + list(client.get(NETWORK_PODS, labelSelector=NETWORK_LABEL)["items"])


def is_proxy(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is of kube-proxy."""
    metadata = pod["metadata"]
    return metadata["namespace"] == "kube-system" and (metadata.get("labels") or {}).get("k8s-app") == "kube-proxy"


def is_network(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is of the network add-on."""
    return pod["metadata"]["namespace"] == _NETWORK and NETWORK_LABEL in (pod["metadata"].get("labels") or {})


def on_node(pods: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The pods on a node."""
    return [pod for pod in pods if pod["spec"].get("nodeName") == name]


def pod_problem(pod: Mapping[str, Any]) -> str:
    """Why a pod is not ready, "" if it runs and is ready."""
    status = pod["status"]
    name = pod["metadata"]["name"]
    for container in [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]:
        waiting = container["state"].get("waiting", {})
        last = container.get("lastState", {}).get("terminated", {})
        if waiting and waiting.get("reason") not in {"PodInitializing", "ContainerCreating"}:
            cause = last.get("message") or waiting.get("message") or ""
            if "Image" in str(waiting.get("reason")) and (pull := causes.of_pull(str(cause))):
                cause = str(pull)
            return f"pod {name}: {waiting.get('reason')}: {cause.strip()}".rstrip(": ")
        ended = container["state"].get("terminated", {})
        if ended and ended.get("exitCode"):
            return f"pod {name}: exit code {ended['exitCode']}: {ended.get('message') or ended.get('reason')}"
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    if conditions.get("Ready", {}).get("status") == "True":
        return ""
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"pod {name}: {scheduled.get('message')}"
    return f"pod {name} is {status.get('phase', 'unknown').lower()}"


def event_text(event: Mapping[str, Any]) -> str:
    """A warning about a pod; of a failed pull its first cause."""
    message = str(event.get("message") or "")
    pull = causes.of_pull(message) if "pull" in message else None
    return f"{event.get('reason')}: {pull or message}"
