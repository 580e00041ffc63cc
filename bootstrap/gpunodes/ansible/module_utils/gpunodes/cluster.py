"""The cluster as its API shows it: its nodes, join tokens, objects, and whether a node is really ready."""

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
"""Node annotation: the boot id of the machine when it was proven ready."""
GPU_BOOT = "gpunodes.dev/gpu-boot"
"""Node annotation: the boot id of the machine when its GPUs were proven."""
MAINTENANCE = "gpunodes.dev/maintenance"
"""Node annotation: a person keeps the node for themselves."""
_SYSTEM = "/api/v1/namespaces/kube-system"
_MIRROR = "kubernetes.io/config.mirror"
_MERGE = "application/merge-patch+json"
_GONE = (404, 409)
"""There is no such pod, or another one of its name."""
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
_RUN = "gpunodes.dev/run"
"""Annotation of a token: the run that it is for, by its name as a holder of Leases."""
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
_POLL_S = 2.0
_FORMS = {
    "address": r"[0-9A-Fa-f:.]{0,45}",
    "version": r"[A-Za-z0-9][A-Za-z0-9.+:~^_-]{0,127}",
    "runtime": r"[a-z0-9-]{0,50}",
}
"""What a node reports, and what it looks like (planner/reports.py)."""
NETWORK_LABEL = "gpunodes.dev/network"
"""Label of the network add-on's pods."""


def info(required: bool) -> dict[str, Any] | None:
    """The cluster of this control-plane machine; None where there is none, unless it is ``required``."""
    config = kubeconfig.load(kubeconfig.ADMIN)
    if config is None:
        if required:
            kube_api.admin()
        return None
    client = Client(config) if required else Client(config, patience_s=20)
    try:
        version = client.get("/version")["gitVersion"]
        nodes = client.get("/api/v1/nodes")["items"]
        pods = client.get(f"{_SYSTEM}/pods", labelSelector="k8s-app=kube-proxy")["items"]
        pods += client.get("/api/v1/pods", labelSelector=NETWORK_LABEL)["items"]
    except ApiError:
        if required:
            raise
        return None
    return {
        "version": version,
        "endpoint": config.server.partition("://")[2],
        "ca_hash": config.ca_hash,
        "nodes": [describe(node, pods) for node in nodes],
    }


def describe(node: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A node in the words of this project. ``proven``: it was proven ready in its present boot, and still looks so."""
    about = node["status"]["nodeInfo"]
    name = node["metadata"]["name"]
    annotations = node["metadata"].get("annotations") or {}
    labels = node["metadata"].get("labels") or {}
    addresses = [(entry["type"], entry["address"]) for entry in node["status"].get("addresses", ())]
    why = not_ready(node)
    waiting = [reason for reason in map(pod_problem, on_node(pods, name)) if reason]
    described: dict[str, Any] = {
        "name": name,
        "role": "control_plane" if _CONTROL_PLANE in labels else "worker",
        "uid": node["metadata"].get("uid", ""),
        "address": next((address for kind, address in addresses if kind == "InternalIP"), ""),
        "addresses": sorted({address for _, address in addresses}),
        "version": about["kubeletVersion"],
        "runtime": about.get("containerRuntimeVersion", "").partition(":")[0],
        "ready": not why,
        "reason": why or (waiting[0] if waiting else ""),
        "maintenance": annotations.get(MAINTENANCE, ""),
        "schedulable": not node.get("spec", {}).get("unschedulable", False),
        "machine_id": about["machineID"],
        "product_uuid": about["systemUUID"].lower(),
        "boot_id": about["bootID"],
        "proven": not why and not waiting and annotations.get(READY_BOOT) == about["bootID"],
        "gpus": sum(devices.counts(node["status"].get("allocatable", {})).values()),
        "gpus_proven": annotations.get(GPU_BOOT) == about["bootID"],
        "managed": pools.managed(node),
    }
    odd = [key for key, form in _FORMS.items() if not re.fullmatch(form, described[key])]
    if odd:
        # It is that node's trouble alone: it is not ready, and what is odd is unknown.
        described.update(dict.fromkeys(odd, ""), ready=False, proven=False, gpus_proven=False)
        described["reason"] = f"its kubelet reports an odd {' and '.join(odd)}"
    return described


def not_ready(node: Mapping[str, Any]) -> str:
    """Why the node is not Ready, in its kubelet's words; "" when it is."""
    for condition in node["status"].get("conditions", ()):
        if condition["type"] == "Ready":
            if condition["status"] == "True":
                return ""
            return str(condition.get("message") or condition.get("reason") or "not Ready")
    return "its kubelet has not reported yet"


def on_node(pods: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    return [pod for pod in pods if pod["spec"].get("nodeName") == name]


def pod_problem(pod: Mapping[str, Any]) -> str:
    """What a pod waits for, in the first words that say it; "" when it runs and is ready."""
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
            return f"pod {name}: ended with {ended['exitCode']}: {ended.get('message') or ended.get('reason')}"
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    if conditions.get("Ready", {}).get("status") == "True":
        return ""
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"pod {name}: {scheduled.get('message')}"
    return f"pod {name} is {status.get('phase', 'unknown').lower()}"


# Tokens


def make_token(ttl_s: int, limit_s: float, run: str = "") -> str:
    """A bootstrap token that dies by itself after ``ttl_s``; returned when joins can use it.

    ``run`` is the holder of Leases that it is for, "" for none.
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
        # The controller manager signs cluster-info with every token; a join that comes earlier waits much longer.
        signed = client.get("/api/v1/namespaces/kube-public/configmaps/cluster-info")["data"]
        if f"jws-kubeconfig-{name}" in signed:
            return token
        if time.monotonic() > deadline:
            client.delete(f"{_SYSTEM}/secrets/bootstrap-token-{name}")
            raise MachineProblem(
                f"the join token was not taken up within {limit_s:.0f} s",
                "a controller manager that works",
                "see `kubectl -n kube-system get pods` on the control plane",
            )
        time.sleep(0.3)


_TOKEN_PATIENCE_S = 300
"""A token must go: wait longer for a busy API server than elsewhere."""


def delete_tokens(run: str = "") -> list[str]:
    """Delete the tokens of a run, and those of earlier interrupted joins; their names.

    Joins of other machines may go on beside it: what is for another run stays while that one holds a Lease.
    """
    client = kube_api.admin(_TOKEN_PATIENCE_S)
    found = client.get(f"{_SYSTEM}/secrets", fieldSelector="type=bootstrap.kubernetes.io/token")["items"]
    leases = client.get(_LEASES, labelSelector="app.kubernetes.io/managed-by=gpunodes")["items"]
    return [name for name in abandoned(found, leases, run, time.time()) if client.delete(f"{_SYSTEM}/secrets/{name}")]


def abandoned(
    tokens: Sequence[Mapping[str, Any]], leases: Sequence[Mapping[str, Any]], run: str, now: float
) -> list[str]:
    """The tokens of ours that are ``run``'s, or nobody's who still holds a Lease."""
    at_work = {lease["spec"].get("holderIdentity") for lease in leases if _renewed(lease["spec"], now)} - {
        run,
        None,
        "",
    }
    ours = [token["metadata"] for token in tokens if (token.get("data") or {}).get("description") == _OURS]
    return [each["name"] for each in ours if (each.get("annotations") or {}).get(_RUN) not in at_work]


def _renewed(spec: Mapping[str, Any], now: float) -> bool:
    """Whether a Lease has not expired; ``now`` is this machine's time, as Leases are written by."""
    try:
        renewed = datetime.datetime.strptime(spec["renewTime"], _TIME).replace(tzinfo=datetime.timezone.utc)
        return renewed.timestamp() + float(spec["leaseDurationSeconds"]) > now
    except (KeyError, TypeError, ValueError):
        return False


_OURS = "Z3B1bm9kZXMgam9pbg=="  # base64 of "gpunodes join"


# Objects


def apply(objects: Sequence[Mapping[str, Any]], check: bool) -> tuple[list[str], list[dict[str, str]]]:
    """Server-side apply; the objects that changed, and what changed in them."""
    client = kube_api.admin()
    paths = _Paths(client)
    changed, diffs = [], []
    for wanted in objects:
        title = f"{wanted['kind']} {wanted['metadata']['name']}"
        path = paths.of(wanted)
        before = client.find(path)
        query = {"fieldManager": kube_api.MANAGER, "force": "true"}
        if check:
            query["dryRun"] = "All"
        try:
            after = client.call("PATCH", path, wanted, query, "application/apply-patch+yaml")
        except ApiError as error:
            # In check mode the namespace that the objects are in may not be there yet.
            if not (check and error.status == 404 and before is None):  # noqa: PLR2004 - not found
                raise
            after = wanted
        old, new = _essence(before), _essence(after)
        if old != new:
            changed.append(title)
            diffs.append({"before": _text(old), "after": _text(new), "before_header": title, "after_header": title})
    return changed, diffs


def _essence(thing: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An object without what the cluster itself writes into it."""
    if thing is None:
        return None
    noise = {"managedFields", "resourceVersion", "generation", "creationTimestamp", "uid"}
    metadata = {key: value for key, value in thing["metadata"].items() if key not in noise}
    annotations = dict(metadata.get("annotations") or {})
    annotations.pop("deprecated.daemonset.template.generation", None)
    return {
        **{key: value for key, value in thing.items() if key != "status"},
        "metadata": {**metadata, "annotations": annotations},
    }


def _text(thing: Mapping[str, Any] | None) -> str:
    import json

    return "" if thing is None else json.dumps(thing, indent=1, sort_keys=True) + "\n"


@dataclass
class _Paths:
    """Finds the path of an object's kind by asking the API."""

    client: Client
    known: dict[str, dict[str, tuple[str, bool]]] = field(default_factory=dict)

    def of(self, thing: Mapping[str, Any]) -> str:
        version = str(thing["apiVersion"])
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if version not in self.known:
            listed = self.client.get(base)["resources"]
            self.known[version] = {r["kind"]: (r["name"], r["namespaced"]) for r in listed if "/" not in r["name"]}
        if thing["kind"] not in self.known[version]:
            raise MachineProblem(f"the cluster knows no {thing['kind']} of {version}", "a kind that it knows", "")
        name, namespaced = self.known[version][thing["kind"]]
        folder = f"namespaces/{thing['metadata'].get('namespace', 'default')}/" if namespaced else ""
        return f"{base}/{folder}{name}/{thing['metadata']['name']}"


# Readiness


@dataclass
class _Watch:
    """How far one node has come to being proven."""

    name: str
    why: str = "it is not a node of the cluster"
    probe: str = ""
    boot_id: str = ""
    running_since: float = 0.0
    """When the network's pods were first seen running."""
    done: bool = False


def prove(names: Sequence[str], image: str, limit_s: float) -> dict[str, str]:
    """Wait until each node is ready in truth; by node why it is not, "" when it is.

    Ready in truth: Node Ready, kube-proxy and the network add-on run there, and a pod there resolves and reaches the
    API service. A node may be Ready before its network is.
    """
    client = kube_api.admin()
    watches = [_Watch(name) for name in names]
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            try:
                _look(client, watches, image)
            except ApiError as error:
                for watch in watches:
                    if not watch.done:
                        watch.why = str(error)
            if all(watch.done for watch in watches):
                break
            time.sleep(_POLL_S)
        for watch in watches:
            if watch.probe and not watch.done:
                watch.why = _network_trouble(client, watch.name) or _event(client, watch.probe) or watch.why
    finally:
        _clean(client, watches)
    return {watch.name: "" if watch.done else watch.why for watch in watches}


def _look(client: Client, watches: Sequence[_Watch], image: str) -> None:
    """Take every node as far as it goes now, and note what it waits for. Asks the API for no more than that takes."""
    probing = [watch for watch in watches if watch.probe and not watch.done]
    early = [watch for watch in watches if not watch.probe and not watch.done]
    nodes, pods = _seen(client, [watch.name for watch in early])
    come = [w for w in early if w.name in nodes and _networked(w, nodes[w.name], on_node(pods, w.name))]
    if come and (trouble := _dns_trouble(client)):
        for watch in come:
            watch.why = trouble
        come = []
    for watch in [*probing, *come]:
        _probe(client, watch, image)


_FEW = 10
"""As many nodes are asked for one by one: the lists of a large cluster are megabytes."""


def _seen(client: Client, names: Sequence[str]) -> tuple[dict[str, Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The nodes that are there, by name, and the pods of kube-system and of the network on them, if not more."""
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


def _dns_trouble(client: Client) -> str:
    """Why the cluster's DNS does not run, "" when one of its pods does, or there are none."""
    pods = client.get(f"{_SYSTEM}/pods", labelSelector="k8s-app=kube-dns")["items"]
    troubles = [problem for problem in map(pod_problem, pods) if problem]
    return f"the cluster's DNS does not run: {troubles[0]}" if pods and len(troubles) == len(pods) else ""


def _networked(watch: _Watch, node: Mapping[str, Any], here: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a pod may be tried on the node now; what it waits for is noted."""
    watch.boot_id = node["status"]["nodeInfo"]["bootID"]
    proxies = [pod for pod in here if _label(pod, "k8s-app") == "kube-proxy"]
    for title, found in (("kube-proxy", proxies), ("network add-on", [p for p in here if _label(p, NETWORK_LABEL)])):
        if not found:
            watch.why = f"no pod of the {title} is on it yet"
            return False
        problems = [problem for problem in map(pod_problem, found) if problem]
        if problems:
            watch.why = problems[0]
            return False
    if why := not_ready(node):
        watch.why = f"its kubelet says: {why}"
        return False
    watch.running_since = watch.running_since or time.monotonic()
    watch.why = _network_unavailable(node, time.monotonic() - watch.running_since)
    return not watch.why


def _label(pod: Mapping[str, Any], name: str) -> str:
    return str((pod["metadata"].get("labels") or {}).get(name, ""))


def _network_unavailable(node: Mapping[str, Any], running_s: float) -> str:
    """Why the node's network is not up yet, "" when it is.

    Network add-ons say so in a condition of the node, but not all of them: one that has run for a while without
    saying anything is taken to be up. A pod that comes too early waits much longer than we do.
    """
    for condition in node["status"].get("conditions", ()):
        if condition["type"] == "NetworkUnavailable":
            return "" if condition["status"] == "False" else str(condition.get("message") or "its network is not up")
    return "" if running_s > _SILENT_NETWORK_S else "its network has not reported yet"


_SILENT_NETWORK_S = 20


def _probe(client: Client, watch: _Watch, image: str) -> None:
    if not watch.probe:
        watch.probe = f"gpunodes-ready-{kubeadm.new_token()[:6]}"
        client.call("POST", f"{_SYSTEM}/pods", probe_pod(watch.probe, watch.name, image))
        watch.why = "the probe pod was not started yet"
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
        watch.why = f"a pod there does not reach the API service: {message or 'its program failed'}"
        client.delete(f"{_SYSTEM}/pods/{watch.probe}", gracePeriodSeconds="0")
        watch.probe = ""
    else:
        watch.why = pod_problem(pod) or f"a pod there has not reached {_SERVICE} yet"


def _network_trouble(client: Client, node: str) -> str:
    """Why the node's own network does not run, "" when it does: what happens to other pods there only follows from it.

    A program that ends again and again is named with the last line that it wrote.
    """
    try:
        _, pods = _seen(client, [node])
        for pod in on_node(pods, node):
            network = _label(pod, "k8s-app") == "kube-proxy" or _label(pod, NETWORK_LABEL)
            if network and (why := pod_problem(pod)):
                meta = pod["metadata"]
                path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/log"
                log = str(client.get(path, tailLines="1").get("message", "")).strip()
                return f"{why}; it wrote: {log[-300:]}" if log else why
    except ApiError:
        pass
    return ""


def _event(client: Client, pod: str) -> str:
    """The last warning about a pod: image pulls and networks that fail are only told there."""
    try:
        found = client.get(f"{_SYSTEM}/events", fieldSelector=f"involvedObject.name={pod},type=Warning")["items"]
    except ApiError:
        return ""
    found.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return f"{found[-1]['reason']}: {found[-1]['message']}" if found else ""


_SERVICE = "kubernetes.default.svc.cluster.local"
# Rules and endpoints reach a new node a moment after its pods: try for a minute. The API server closes a connection
# that says nothing.
_SCRIPT = (
    "n=0; "
    f"until busybox nslookup {_SERVICE} >/tmp/out 2>&1 && busybox nc -w 5 {_SERVICE} 443 </dev/null >/tmp/out 2>&1; do "
    "n=$((n + 1)); [ $n -lt 30 ] || { busybox tail -n 1 /tmp/out >/dev/termination-log; exit 1; }; "
    "busybox sleep 2; done"
)


def probe_pod(name: str, node: str, image: str) -> dict[str, Any]:
    """A pod for one node that ends well when it can resolve and reach the API service."""
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
    """Delete our probes, those of interrupted runs included."""
    mine = {watch.probe for watch in watches}
    try:
        for pod in client.get(f"{_SYSTEM}/pods", labelSelector="app.kubernetes.io/managed-by=gpunodes")["items"]:
            name = pod["metadata"]["name"]
            ended = pod["status"].get("phase") in {"Succeeded", "Failed"}
            if name.startswith("gpunodes-ready-") and (ended or name in mine):
                client.delete(f"{_SYSTEM}/pods/{name}", gracePeriodSeconds="0")
    except ApiError:
        return  # what stays ends by its own deadline


# Removal


def remove(
    name: str, drain_limit_s: float, force: bool, check: bool, expected: Mapping[str, Any] | None = None
) -> tuple[list[str], list[str]]:
    """Cordon, drain and delete a node; the actions taken, none when it is no node, and what a person must know of them.

    ``force`` deletes the pods that do not leave, past their disruption budgets. Those of a node that is not ready never
    leave: nothing there confirms that they have ended. Raises MachineProblem, which names them, without it.

    ``expected`` is what it must still report (``uid``, ``boot_id``, ... of :func:`describe`): raises MachineProblem
    when the name is another machine's by now.
    """
    client = kube_api.admin()
    node = client.find(f"/api/v1/nodes/{name}")
    if node is None:
        return [], []
    if _CONTROL_PLANE in (node["metadata"].get("labels") or {}):
        raise MachineProblem(f"{name} is the control plane", "a worker", "gpunodes reset destroys the whole cluster")
    _see_same(node, expected or {})
    why = not_ready(node)
    held = _held(client, name) if why else []
    if held and not force:
        raise MachineProblem(
            f"{name} is not ready ({why}): nothing would confirm that these pods have ended: {_named(held)}",
            "a node that its pods can leave, each within its disruption budget",
            f"bring it back (`gpunodes repair {name}`), or delete them by force: --force-drain (gpunodes_drain_force)",
        )
    actions = [f"drain {name}", f"delete node {name}"]
    if not check:
        if why:
            client.call("PATCH", f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}}, None, _MERGE)
        elif not _drained(name, drain_limit_s, force):
            held = _held(client, name)
        for pod in held:
            _delete_now(client, pod)
        _delete_node(client, node)
    return actions, [f"pods of {name} deleted by force: {_named(held, len(held))}"] if held else []


def _delete_node(client: Client, node: Mapping[str, Any]) -> None:
    """Delete this very node; another may have its name by now."""
    body = {"preconditions": {"uid": node["metadata"]["uid"]}}
    try:
        client.call("DELETE", f"/api/v1/nodes/{node['metadata']['name']}", body)
    except ApiError as error:
        if error.status != kube_api.NOT_FOUND:
            raise


def _see_same(node: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise MachineProblem when a node reports another machine than it did when it was chosen."""
    if not expected:
        return
    now = describe(node, ())
    changed = [f"{key} {now[key]} instead of {value}" for key, value in expected.items() if now.get(key) != value]
    if changed:
        raise MachineProblem(
            f"node {now['name']} is another machine's by now: it reports {', '.join(changed)}",
            "the node that was chosen",
            "see which machine it is, and run the command again",
        )


def _drained(name: str, limit_s: float, force: bool) -> bool:
    """Drain a node within its pods' budgets; raises MachineProblem when that fails, unless with ``force``."""
    # To kubectl 0 means for ever.
    limit_s = max(1, limit_s)
    done = run(
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
    if not done.ok and not force:
        errors = [line.strip() for line in done.err.splitlines() if line.startswith(("error", "There are pending"))]
        first = (errors or done.err.splitlines()[-1:] or [""])[0]
        raise MachineProblem(
            f"{name} cannot be drained within {limit_s:.0f} s: {first}",
            "all its pods moved; it stays cordoned",
            f"see `kubectl get pods -A --field-selector spec.nodeName={name}` and disruption budgets, or delete what "
            "is left by force: --force-drain (gpunodes_drain_force)",
        )
    return done.ok


def _held(client: Client, name: str) -> list[Mapping[str, Any]]:
    """The pods of a node that a drain has to wait for: not those of DaemonSets, nor mirror pods, nor what has ended."""
    return [
        pod
        for pod in client.get("/api/v1/pods", fieldSelector=f"spec.nodeName={name}")["items"]
        if pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"}
        and _MIRROR not in (pod["metadata"].get("annotations") or {})
        and not any(owner["kind"] == "DaemonSet" for owner in pod["metadata"].get("ownerReferences") or ())
    ]


def _named(pods: Sequence[Mapping[str, Any]], most: int = 5) -> str:
    names = [f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in pods]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _delete_now(client: Client, pod: Mapping[str, Any]) -> None:
    """Delete this very pod without waiting for its node; another may have its name by now."""
    body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
    path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
    try:
        client.call("DELETE", path, body)
    except ApiError as error:
        if error.status not in _GONE:
            raise
