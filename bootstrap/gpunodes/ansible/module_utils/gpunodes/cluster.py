"""The cluster through its API: nodes, join tokens, objects, and the verification that nodes are ready."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import devices, kube_api, kubeadm, kubeconfig, pools
from .kube_api import ApiError, Client
from .problem import MachineProblem
from .process import run

READY_BOOT = "gpunodes.dev/ready-boot"
"""Node annotation: the machine's boot id when it was verified as ready."""
GPU_BOOT = "gpunodes.dev/gpu-boot"
"""Node annotation: the machine's boot id when its GPUs were verified."""
MAINTENANCE = "gpunodes.dev/maintenance"
"""Node annotation: an administrator has taken the node out of service."""
_SYSTEM = "/api/v1/namespaces/kube-system"
_MIRROR = "kubernetes.io/config.mirror"
_MERGE = "application/merge-patch+json"
_GONE = (404, 409)
"""Status codes for a pod that no longer exists, or whose name another pod has."""
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
_RUN = "gpunodes.dev/run"
"""Annotation of a token: the run that uses it, by its name as a holder of Leases."""
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
_POLL_S = 2.0
_PATTERNS = {
    "address": r"[0-9A-Fa-f:.]{0,45}",
    "version": r"[A-Za-z0-9][A-Za-z0-9.+:~^_-]{0,127}",
    "runtime": r"[a-z0-9-]{0,50}",
}
"""Values that a node reports, and their valid form (planner/reports.py)."""
NETWORK_LABEL = "gpunodes.dev/network"
"""Label of the network add-on's pods."""


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
    pods = client.get(f"{_SYSTEM}/pods", labelSelector="k8s-app=kube-proxy")["items"]
    pods += client.get("/api/v1/pods", labelSelector=NETWORK_LABEL)["items"]
    return {
        "version": version,
        "endpoint": config.server.partition("://")[2],
        "ca_hash": config.ca_hash,
        "nodes": [describe(node, pods) for node in nodes],
    }


def report(required: bool) -> dict[str, Any]:
    """The cluster, or why its API does not respond if it is not ``required``: the result of ``cluster_info``."""
    try:
        return {"cluster": info(required)}
    except ApiError as error:
        if required:
            raise
        return {"cluster": None, "unresponsive": str(error)}


def describe(node: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A node as ``cluster_info`` returns it. ``verified``: it was verified as ready since it booted, and still is."""
    about = node["status"]["nodeInfo"]
    name = node["metadata"]["name"]
    annotations = node["metadata"].get("annotations") or {}
    labels = node["metadata"].get("labels") or {}
    addresses = [(entry["type"], entry["address"]) for entry in node["status"].get("addresses", ())]
    problem = not_ready(node)
    waiting = [reason for reason in map(pod_problem, on_node(pods, name)) if reason]
    described: dict[str, Any] = {
        "name": name,
        "role": "control_plane" if _CONTROL_PLANE in labels else "worker",
        "uid": node["metadata"].get("uid", ""),
        "address": next((address for kind, address in addresses if kind == "InternalIP"), ""),
        "addresses": sorted({address for _, address in addresses}),
        "version": about["kubeletVersion"],
        "runtime": about.get("containerRuntimeVersion", "").partition(":")[0],
        "ready": not problem,
        "reason": problem or (waiting[0] if waiting else ""),
        "maintenance": annotations.get(MAINTENANCE, ""),
        "schedulable": not node.get("spec", {}).get("unschedulable", False),
        "machine_id": about["machineID"],
        "product_uuid": about["systemUUID"].lower(),
        "boot_id": about["bootID"],
        "verified": not problem and not waiting and annotations.get(READY_BOOT) == about["bootID"],
        "gpus": sum(devices.counts(node["status"].get("allocatable", {})).values()),
        "gpus_verified": annotations.get(GPU_BOOT) == about["bootID"],
        "managed": pools.managed(node),
    }
    invalid = [key for key, pattern in _PATTERNS.items() if not re.fullmatch(pattern, described[key])]
    if invalid:
        # Only this node is affected: it counts as not ready, and its invalid values are dropped.
        described.update(dict.fromkeys(invalid, ""), ready=False, verified=False, gpus_verified=False)
        described["reason"] = f"its kubelet reports an invalid {' and '.join(invalid)}"
    return described


def not_ready(node: Mapping[str, Any]) -> str:
    """The kubelet's message why the node is not Ready, "" if it is Ready."""
    for condition in node["status"].get("conditions", ()):
        if condition["type"] == "Ready":
            if condition["status"] == "True":
                return ""
            return str(condition.get("message") or condition.get("reason") or "not Ready")
    return "its kubelet has not reported yet"


def on_node(pods: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
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


# Tokens


def create_token(ttl_s: int, limit_s: float, run: str = "") -> str:
    """Create a bootstrap token that expires after ``ttl_s``; returns it when joins can use it.

    ``run`` is the holder of the Leases of the run that uses it, "" for none.
    """
    client = kube_api.admin()
    token = kubeadm.new_token()
    name, _, secret = token.partition(".")
    ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=ttl_s)
    client.call(
        "POST",
        f"{_SYSTEM}/secrets",
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "bootstrap.kubernetes.io/token",
            "metadata": {"name": f"bootstrap-token-{name}", "annotations": {_RUN: run}},
            "stringData": {
                "description": "gpunodes join",
                "token-id": name,
                "token-secret": secret,
                "expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "usage-bootstrap-authentication": "true",
                "usage-bootstrap-signing": "true",
                "auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token",
            },
        },
    )
    deadline = time.monotonic() + limit_s
    while True:
        # The controller manager signs cluster-info with each token; a join that starts earlier waits much longer.
        signed = client.get("/api/v1/namespaces/kube-public/configmaps/cluster-info")["data"]
        if f"jws-kubeconfig-{name}" in signed:
            return token
        if time.monotonic() > deadline:
            client.delete(f"{_SYSTEM}/secrets/bootstrap-token-{name}")
            raise MachineProblem(
                f"the controller manager did not sign cluster-info with the join token within {limit_s:.0f} s",
                "a working controller manager",
                "see `kubectl -n kube-system get pods` on the control plane",
            )
        time.sleep(0.3)


_TOKEN_PATIENCE_S = 300
"""Deleting a token must succeed: wait longer for a busy API server than elsewhere."""


def delete_tokens(run: str = "") -> list[str]:
    """Delete the tokens of a run and those of earlier interrupted joins; returns their names.

    Other runs may join machines at the same time: their tokens are kept while they hold a Lease.
    """
    client = kube_api.admin(_TOKEN_PATIENCE_S)
    found = client.get(f"{_SYSTEM}/secrets", fieldSelector="type=bootstrap.kubernetes.io/token")["items"]
    leases = client.get(_LEASES, labelSelector="app.kubernetes.io/managed-by=gpunodes")["items"]
    names = unused_tokens(found, leases, run, time.time())
    return [name for name in names if client.delete(f"{_SYSTEM}/secrets/{name}")]


def unused_tokens(
    tokens: Sequence[Mapping[str, Any]], leases: Sequence[Mapping[str, Any]], run: str, now: float
) -> list[str]:
    """The tokens of gpunodes that belong to ``run``, or to a run without a valid Lease."""
    holders = {lease["spec"].get("holderIdentity") for lease in leases if _is_valid(lease["spec"], now)}
    active = holders - {run, None, ""}
    created = [token["metadata"] for token in tokens if (token.get("data") or {}).get("description") == _DESCRIPTION]
    return [token["name"] for token in created if (token.get("annotations") or {}).get(_RUN) not in active]


def _is_valid(spec: Mapping[str, Any], now: float) -> bool:
    """Whether a Lease has not expired; ``now`` is this machine's time, which Leases use."""
    try:
        renewed = datetime.datetime.strptime(spec["renewTime"], _TIME).replace(tzinfo=datetime.timezone.utc)
        return renewed.timestamp() + float(spec["leaseDurationSeconds"]) > now
    except (KeyError, TypeError, ValueError):
        return False


_DESCRIPTION = "Z3B1bm9kZXMgam9pbg=="  # base64 of "gpunodes join"


# Objects


def apply(objects: Sequence[Mapping[str, Any]], check: bool) -> tuple[list[str], list[dict[str, str]]]:
    """Apply objects with server-side apply; returns the changed objects and the diffs."""
    client = kube_api.admin()
    paths = _Paths(client)
    changed, diffs = [], []
    for wanted in objects:
        title = f"{wanted['kind']} {wanted['metadata']['name']}"
        path = paths.find(wanted)
        before = client.find(path)
        query = {"fieldManager": kube_api.MANAGER, "force": "true"}
        if check:
            query["dryRun"] = "All"
        try:
            after = client.call("PATCH", path, wanted, query, "application/apply-patch+yaml")
        except ApiError as error:
            # In check mode the objects' namespace may not exist yet.
            if not (check and error.status == 404 and before is None):  # noqa: PLR2004 - not found
                raise
            after = wanted
        old, new = _comparable(before), _comparable(after)
        if old != new:
            changed.append(title)
            diffs.append({"before": _text(old), "after": _text(new), "before_header": title, "after_header": title})
    return changed, diffs


def _comparable(obj: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An object without the fields that the cluster writes."""
    if obj is None:
        return None
    generated = {"managedFields", "resourceVersion", "generation", "creationTimestamp", "uid"}
    metadata = {key: value for key, value in obj["metadata"].items() if key not in generated}
    annotations = dict(metadata.get("annotations") or {})
    annotations.pop("deprecated.daemonset.template.generation", None)
    return {
        **{key: value for key, value in obj.items() if key != "status"},
        "metadata": {**metadata, "annotations": annotations},
    }


def _text(obj: Mapping[str, Any] | None) -> str:
    import json

    return "" if obj is None else json.dumps(obj, indent=1, sort_keys=True) + "\n"


@dataclass
class _Paths:
    """Finds the API path of an object by its kind."""

    client: Client
    known: dict[str, dict[str, tuple[str, bool]]] = field(default_factory=dict)

    def find(self, obj: Mapping[str, Any]) -> str:
        version = str(obj["apiVersion"])
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if version not in self.known:
            listed = self.client.get(base)["resources"]
            self.known[version] = {r["kind"]: (r["name"], r["namespaced"]) for r in listed if "/" not in r["name"]}
        if obj["kind"] not in self.known[version]:
            raise MachineProblem(f"the cluster has no kind {obj['kind']} in {version}", "a kind of its API", "")
        name, namespaced = self.known[version][obj["kind"]]
        folder = f"namespaces/{obj['metadata'].get('namespace', 'default')}/" if namespaced else ""
        return f"{base}/{folder}{name}/{obj['metadata']['name']}"


# Readiness


@dataclass
class _Watch:
    """Progress of one node's verification."""

    name: str
    reason: str = "it is not a node of the cluster"
    probe: str = ""
    boot_id: str = ""
    running_since: float = 0.0
    """When all pods of kube-proxy and the network add-on first ran."""
    done: bool = False


def wait_until_ready(names: Sequence[str], image: str, limit_s: float) -> dict[str, str]:
    """Wait until each node is verified as ready; returns by node why it is not, "" if it is.

    A verified node is Ready, runs kube-proxy and the network add-on, and a pod on it resolves the name of the API
    service and reaches it. The condition Ready alone is not enough: it can be true before the network works.
    """
    client = kube_api.admin()
    watches = [_Watch(name) for name in names]
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            try:
                _advance(client, watches, image)
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


def _advance(client: Client, watches: Sequence[_Watch], image: str) -> None:
    """Perform the next possible steps for each node, with few API requests, and record what it waits for."""
    probing = [watch for watch in watches if watch.probe and not watch.done]
    waiting = [watch for watch in watches if not watch.probe and not watch.done]
    nodes, pods = _read(client, [watch.name for watch in waiting])
    networked = [w for w in waiting if w.name in nodes and _network_works(w, nodes[w.name], on_node(pods, w.name))]
    if networked and (problem := _dns_problem(client)):
        for watch in networked:
            watch.reason = problem
        networked = []
    for watch in [*probing, *networked]:
        _probe(client, watch, image)


_FEW = 10
"""Up to this number, nodes are requested one by one: the lists of a large cluster have megabytes."""


def _read(client: Client, names: Sequence[str]) -> tuple[dict[str, Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The existing nodes by name, and at least the pods of kube-system and of the network add-on on them."""
    if len(names) > _FEW:
        nodes = client.get("/api/v1/nodes")["items"]
        pods = client.get(f"{_SYSTEM}/pods")["items"] + client.get("/api/v1/pods", labelSelector=NETWORK_LABEL)["items"]
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
    pods = client.get(f"{_SYSTEM}/pods", labelSelector="k8s-app=kube-dns")["items"]
    problems = [problem for problem in map(pod_problem, pods) if problem]
    return f"the cluster's DNS does not run: {problems[0]}" if pods and len(problems) == len(pods) else ""


def _network_works(watch: _Watch, node: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the probe pod can be started on the node; otherwise records what the node waits for."""
    watch.boot_id = node["status"]["nodeInfo"]["bootID"]
    proxies = [pod for pod in pods if _label(pod, "k8s-app") == "kube-proxy"]
    for title, found in (("kube-proxy", proxies), ("network add-on", [p for p in pods if _label(p, NETWORK_LABEL)])):
        if not found:
            watch.reason = f"no pod of the {title} is on it yet"
            return False
        problems = [problem for problem in map(pod_problem, found) if problem]
        if problems:
            watch.reason = problems[0]
            return False
    if problem := not_ready(node):
        watch.reason = f"its kubelet reports: {problem}"
        return False
    watch.running_since = watch.running_since or time.monotonic()
    watch.reason = _network_unavailable(node, time.monotonic() - watch.running_since)
    return not watch.reason


def _label(pod: Mapping[str, Any], name: str) -> str:
    return str((pod["metadata"].get("labels") or {}).get(name, ""))


def _network_unavailable(node: Mapping[str, Any], running_s: float) -> str:
    """Why the node's network is not up yet, "" if it is.

    Most network add-ons report it in a condition of the node. An add-on that has run for a while without such a
    condition counts as up. A pod that starts too early would wait longer than this check.
    """
    for condition in node["status"].get("conditions", ()):
        if condition["type"] == "NetworkUnavailable":
            return "" if condition["status"] == "False" else str(condition.get("message") or "its network is not up")
    return "" if running_s > _NO_CONDITION_S else "its network has not reported yet"


_NO_CONDITION_S = 20


def _probe(client: Client, watch: _Watch, image: str) -> None:
    if not watch.probe:
        watch.probe = f"gpunodes-ready-{kubeadm.new_token()[:6]}"
        client.call("POST", f"{_SYSTEM}/pods", probe_pod(watch.probe, watch.name, image))
        watch.reason = "the probe pod has not started yet"
        return
    pod = client.find(f"{_SYSTEM}/pods/{watch.probe}")
    if pod is None:
        watch.probe = ""
    elif pod["status"].get("phase") == "Succeeded":
        client.call(
            "PATCH",
            f"/api/v1/nodes/{watch.name}",
            {"metadata": {"annotations": {READY_BOOT: watch.boot_id}}},
            {"fieldManager": kube_api.MANAGER},
            _MERGE,
        )
        watch.done = True
    elif pod["status"].get("phase") == "Failed":
        ended = pod["status"].get("containerStatuses", [{}])[0].get("state", {}).get("terminated", {})
        message = (ended.get("message") or pod["status"].get("message") or "").strip().replace("\n", "; ")
        watch.reason = f"a pod on it does not reach the API service: {message or 'its program failed'}"
        client.delete(f"{_SYSTEM}/pods/{watch.probe}", gracePeriodSeconds="0")
        watch.probe = ""
    else:
        watch.reason = pod_problem(pod) or f"a pod on it has not reached {_SERVICE} yet"


def _network_problem(client: Client, node: str) -> str:
    """Why the node's network does not run, "" if it does; this is the cause of problems of other pods on the node.

    For a program that exits repeatedly, its last line of output is included.
    """
    try:
        _, pods = _read(client, [node])
        for pod in on_node(pods, node):
            network = _label(pod, "k8s-app") == "kube-proxy" or _label(pod, NETWORK_LABEL)
            if network and (problem := pod_problem(pod)):
                meta = pod["metadata"]
                path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/log"
                log = str(client.get(path, tailLines="1").get("message", "")).strip()
                return f"{problem}; its log ends with: {log[-300:]}" if log else problem
    except ApiError:
        pass
    return ""


def _event(client: Client, pod: str) -> str:
    """The last warning about a pod: failed image pulls and networks are reported only in events."""
    try:
        found = client.get(f"{_SYSTEM}/events", fieldSelector=f"involvedObject.name={pod},type=Warning")["items"]
    except ApiError:
        return ""
    found.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return f"{found[-1]['reason']}: {found[-1]['message']}" if found else ""


_SERVICE = "kubernetes.default.svc.cluster.local"
# Rules and endpoints reach a new node shortly after its pods start: retry for a minute. The API server closes an idle
# connection, which ends nc.
_SCRIPT = (
    "n=0; "
    f"until busybox nslookup {_SERVICE} >/tmp/out 2>&1 && busybox nc -w 5 {_SERVICE} 443 </dev/null >/tmp/out 2>&1; do "
    "n=$((n + 1)); [ $n -lt 30 ] || { busybox tail -n 1 /tmp/out >/dev/termination-log; exit 1; }; "
    "busybox sleep 2; done"
)


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
        for pod in client.get(f"{_SYSTEM}/pods", labelSelector="app.kubernetes.io/managed-by=gpunodes")["items"]:
            name = pod["metadata"]["name"]
            ended = pod["status"].get("phase") in {"Succeeded", "Failed"}
            if name.startswith("gpunodes-ready-") and (ended or name in own):
                client.delete(f"{_SYSTEM}/pods/{name}", gracePeriodSeconds="0")
    except ApiError:
        return  # activeDeadlineSeconds ends the remaining pods


# Removal


def remove(
    name: str, drain_limit_s: float, force: bool, check: bool, expected: Mapping[str, Any] | None = None
) -> tuple[list[str], list[str]]:
    """Cordon, drain and delete a node; returns the actions, none if the node does not exist, and notes for the user.

    ``force`` deletes the remaining pods regardless of their disruption budgets. Pods of a node that is not ready always
    remain, because nothing confirms that they ended. Without ``force``, raises MachineProblem with their names.

    ``expected`` are values that the node must still have (``uid``, ``boot_id``, ... of :func:`describe`): raises
    MachineProblem if another machine has the name now.
    """
    client = kube_api.admin()
    node = client.find(f"/api/v1/nodes/{name}")
    if node is None:
        return [], []
    if _CONTROL_PLANE in (node["metadata"].get("labels") or {}):
        raise MachineProblem(
            f"{name} is the control plane", "a worker", "gpunodes reset removes it and destroys the cluster"
        )
    _check_same(node, expected or {})
    problem = not_ready(node)
    remaining = _remaining(client, name) if problem else []
    if remaining and not force:
        raise MachineProblem(
            f"{name} is not ready ({problem}): nothing confirms that these pods have ended: {_listed(remaining)}",
            "a ready node, from which pods can be evicted within their disruption budgets",
            f"repair it (`gpunodes repair {name}`), or delete the pods by force: --force-drain (gpunodes_drain_force)",
        )
    actions = [f"drain {name}", f"delete node {name}"]
    if not check:
        if problem:
            client.call("PATCH", f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}}, None, _MERGE)
        elif not _drain(name, drain_limit_s, force):
            remaining = _remaining(client, name)
        for pod in remaining:
            _delete_now(client, pod)
        _delete_node(client, node)
    notes = [f"pods of {name} deleted by force: {_listed(remaining, len(remaining))}"] if remaining else []
    return actions, notes


def _delete_node(client: Client, node: Mapping[str, Any]) -> None:
    """Delete exactly this node, not another one that has its name now."""
    body = {"preconditions": {"uid": node["metadata"]["uid"]}}
    try:
        client.call("DELETE", f"/api/v1/nodes/{node['metadata']['name']}", body)
    except ApiError as error:
        if error.status != kube_api.NOT_FOUND:
            raise


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
    names = [f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in pods]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _delete_now(client: Client, pod: Mapping[str, Any]) -> None:
    """Delete exactly this pod, not another one with its name, without waiting for its node."""
    body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
    path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
    try:
        client.call("DELETE", path, body)
    except ApiError as error:
        if error.status not in _GONE:
            raise
