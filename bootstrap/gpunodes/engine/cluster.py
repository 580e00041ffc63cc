"""The Kubernetes API as repair needs it: nodes, pods, evictions, locks and events.

The machine that runs us needs SSH only: a small program on the control-plane machine, sent through the connection
(``module_utils/gpunodes/session.py``), carries our requests to the API and its answers back. No secret comes along.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from gpunodes import settings, shape
from gpunodes.ansible.module_utils.gpunodes import devices
from gpunodes.ansible.module_utils.gpunodes.cluster import MAINTENANCE
from gpunodes.engine import shell
from gpunodes.engine.events import ssh_reason
from gpunodes.errors import GpunodesError
from gpunodes.model import printable
from gpunodes.repair import maintenance
from gpunodes.repair.maintenance import Maintenance
from gpunodes.repair.policy import Node, pool_of
from gpunodes.shape import Many, Maybe, Named, Optional

ADMIN = "/etc/kubernetes/admin.conf"
_PREFIX = "gpunodes.dev/"
CORDONED_BY = f"{_PREFIX}cordoned-by"
"""Node annotation: the id of the repair that cordoned it."""
REASON = f"{_PREFIX}repair-reason"
REPAIRS = f"{_PREFIX}repairs"
"""Node annotation: when the node was repaired lately, for the loop guard of every operator."""
NEEDS_REPAIR = f"{_PREFIX}needs-repair"
"""Node annotation (the reason in full), label and taint (the reason in short): nothing of ours helps it."""
TEMPORARY_TAINT = f"{_PREFIX}repair"
"""Taint NoExecute while GPUs are reset: what does not tolerate everything leaves them, device plugins among it."""
_GPU_COUNT = f"{_PREFIX}gpu-count"
"""Node label: how many GPUs it came into the cluster with."""
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"

_CALL_S = 45.0
"""Seconds for one answer; the session's own limit is 30."""
_PATIENCE_S = 60.0
_PAUSE_S = 0.05
"""Between the tries to change a node that somebody else changes, too."""
# No answer; 403 from an API server that has not read its own roles yet; busy; etcd timed out.
_PASSING = frozenset({0, -2, 403, 429, 500, 503, 504})
_NO_CLUSTER = -1
_NO_SESSION = -2
_NO_SENSE = -3
_OK = 200
_NOT_FOUND = 404
_CONFLICT = 409
_TOO_MANY = 429
_REPAIRS_KEPT = 8
_MERGE = "application/merge-patch+json"

# What a line of the session holds (module_utils/gpunodes/session.py).
_FRAME = {"id": int, "status": int, "body": object, "error": str, "time": float}

# Loads the modules that the first line brings, as one package; Python 3.9, standard library.
_BOOT = """
import json, sys, types
start = json.loads(sys.stdin.readline())
package = types.ModuleType("gpunodes_session")
package.__path__ = []
sys.modules[package.__name__] = package
for name, text in start["modules"]:
    module = types.ModuleType(package.__name__ + "." + name)
    module.__package__ = package.__name__
    sys.modules[module.__name__] = module
    setattr(package, name, module)
    exec(compile(text, name, "exec"), module.__dict__)
package.session.serve(start["kubeconfig"])
"""
_MODULES = ("problem", "disk", "kubeconfig", "kube_api", "session")


class NoResponse(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The control plane cannot be asked."""


class NoCluster(NoResponse):
    """The control plane's machine runs no cluster."""


class NoSession(NoResponse):
    """The control plane's machine cannot be reached, or does not let us in."""


class Refused(GpunodesError):  # noqa: N818 - as above
    """The API answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Transport:
    """How the session's program is started: the words that run it, and the kubeconfig on its machine."""

    words: Sequence[str]
    kubeconfig: str = ADMIN
    name: str = "the control plane"
    first: str = field(default="", repr=False)
    """What its standard input begins with."""
    environment: Mapping[str, str] | None = field(default=None, repr=False)
    """None for our own."""


def over_ssh(address: str, variables: Mapping[str, Any]) -> Transport:
    """A session on a control-plane machine."""
    program = shell.remote(shell.python(variables, _BOOT), variables)
    patient = ("-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
    return Transport(
        [*shell.command(address, variables, *patient), program],
        name=address,
        first=shell.for_sudo(variables),
        environment=shell.environment(variables),
    )


def here(python: str, kubeconfig: Path) -> Transport:
    """A session on this machine, over a kubeconfig file."""
    return Transport([python, "-c", _BOOT], str(kubeconfig), "this machine")


@dataclass(frozen=True, slots=True)
class Response:
    """What the API answered; ``time`` is the control plane's clock, seconds since 1970."""

    status: int
    body: Any
    error: str
    time: float


class Session:
    """A kept session; opened at the first call, opened again when it broke. Safe for many threads."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._process: subprocess.Popen[str] | None = None
        self._waiting: dict[int, Future[Response]] = {}
        self._guard = threading.Lock()
        self._next = 0
        self.calls = 0
        """How many requests were made; measured by tests."""

    def request(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", keep: Sequence[str] = ()
    ) -> Response:
        """One request, once; its status is 0 or less where no answer came."""
        fields = {"method": method, "path": path, "body": body, "type": kind, "keep": list(keep)}
        future: Future[Response] = Future()
        with self._guard:
            self._next += 1
            self.calls += 1
            number = self._next
            try:
                process = self._open()
                self._waiting[number] = future
                assert process.stdin  # noqa: S101 - for the type checker
                process.stdin.write(json.dumps({"id": number, **fields}) + "\n")
                process.stdin.flush()
            except OSError as error:
                self._waiting.pop(number, None)
                return Response(_NO_SESSION, None, str(error), time.time())
        try:
            return future.result(_CALL_S)
        except TimeoutError:
            with self._guard:
                self._waiting.pop(number, None)
                self._end()
            return Response(_NO_SESSION, None, f"no answer in {_CALL_S:.0f} s", time.time())

    def close(self) -> None:
        """End the session."""
        with self._guard:
            self._end()

    def _open(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._process = subprocess.Popen(
            self._transport.words,
            env=self._transport.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdin  # noqa: S101 - for the type checker
        folder = settings.plugins() / "module_utils" / "gpunodes"
        modules = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in _MODULES]
        start = json.dumps({"modules": modules, "kubeconfig": self._transport.kubeconfig})
        self._process.stdin.write(f"{self._transport.first}{start}\n")
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self._process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout  # noqa: S101 - for the type checker
        assert process.stderr  # noqa: S101 - for the type checker
        with contextlib.suppress(ValueError, OSError):
            for line in process.stdout:
                try:
                    read = json.loads(line)
                except (ValueError, RecursionError):
                    read = None
                if not isinstance(read, dict):
                    continue  # a login shell's banner
                if violation := shape.wrong(read, _FRAME):
                    # Nobody can tell whose answer it was to be.
                    self._lose(process, _NO_SENSE, violation)
                    continue
                with self._guard:
                    future = self._waiting.pop(read["id"], None)
                if future is not None:
                    future.set_result(Response(read["status"], read["body"], read["error"], read["time"]))
        output = ""
        with contextlib.suppress(ValueError, OSError):
            output = ssh_reason(process.stderr.read(4096))
        self._lose(process, _NO_SESSION, output or "the session ended")

    def _lose(self, process: subprocess.Popen[str], status: int, why: str) -> None:
        """Tell all who wait for an answer of ``process`` that none comes."""
        with self._guard:
            if self._process is not None and self._process is not process:
                return  # another one serves by now
            lost, self._waiting = self._waiting, {}
        for future in lost.values():
            future.set_result(Response(status, None, why, time.time()))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin:
                process.stdin.close()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod on a node."""

    namespace: str
    name: str
    uid: str
    owner: str
    """The kind of its controller, "" for none."""
    mirror: bool
    finished: bool
    ending: bool
    grace_s: float

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"


class Cluster:
    """The cluster, over one session.

    Every method raises NoAnswer when the control plane cannot be asked for ``patience_s``, Refused for its other
    errors.
    """

    def __init__(self, session: Session, pool_label: str = "", patience_s: float = _PATIENCE_S) -> None:
        self.session = session
        self._pool_label = pool_label
        self._patience_s = patience_s

    # Nodes

    def nodes(self) -> list[Node]:
        """All nodes, by one request however many there are."""
        answer = self._call("GET", "/api/v1/nodes", keep=_NODE_KEEP)
        return [self._readable(item) for item in answer.body["items"]]

    def node(self, name: str) -> Node | None:
        """One node; None when it is none."""
        found = self._find(_node_path(name))
        return self._readable(found) if found is not None else None

    def cordon(self, name: str, repair: str, reason: str) -> bool:
        """Cordon a node for a repair; whether the cordon is ours. Somebody else's stays theirs."""

        def change(node: Mapping[str, Any]) -> dict[str, Any] | None:
            annotations = node["metadata"].get("annotations") or {}
            if node.get("spec", {}).get("unschedulable") and CORDONED_BY not in annotations:
                return None
            return {
                "metadata": {"annotations": {CORDONED_BY: repair, REASON: reason}},
                "spec": {"unschedulable": True},
            }

        return self._change(name, change)

    def note_repair(self, name: str, moment: float) -> None:
        """Remember on the node itself that it is repaired now."""

        def change(node: Mapping[str, Any]) -> dict[str, Any] | None:
            known = _moments(node["metadata"].get("annotations") or {})
            if moment in known:
                return None
            kept = [*known, moment][-_REPAIRS_KEPT:]
            return {"metadata": {"annotations": {REPAIRS: ",".join(_stamp(each) for each in kept)}}}

        self._change(name, change)

    def uncordon(self, name: str, repair: str) -> bool:
        """Take back what a repair did to a node, its cordon only if that is still ours; whether none is left."""
        cordoned = False

        def change(node: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal cordoned
            ours = (node["metadata"].get("annotations") or {}).get(CORDONED_BY) == repair
            patch = _without_taint(node, TEMPORARY_TAINT)
            patch["metadata"] = {"annotations": {CORDONED_BY: None, REASON: None}} if ours else {}
            if ours:
                patch.setdefault("spec", {})["unschedulable"] = False
            cordoned = not ours and bool(node.get("spec", {}).get("unschedulable"))
            return patch

        self._change(name, change)
        return not cordoned

    def begin_maintenance(self, name: str, made: Maintenance, *, cordon: bool) -> bool:
        """Keep repairs from a node, and cordon it where nobody has; whether the cordon goes with the maintenance."""
        ours = False

        def change(node: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal ours
            before = _maintenance(node)
            free = not node.get("spec", {}).get("unschedulable")
            ours = cordon if free else before is not None and before.cordoned
            text = dataclasses.replace(made, cordoned=ours).text()
            patch: dict[str, Any] = {"metadata": {"annotations": {MAINTENANCE: text}}}
            if cordon and free:
                patch["spec"] = {"unschedulable": True}
            return patch

        self._change(name, change)
        return ours

    def end_maintenance(self, name: str) -> Maintenance | None:
        """Take back what ``begin_maintenance`` did, its cordon with it; what it was, None where there was none."""
        before: Maintenance | None = None

        def change(node: Mapping[str, Any]) -> dict[str, Any] | None:
            nonlocal before
            before = _maintenance(node)
            annotations = node["metadata"].get("annotations") or {}
            if MAINTENANCE not in annotations:
                return None
            patch: dict[str, Any] = {"metadata": {"annotations": {MAINTENANCE: None}}}
            if before and before.cordoned and NEEDS_REPAIR in annotations:
                # It was given up after the time of its maintenance: from now on the cordon is that of the repair.
                patch["metadata"]["annotations"][CORDONED_BY] = "maintenance"
            elif before and before.cordoned and CORDONED_BY not in annotations:
                patch["spec"] = {"unschedulable": False}
            return patch

        self._change(name, change)
        return before

    def taint_temporarily(self, name: str, repair: str) -> None:
        """Make all that does not tolerate everything leave the node: it lets go of its GPUs."""
        self._change(name, lambda node: _with_taint(node, TEMPORARY_TAINT, _short(repair), "NoExecute"))

    def untaint(self, name: str) -> None:
        """End :meth:`set_aside`."""
        self._change(name, lambda node: _without_taint(node, TEMPORARY_TAINT))

    def give_up(self, name: str, repair: str, reason: str) -> None:
        """Cordon, taint and label a node that needs repair by hand."""

        def change(node: Mapping[str, Any]) -> dict[str, Any]:
            patch = _with_taint(
                _merged(node, _without_taint(node, TEMPORARY_TAINT)), NEEDS_REPAIR, _short(reason), "NoSchedule"
            )
            annotations = {NEEDS_REPAIR: reason}
            if not node.get("spec", {}).get("unschedulable"):
                annotations |= {CORDONED_BY: repair, REASON: reason}
            patch["metadata"] = {"annotations": annotations, "labels": {NEEDS_REPAIR: _short(reason)}}
            patch["spec"]["unschedulable"] = True
            return patch

        self._change(name, change)

    def clear(self, name: str) -> bool:
        """Take all our marks off a node, and the cordon if it is ours; whether it can be scheduled to now."""

        def change(node: Mapping[str, Any]) -> dict[str, Any]:
            ours = CORDONED_BY in (node["metadata"].get("annotations") or {})
            patch = _without_taint(_merged(node, _without_taint(node, TEMPORARY_TAINT)), NEEDS_REPAIR)
            gone = dict.fromkeys((CORDONED_BY, REASON, REPAIRS, NEEDS_REPAIR))
            patch["metadata"] = {"annotations": gone, "labels": {NEEDS_REPAIR: None}}
            if ours:
                patch["spec"]["unschedulable"] = False
            return patch

        self._change(name, change)
        after = self.node(name)
        return after is not None and not after.cordoned

    def _change(self, name: str, change: Callable[[Mapping[str, Any]], dict[str, Any] | None]) -> bool:
        """Patch a node by what it is now; again when somebody was quicker. False when nothing was to be changed.

        Raises Refused when somebody is quicker at every try for as long as our patience is.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            node = self._find(_node_path(name))
            patch = change(node) if node is not None else None
            if patch is None or node is None:
                return False
            patch.setdefault("metadata", {})["resourceVersion"] = node["metadata"]["resourceVersion"]
            _calm(patch["metadata"])
            try:
                self._call("PATCH", f"{_node_path(name)}?fieldManager=gpunodes", patch, _MERGE)
            except Refused as error:
                if error.status != _CONFLICT:
                    raise
                if time.monotonic() > deadline:
                    raise Refused(
                        _CONFLICT, f"node {name} was changed by somebody else at every try for {self._patience_s:.0f} s"
                    ) from None
                time.sleep(_PAUSE_S)
            else:
                return True

    def _readable(self, item: Mapping[str, Any]) -> Node:
        """A node; one that cannot be read is left alone, and nobody else is stopped by it."""
        try:
            return self._node(item)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            metadata = item["metadata"]
            why = Maintenance("what its node reports cannot be read: see `kubectl describe node`")
            control_plane = _CONTROL_PLANE in (metadata.get("labels") or {})
            return Node(
                metadata["name"],
                ready=False,
                control_plane=control_plane,
                maintenance=why,
            )

    def _node(self, item: Mapping[str, Any]) -> Node:
        metadata, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
        labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
        # A device plugin that is gone leaves its resource's name behind, with no device.
        capacity, labelled = _devices(status.get("capacity") or {}), _number(labels.get(_GPU_COUNT))
        about = status.get("nodeInfo") or {}
        ready = [entry["status"] for entry in status.get("conditions", ()) if entry["type"] == "Ready"]
        return Node(
            name=metadata["name"],
            addresses=tuple(entry["address"] for entry in status.get("addresses", ())),
            ready=ready == ["True"],
            boot_id=about.get("bootID", ""),
            machine_id=about.get("machineID", ""),
            system_uuid=about.get("systemUUID", ""),
            control_plane=_CONTROL_PLANE in labels,
            pool=pool_of(labels.get(self._pool_label, ""), gpus=bool(labelled) or capacity is not None),
            cordoned=bool(spec.get("unschedulable")),
            cordoned_by_us=annotations.get(CORDONED_BY, ""),
            maintenance=_maintenance(item),
            needs_repair=annotations.get(NEEDS_REPAIR, ""),
            repairs=tuple(_moments(annotations)),
            capacity=capacity,
            allocatable=_devices(status.get("allocatable") or {}),
            labelled=labelled,
        )

    # Pods

    def pods_on(self, name: str) -> list[Pod]:
        """The pods of a node."""
        query = urlencode({"fieldSelector": f"spec.nodeName={name}"})
        return [_pod(item) for item in self._call("GET", f"/api/v1/pods?{query}", keep=_POD_KEEP).body["items"]]

    def evict(self, pod: Pod) -> str:
        """Ask for a pod's eviction; why it is refused, "" when it goes (or is gone)."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        answer = self.session.request("POST", f"{_pod_path(pod)}/eviction", body)
        if answer.status in {_OK, _NOT_FOUND, _CONFLICT}:  # a conflict: another pod has its name by now
            return ""
        if answer.status == _TOO_MANY:
            return answer.error.rpartition("says: ")[2] or "a disruption budget forbids it"
        return answer.error

    def delete_now(self, pod: Pod) -> None:
        """Delete a pod without waiting for its node."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}}
        with contextlib.suppress(Refused):
            self._call("DELETE", _pod_path(pod), body)

    def event(self, node: str, reason: str, message: str, *, warning: bool) -> None:
        """Tell of a node in an Event; nobody depends on it, so that nothing is said when it cannot be told."""
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{node}.gpunodes-", "namespace": "default"},
            # The kubelet, too, gives a node's name for its uid: kubectl describe looks for that.
            "involvedObject": {"kind": "Node", "name": node, "uid": node},
            "reason": reason,
            "message": printable(message)[:1000],
            "type": "Warning" if warning else "Normal",
            "source": {"component": "gpunodes"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self.session.request("POST", "/api/v1/namespaces/default/events", body)

    # Calls

    def call_once(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Response:
        """One request; raises NoAnswer or Refused at once."""
        answer = self.session.request(method, path, body, kind)
        if answer.status <= 0:
            raise _no_answer(answer)
        if answer.status != _OK:
            raise Refused(answer.status, answer.error)
        return _checked(method, path, answer)

    def lock_holder(self) -> Mapping[str, Any] | None:
        """Who holds the lock by SSH (engine/locks.py), as they wrote it there; None for nobody."""
        body = self.call_once("LOCK", "").body
        return body if isinstance(body, Mapping) else None

    def _call(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", keep: Sequence[str] = ()
    ) -> Response:
        deadline = time.monotonic() + self._patience_s
        while True:
            answer = self.session.request(method, path, body, kind, keep)
            if answer.status == _OK:
                return _checked(method, path, answer)
            if answer.status not in _PASSING or time.monotonic() > deadline:
                break
            time.sleep(1)
        if answer.status <= 0:
            raise _no_answer(answer)
        raise Refused(answer.status, answer.error)

    def _find(self, path: str) -> Any | None:
        try:
            return self._call("GET", path).body
        except Refused as error:
            if error.status == _NOT_FOUND:
                return None
            raise


# What an object has of which we read more; the API server holds all to it, and it may be somebody else's.
_METADATA = {
    "name": str,
    "namespace": Optional(str),
    "labels": Optional(Maybe(Named(str, 100_000))),
    "annotations": Optional(Maybe(Named(str, 100_000))),
}
_OBJECT = {
    "metadata": {**_METADATA, "uid": str, "resourceVersion": str},
    "spec": Optional(Maybe({"taints": Optional(Maybe(Many({"key": str, "effect": str}, 100_000)))})),
    "status": Optional(Maybe({})),
}
# Of those in a list only parts are asked for.
_OBJECTS = {"items": Many({**_OBJECT, "metadata": _METADATA}, 10_000_000)}


def _checked(method: str, path: str, answer: Response) -> Response:
    """An answer whose body is what the request asks for; raises NoAnswer."""
    listed = method == "GET" and re.search(r"/(nodes|pods|leases)(\?|$)", path)
    if method in {"LOCK", "DELETE"} or path == "/version" or path.endswith("/eviction"):
        return answer
    if wrong := shape.wrong(answer.body, _OBJECTS if listed else _OBJECT):
        raise NoResponse(
            f"the control plane answers {method} {path.partition('?')[0]} with something else: {wrong}",
            "a Kubernetes API",
            "see that the machine is yours, and what answers there",
        )
    return answer


_NODE_KEEP = (
    "metadata.name",
    "metadata.uid",
    "metadata.labels",
    "metadata.annotations",
    "spec.unschedulable",
    "status.conditions",
    "status.addresses",
    "status.capacity",
    "status.allocatable",
    "status.nodeInfo.bootID",
    "status.nodeInfo.machineID",
    "status.nodeInfo.systemUUID",
)
_POD_KEEP = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "metadata.ownerReferences",
    "metadata.annotations",
    "metadata.deletionTimestamp",
    "metadata.deletionGracePeriodSeconds",
    "spec.terminationGracePeriodSeconds",
    "status.phase",
)


def _no_answer(answer: Response) -> NoResponse:
    kind = {_NO_CLUSTER: NoCluster, _NO_SESSION: NoSession}.get(answer.status, NoResponse)
    return kind(
        f"the control plane does not answer: {answer.error}",
        "a Kubernetes API that can be asked",
        "bring it back first, or leave the cluster out with --without-cluster",
    )


def _node_path(name: str) -> str:
    return f"/api/v1/nodes/{quote(name, safe='')}"


def _pod_path(pod: Pod) -> str:
    return f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/pods/{quote(pod.name, safe='')}"


def _pod(item: Mapping[str, Any]) -> Pod:
    metadata, spec = item["metadata"], item.get("spec") or {}
    owners = [owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")]
    grace = metadata.get("deletionGracePeriodSeconds") or spec.get("terminationGracePeriodSeconds") or 30
    return Pod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        owner=owners[0]["kind"] if owners else "",
        mirror="kubernetes.io/config.mirror" in (metadata.get("annotations") or {}),
        finished=(item.get("status") or {}).get("phase") in {"Succeeded", "Failed"},
        ending="deletionTimestamp" in metadata,
        grace_s=float(grace),
    )


def _devices(resources: Mapping[str, object]) -> int | None:
    """How many GPUs a node offers, or slices of GPUs, whatever its device plugin calls them; None for none at all."""
    found = devices.counts(resources)
    return sum(found.values()) if found else None


def _number(text: object) -> int | None:
    """A quantity of whole devices; None for none, and for what a device plugin would not write."""
    return int(str(text)) if text is not None and str(text).isdigit() else None


def _maintenance(node: Mapping[str, Any]) -> Maintenance | None:
    return maintenance.parse((node["metadata"].get("annotations") or {}).get(MAINTENANCE, ""))


def _with_taint(node: Mapping[str, Any], key: str, value: str, effect: str) -> dict[str, Any]:
    patch = _without_taint(node, key)
    patch["spec"]["taints"].append({"key": key, "value": value, "effect": effect})
    return patch


def _without_taint(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    taints = [taint for taint in (node.get("spec") or {}).get("taints") or () if taint["key"] != key]
    return {"spec": {"taints": taints}}


def _calm(metadata: Mapping[str, Any]) -> None:
    """Make each annotation one printable line: a reason may be in a machine's words, and `kubectl` shows them."""
    annotations = metadata.get("annotations", {})
    annotations.update({name: printable(text) for name, text in annotations.items() if text is not None})


def _merged(node: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    return {**node, "spec": {**(node.get("spec") or {}), **patch["spec"]}}


def _short(reason: str) -> str:
    """A reason as the value of a label or taint: at most 63 letters, digits, dashes, dots and underscores."""
    signs = "".join(sign if sign.isascii() and (sign.isalnum() or sign in "._-") else "-" for sign in reason.lower())
    words = "-".join(part for part in signs.split("-") if part)
    return words[:60].strip("-._") or "unknown"


def _stamp(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moments(annotations: Mapping[str, str]) -> list[float]:
    found = []
    for part in annotations.get(REPAIRS, "").split(","):
        with contextlib.suppress(ValueError):
            found.append(dt.datetime.strptime(part, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=dt.UTC).timestamp())
    return found
