"""Moves what the cluster keeps about its endpoint: how machines join it, and how kube-proxy and pods use it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import kube_api, kubeconfig
from ..kube_api import Client
from ..kubeadm import cluster_configuration
from ..kubeadm.api_certificate import KUBEADM_CONFIG
from ..problem import MachineProblem
from ..report import Difference, Report
from .nodes import NETWORK_LABEL, NETWORK_SETS, is_proxy, not_ready, part_pods, pod_problem

ANNOTATION = "gpunodes.dev/endpoint"
"""Annotation of kube-proxy's pods: the endpoint in the ConfigMap with which they started."""
_CLUSTER_INFO = "/api/v1/namespaces/kube-public/configmaps/cluster-info"
_PROXY_CONFIG = f"{kube_api.SYSTEM}/configmaps/kube-proxy"
_PROXY = "/apis/apps/v1/namespaces/kube-system/daemonsets/kube-proxy"
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_POLL_S = 2.0
_AT_ONCE = 0.1
"""The share of nodes on which a pod is replaced at the same time."""


def move(client: Client, endpoint: str, limit_s: float, check: bool) -> Report:
    """Bring all objects to this endpoint (HOST:PORT), and replace the pods that still use another one.

    Each step compares the object itself, so that an interrupted run is continued. Raises MachineProblem if pods on
    nodes that are ready are not replaced within ``limit_s``.
    """
    report = Report()
    for step in (_kubeadm_config, _cluster_info, _proxy, _network):
        step(client, endpoint, report, check)
    pods = _pods(client)
    ready = _ready_nodes(client)
    if stale := [pod for pod in pods if _node(pod) in ready and not is_current(pod, endpoint)]:
        names = {pod["metadata"]["name"]: "earlier endpoint" for pod in stale}
        report.add(f"replace {len(stale)} pods of kube-proxy and the network", Difference("pods", names, {}))
    if report.actions and not check:
        _replace(client, endpoint, limit_s)
    return report


def others(client: Client, endpoint: str) -> list[str]:
    """The other objects whose containers reach the API at a fixed address that is not this endpoint's."""
    host = endpoint.rpartition(":")[0]
    found = []
    for kind, title in (("daemonsets", "DaemonSet"), ("deployments", "Deployment")):
        for each in client.get(f"/apis/apps/v1/{kind}")["items"]:
            for variable in _variables(each["spec"]["template"]["spec"]):
                if variable["name"] == _HOST and variable.get("value") not in (None, host):
                    found.append(f"{title} {each['metadata']['namespace']}/{each['metadata']['name']}")
    return list(dict.fromkeys(found))


def _patch(client: Client, path: str, before: Mapping[str, Any], change: Mapping[str, Any]) -> None:
    """Change an object, unless another command has changed it meanwhile: then the API reports a conflict."""
    body = {**change, "metadata": {"resourceVersion": before["metadata"].get("resourceVersion")}}
    client.call("PATCH", path, body, {"fieldManager": kube_api.MANAGER}, kube_api.MERGE)


def _kubeadm_config(client: Client, endpoint: str, report: Report, check: bool) -> None:
    found = client.find(KUBEADM_CONFIG) or {}
    text = str((found.get("data") or {}).get("ClusterConfiguration") or "")
    earlier = cluster_configuration.value(text, "controlPlaneEndpoint")
    hosts = [each.rpartition(":")[0] or each for each in (earlier, endpoint) if each]
    names = list(dict.fromkeys([*cluster_configuration.names(text), *hosts]))
    after = cluster_configuration.changed(text, endpoint, names)
    if after != text:
        report.add("change kubeadm's configuration in the cluster", Difference("ConfigMap kubeadm-config", text, after))
        if not check:
            _patch(client, KUBEADM_CONFIG, found, {"data": {"ClusterConfiguration": after}})


def _cluster_info(client: Client, endpoint: str, report: Report, check: bool) -> None:
    """What machines that join read first. The controller manager signs it again."""
    _of_config_map(client, _CLUSTER_INFO, "kubeconfig", endpoint, report, check)


def _of_config_map(client: Client, path: str, key: str, endpoint: str, report: Report, check: bool) -> bool:
    """Change the server in the kubeconfig of a ConfigMap; whether the ConfigMap exists."""
    found = client.find(path)
    text = str(((found or {}).get("data") or {}).get(key) or "")
    if found is None or not text:
        return False  # an administrator has removed it
    after = kubeconfig.with_server(text, f"https://{endpoint}")
    if after != text:
        name = path.rpartition("/")[2]
        server = {"server": kubeconfig.parse(text).server} if "certificate-authority-data" in text else {}
        after_server = {"server": f"https://{endpoint}"}
        report.add(f"change the ConfigMap {name}", Difference(f"ConfigMap {name}", server, after_server))
        if not check:
            _patch(client, path, found, {"data": {key: after}})
    return True


def _proxy(client: Client, endpoint: str, report: Report, check: bool) -> None:
    found = client.find(_PROXY)
    if found is None or not _of_config_map(client, _PROXY_CONFIG, "kubeconfig.conf", endpoint, report, check):
        return
    present = (found["spec"]["template"]["metadata"].get("annotations") or {}).get(ANNOTATION, "")
    if present != endpoint:
        report.add(
            "restart kube-proxy", Difference("DaemonSet kube-proxy", {ANNOTATION: present}, {ANNOTATION: endpoint})
        )
        if not check:
            template = {"metadata": {"annotations": {ANNOTATION: endpoint}}}
            _patch(client, _PROXY, found, {"spec": {"template": template}})


def _network(client: Client, endpoint: str, report: Report, check: bool) -> None:
    """The network add-on of gpunodes, which reaches the API without kube-proxy."""
    host, _, port = endpoint.rpartition(":")
    for found in client.get(NETWORK_SETS)["items"]:
        template = found["spec"]["template"]
        if NETWORK_LABEL not in (template["metadata"].get("labels") or {}):
            continue
        before = {each["name"]: each.get("value") for each in _variables(template["spec"])}
        after = {name: value for name, value in ((_HOST, host), (_PORT, port)) if name in before}
        if any(before[name] != value for name, value in after.items()):
            meta = found["metadata"]
            title = f"DaemonSet {meta['name']}"
            report.add(f"change the {title}", Difference(title, {name: before[name] for name in after}, after))
            if not check:
                spec = {
                    kind: [_with(container, after) for container in template["spec"][kind]]
                    for kind in ("initContainers", "containers")
                    if template["spec"].get(kind)
                }
                path = f"{NETWORK_SETS}/{meta['name']}"
                _patch(client, path, found, {"spec": {"template": {"spec": spec}}})


def _variables(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    containers = [*spec.get("initContainers", ()), *spec.get("containers", ())]
    return [variable for container in containers for variable in container.get("env") or ()]


def _with(container: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """A container with these values of variables that it has."""
    variables = [
        {**each, "value": values[each["name"]]} if each["name"] in values else each
        for each in container.get("env") or ()
    ]
    return {**container, **({"env": variables} if variables else {})}


def is_current(pod: Mapping[str, Any], endpoint: str) -> bool:
    """Whether a pod of kube-proxy or of the network add-on was started with this endpoint."""
    if is_proxy(pod):
        return bool((pod["metadata"].get("annotations") or {}).get(ANNOTATION) == endpoint)
    values = {each["name"]: each.get("value") for each in _variables(pod["spec"])}
    return _HOST not in values or values[_HOST] == endpoint.rpartition(":")[0]


def _pods(client: Client) -> list[Mapping[str, Any]]:
    """The pods of kube-proxy and of the network add-on that are not being deleted."""
    return [pod for pod in part_pods(client) if not pod["metadata"].get("deletionTimestamp") and _node(pod)]


def _node(pod: Mapping[str, Any]) -> str:
    return str(pod["spec"].get("nodeName") or "")


def _kind(pod: Mapping[str, Any]) -> str:
    return str(is_proxy(pod))


def _ready_nodes(client: Client) -> set[str]:
    return {node["metadata"]["name"] for node in client.get("/api/v1/nodes")["items"] if not not_ready(node)}


def _replace(client: Client, endpoint: str, limit_s: float) -> None:
    """Replace the pods on nodes that are ready, some at a time.

    The controller's own rolling update stops while any node is down, because that node's pod counts as unavailable.
    """
    deadline = time.monotonic() + limit_s
    wanted: set[tuple[str, str]] = set()
    while True:
        ready = _ready_nodes(client)
        pods = [pod for pod in _pods(client) if _node(pod) in ready]
        wanted |= {(_kind(pod), _node(pod)) for pod in pods}
        current = [pod for pod in pods if is_current(pod, endpoint)]
        done = {(_kind(pod), _node(pod)) for pod in current if not pod_problem(pod)}
        left = {each for each in wanted if each[1] in ready} - done
        if not left:
            return
        if time.monotonic() > deadline:
            raise MachineProblem(*_late(left, current))
        stale = [pod for pod in pods if not is_current(pod, endpoint)]
        waiting = len(left) - len(stale)
        for pod in stale[: max(0, max(1, int(len(ready) * _AT_ONCE)) - waiting)]:
            meta = pod["metadata"]
            client.delete(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}")
        time.sleep(_POLL_S)


def _late(left: set[tuple[str, str]], current: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    problem = next((found for found in map(pod_problem, current) if found), "")
    names = sorted({node for _, node in left})
    return (
        f"pods of kube-proxy or the network on {', '.join(names[:4])} do not run with the new endpoint"
        + (f": {problem}" if problem else ""),
        "running pods on every node that is ready",
        "see `kubectl get pods --all-namespaces --output wide`, then run the command again",
    )
