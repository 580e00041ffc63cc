"""A client for the Kubernetes API: nodes, pods, evictions, Leases and events.

The controller needs SSH only: a small program on the control-plane machine, sent over the connection
(``module_utils/gpunodes/session.py``), forwards requests to the API and returns the responses. No credentials leave the
control-plane machine.
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

from gpunodes import shape
from gpunodes.ansible.module_utils.gpunodes import devices
from gpunodes.ansible.module_utils.gpunodes.cluster import MAINTENANCE
from gpunodes.engine.events import ssh_reason
from gpunodes.engine.remote import answers, programs, shell
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
"""Node annotation: the times of recent repairs, for the loop protection of every user's controller."""
NEEDS_REPAIR = f"{_PREFIX}needs-repair"
"""Node annotation (the full reason), label and taint (the reason in short): gpunodes cannot repair the node."""
TEMPORARY_TAINT = f"{_PREFIX}repair"
"""Taint NoExecute while GPUs are reset: it evicts pods that do not tolerate every taint, also device plugins."""
_GPU_COUNT = f"{_PREFIX}gpu-count"
"""Node label: the number of GPUs that the machine had when it joined the cluster."""
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"

_CALL_S = 45.0
"""Time limit in seconds for one response; the session's own limit is 30."""
_REASON_S = 5.0
"""Seconds in which a broken session must report why it ended."""
_PATIENCE_S = 60.0
_PAUSE_S = 0.05
"""Pause between the attempts to change a node that another client changes, too."""
# No response; 403 from an API server that has not loaded its RBAC roles yet; overloaded; etcd timed out.
_TRANSIENT = frozenset({0, -2, 403, 429, 500, 503, 504})
_NO_CLUSTER = -1
_NO_SESSION = -2
_INVALID = -3
_OK = 200
_NOT_FOUND = 404
_CONFLICT = 409
_TOO_MANY_REQUESTS = 429
_REPAIRS_KEPT = 8
_MERGE = "application/merge-patch+json"

# The fields of a line of the session (module_utils/gpunodes/session.py).
_FRAME = {"id": int, "status": int, "body": object, "error": str, "time": float}


class NoResponse(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """The control plane does not respond."""


class NoCluster(NoResponse):
    """The control-plane machine runs no cluster."""


class NoSession(NoResponse):
    """The control-plane machine is unreachable, or refuses the login."""


class Refused(GpunodesError):  # noqa: N818 - as above
    """The API returned an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Transport:
    """How the session's program is started: its argv, and the start of its standard input."""

    argv: Sequence[str]
    name: str = "the control plane"
    start: bytes = field(default=b"", repr=False)
    environment: Mapping[str, str] | None = field(default=None, repr=False)
    """None: inherit the environment of this process."""


def over_ssh(address: str, variables: Mapping[str, Any], kubeconfig: str = ADMIN) -> Transport:
    """A session on a control-plane machine, with a kubeconfig file there."""
    command = programs.pack("session", {"kubeconfig": kubeconfig}).command(variables)
    timeouts = ("-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
    return Transport(
        [*shell.command(address, variables, *timeouts), command.line],
        name=address,
        start=command.stdin,
        environment=shell.environment(variables),
    )


def here(python: str, kubeconfig: Path) -> Transport:
    """A session on the controller, with a kubeconfig file."""
    program = programs.pack("session", {"kubeconfig": str(kubeconfig)})
    return Transport(program.argv({"ansible_python_interpreter": python}), "the controller", program.packed)


@dataclass(frozen=True, slots=True)
class Response:
    """A response of the API; ``time`` is the control plane's clock, in seconds since 1970."""

    status: int
    body: Any
    error: str
    time: float


class Session:
    """A persistent session, opened by the first request and reopened when the connection breaks. Thread-safe."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._process: subprocess.Popen[str] | None = None
        self._pending: dict[int, Future[Response]] = {}
        self._mutex = threading.Lock()
        self._next = 0
        self.calls = 0
        """The number of requests; tests measure it."""

    def request(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", keep: Sequence[str] = ()
    ) -> Response:
        """Send a request once; the status is 0 or less when there is no response."""
        fields = {"method": method, "path": path, "body": body, "type": kind, "keep": list(keep)}
        future: Future[Response] = Future()
        broken = ""
        with self._mutex:
            self._next += 1
            self.calls += 1
            number = self._next
            self._pending[number] = future
            try:
                process = self._open()
                assert process.stdin  # noqa: S101 - for the type checker
                process.stdin.write(json.dumps({"id": number, **fields}) + "\n")
                process.stdin.flush()
            except BrokenPipeError as error:
                # ssh ended: the reader of its output gets the reason, and fails this request with it.
                broken = str(error)
            except OSError as error:
                self._pending.pop(number, None)
                return Response(_NO_SESSION, None, str(error), time.time())
        try:
            return future.result(_REASON_S if broken else _CALL_S)
        except TimeoutError:
            with self._mutex:
                self._pending.pop(number, None)
                self._end()
            return Response(_NO_SESSION, None, broken or f"no response in {_CALL_S:.0f} s", time.time())

    def close(self) -> None:
        """End the session."""
        with self._mutex:
            self._end()

    def _open(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._process = subprocess.Popen(
            self._transport.argv,
            env=self._transport.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdin  # noqa: S101 - for the type checker
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        programs.send(self._process, self._transport.start)
        return self._process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout  # noqa: S101 - for the type checker
        assert process.stderr  # noqa: S101 - for the type checker
        with contextlib.suppress(ValueError, OSError):
            answers.skip_banner(process.stdout)
            for line in process.stdout:
                try:
                    frame = json.loads(line)
                except (ValueError, RecursionError):
                    frame = None
                if violation := shape.wrong(frame, _FRAME):
                    # The request that this line belongs to is unknown: all of them fail.
                    self._fail_pending(process, _INVALID, violation)
                    continue
                with self._mutex:
                    future = self._pending.pop(frame["id"], None)
                if future is not None:
                    future.set_result(Response(frame["status"], frame["body"], frame["error"], frame["time"]))
        output = ""
        with contextlib.suppress(ValueError, OSError):
            output = ssh_reason(process.stderr.read(4096))
        self._fail_pending(process, _NO_SESSION, output or "the session ended")

    def _fail_pending(self, process: subprocess.Popen[str], status: int, why: str) -> None:
        """Fail all requests that wait for a response of ``process``."""
        with self._mutex:
            if self._process is not None and self._process is not process:
                return  # a new process serves the session now
            failed, self._pending = self._pending, {}
        for future in failed.values():
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
    """The kind of the Kubernetes controller that owns it, "" for none."""
    mirror: bool
    finished: bool
    ending: bool
    grace_s: float

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"


class Cluster:
    """The cluster, over one session.

    Every method raises NoResponse when the control plane does not respond for ``patience_s``, and Refused for other
    errors of the API.
    """

    def __init__(self, session: Session, pool_label: str = "", patience_s: float = _PATIENCE_S) -> None:
        self.session = session
        self._pool_label = pool_label
        self._patience_s = patience_s

    # Nodes

    def nodes(self) -> list[Node]:
        """All nodes, with one request."""
        response = self._call("GET", "/api/v1/nodes", keep=_NODE_KEEP)
        return [self._parse_node(item) for item in response.body["items"]]

    def node(self, name: str) -> Node | None:
        """One node; None when it does not exist."""
        found = self._find(_node_path(name))
        return self._parse_node(found) if found is not None else None

    def cordon(self, name: str, repair: str, reason: str) -> bool:
        """Cordon a node for a repair; returns whether the cordon belongs to gpunodes, not to a user."""

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
        """Record the time of a repair in an annotation of the node."""

        def change(node: Mapping[str, Any]) -> dict[str, Any] | None:
            known = _moments(node["metadata"].get("annotations") or {})
            if moment in known:
                return None
            kept = [*known, moment][-_REPAIRS_KEPT:]
            return {"metadata": {"annotations": {REPAIRS: ",".join(_stamp(each) for each in kept)}}}

        self._change(name, change)

    def uncordon(self, name: str, repair: str) -> bool:
        """Undo what a repair did to a node, and remove its cordon; returns whether the node is schedulable now.

        A cordon that does not belong to this repair stays.
        """
        cordoned = False

        def change(node: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal cordoned
            own = (node["metadata"].get("annotations") or {}).get(CORDONED_BY) == repair
            patch = _without_taint(node, TEMPORARY_TAINT)
            patch["metadata"] = {"annotations": {CORDONED_BY: None, REASON: None}} if own else {}
            if own:
                patch.setdefault("spec", {})["unschedulable"] = False
            cordoned = not own and bool(node.get("spec", {}).get("unschedulable"))
            return patch

        self._change(name, change)
        return not cordoned

    def begin_maintenance(self, name: str, made: Maintenance, *, cordon: bool) -> bool:
        """Block repairs of a node, and cordon it unless it is cordoned; returns whether maintenance owns the cordon."""
        own = False

        def change(node: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal own
            before = _maintenance(node)
            schedulable = not node.get("spec", {}).get("unschedulable")
            own = cordon if schedulable else before is not None and before.cordoned
            text = dataclasses.replace(made, cordoned=own).text()
            patch: dict[str, Any] = {"metadata": {"annotations": {MAINTENANCE: text}}}
            if cordon and schedulable:
                patch["spec"] = {"unschedulable": True}
            return patch

        self._change(name, change)
        return own

    def end_maintenance(self, name: str) -> Maintenance | None:
        """Undo ``begin_maintenance`` and its cordon; returns the maintenance that ended, None when there was none."""
        before: Maintenance | None = None

        def change(node: Mapping[str, Any]) -> dict[str, Any] | None:
            nonlocal before
            before = _maintenance(node)
            annotations = node["metadata"].get("annotations") or {}
            if MAINTENANCE not in annotations:
                return None
            patch: dict[str, Any] = {"metadata": {"annotations": {MAINTENANCE: None}}}
            if before and before.cordoned and NEEDS_REPAIR in annotations:
                # A repair gave up the node after its maintenance expired: now the cordon belongs to the repair.
                patch["metadata"]["annotations"][CORDONED_BY] = "maintenance"
            elif before and before.cordoned and CORDONED_BY not in annotations:
                patch["spec"] = {"unschedulable": False}
            return patch

        self._change(name, change)
        return before

    def taint_temporarily(self, name: str, repair: str) -> None:
        """Evict the pods that do not tolerate every taint from the node, so that they release its GPUs."""
        self._change(name, lambda node: _with_taint(node, TEMPORARY_TAINT, _short(repair), "NoExecute"))

    def untaint(self, name: str) -> None:
        """Undo :meth:`taint_temporarily`."""
        self._change(name, lambda node: _without_taint(node, TEMPORARY_TAINT))

    def give_up(self, name: str, repair: str, reason: str) -> None:
        """Cordon, taint and label a node that gpunodes cannot repair."""

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
        """Remove all annotations, labels and taints of repairs from a node, and their cordon.

        Returns whether the node is schedulable now.
        """

        def change(node: Mapping[str, Any]) -> dict[str, Any]:
            own = CORDONED_BY in (node["metadata"].get("annotations") or {})
            patch = _without_taint(_merged(node, _without_taint(node, TEMPORARY_TAINT)), NEEDS_REPAIR)
            removed = dict.fromkeys((CORDONED_BY, REASON, REPAIRS, NEEDS_REPAIR))
            patch["metadata"] = {"annotations": removed, "labels": {NEEDS_REPAIR: None}}
            if own:
                patch["spec"]["unschedulable"] = False
            return patch

        self._change(name, change)
        after = self.node(name)
        return after is not None and not after.cordoned

    def _change(self, name: str, change: Callable[[Mapping[str, Any]], dict[str, Any] | None]) -> bool:
        """Patch a node, starting from its current state; retry after a conflict. Returns False without a change.

        Raises Refused when every attempt fails with a conflict for ``patience_s``.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            node = self._find(_node_path(name))
            patch = change(node) if node is not None else None
            if patch is None or node is None:
                return False
            patch.setdefault("metadata", {})["resourceVersion"] = node["metadata"]["resourceVersion"]
            _make_printable(patch["metadata"])
            try:
                self._call("PATCH", f"{_node_path(name)}?fieldManager=gpunodes", patch, _MERGE)
            except Refused as error:
                if error.status != _CONFLICT:
                    raise
                if time.monotonic() > deadline:
                    raise Refused(
                        _CONFLICT,
                        f"another client changed the node {name} during every attempt for {self._patience_s:.0f} s",
                    ) from None
                time.sleep(_PAUSE_S)
            else:
                return True

    def _parse_node(self, item: Mapping[str, Any]) -> Node:
        """A node. An invalid Node object counts as in maintenance, so that it is skipped and does not stop a repair."""
        try:
            return self._node(item)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            metadata = item["metadata"]
            why = Maintenance("its Node object cannot be parsed: see `kubectl describe node`")
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
        # A removed device plugin leaves the name of its resource behind, with zero devices.
        capacity, labelled = _devices(status.get("capacity") or {}), _number(labels.get(_GPU_COUNT))
        info = status.get("nodeInfo") or {}
        ready = [entry["status"] for entry in status.get("conditions", ()) if entry["type"] == "Ready"]
        return Node(
            name=metadata["name"],
            addresses=tuple(entry["address"] for entry in status.get("addresses", ())),
            ready=ready == ["True"],
            boot_id=info.get("bootID", ""),
            machine_id=info.get("machineID", ""),
            system_uuid=info.get("systemUUID", ""),
            control_plane=_CONTROL_PLANE in labels,
            pool=pool_of(labels.get(self._pool_label, ""), gpus=bool(labelled) or capacity is not None),
            cordoned=bool(spec.get("unschedulable")),
            cordoned_by_repair=annotations.get(CORDONED_BY, ""),
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
        """Request the eviction of a pod; returns why it is refused, "" when it is accepted or the pod is gone."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        response = self.session.request("POST", f"{_pod_path(pod)}/eviction", body)
        if response.status in {_OK, _NOT_FOUND, _CONFLICT}:  # a conflict: a new pod has the same name
            return ""
        if response.status == _TOO_MANY_REQUESTS:
            return response.error.rpartition("reports: ")[2] or "a disruption budget forbids it"
        return response.error

    def delete_now(self, pod: Pod) -> None:
        """Delete a pod without waiting for the kubelet."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}}
        with contextlib.suppress(Refused):
            self._call("DELETE", _pod_path(pod), body)

    def event(self, node: str, reason: str, message: str, *, warning: bool) -> None:
        """Create an Event for a node; a failure is ignored, because nothing depends on Events."""
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{node}.gpunodes-", "namespace": "default"},
            # As the kubelet does, the name is given as uid: `kubectl describe` searches for it.
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
        """Send a request once; raises NoResponse or Refused without a retry."""
        response = self.session.request(method, path, body, kind)
        if response.status <= 0:
            raise _no_response(response)
        if response.status != _OK:
            raise Refused(response.status, response.error)
        return _checked(method, path, response)

    def lock_holder(self) -> Mapping[str, Any] | None:
        """The holder of the lock over SSH (engine/locks.py), as recorded in the lock file; None when it is free."""
        body = self.call_once("LOCK", "").body
        return body if isinstance(body, Mapping) else None

    def _call(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", keep: Sequence[str] = ()
    ) -> Response:
        deadline = time.monotonic() + self._patience_s
        while True:
            response = self.session.request(method, path, body, kind, keep)
            if response.status == _OK:
                return _checked(method, path, response)
            if response.status not in _TRANSIENT or time.monotonic() > deadline:
                break
            time.sleep(1)
        if response.status <= 0:
            raise _no_response(response)
        raise Refused(response.status, response.error)

    def _find(self, path: str) -> Any | None:
        try:
            return self._call("GET", path).body
        except Refused as error:
            if error.status == _NOT_FOUND:
                return None
            raise


# The fields that every object must have. The API server guarantees them, but another program may have responded.
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
# A list is requested with some of these fields only.
_OBJECTS = {"items": Many({**_OBJECT, "metadata": _METADATA}, 10_000_000)}


def _checked(method: str, path: str, response: Response) -> Response:
    """The response, after a check that its body fits the request; raises NoResponse."""
    is_list = method == "GET" and re.search(r"/(nodes|pods|leases)(\?|$)", path)
    if method in {"LOCK", "DELETE"} or path == "/version" or path.endswith("/eviction"):
        return response
    if violation := shape.wrong(response.body, _OBJECTS if is_list else _OBJECT):
        raise NoResponse(
            f"the response of the control plane to {method} {path.partition('?')[0]} is not valid: {violation}",
            "a Kubernetes API",
            "check the address of the control-plane machine, and which program listens there",
        )
    return response


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


def _no_response(response: Response) -> NoResponse:
    kind = {_NO_CLUSTER: NoCluster, _NO_SESSION: NoSession}.get(response.status, NoResponse)
    return kind(
        f"the control plane does not respond: {response.error}",
        "a Kubernetes API that responds",
        "restore the control plane first, or skip the cluster with --without-cluster",
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
    """The number of GPUs, or slices of GPUs, that a node offers under any resource name; None without a resource."""
    found = devices.counts(resources)
    return sum(found.values()) if found else None


def _number(text: object) -> int | None:
    """A quantity of whole devices; None for a missing or invalid quantity."""
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


def _make_printable(metadata: Mapping[str, Any]) -> None:
    """Make each annotation one printable line: a reason may quote a machine's output, and `kubectl` prints it."""
    annotations = metadata.get("annotations", {})
    annotations.update({name: printable(text) for name, text in annotations.items() if text is not None})


def _merged(node: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    return {**node, "spec": {**(node.get("spec") or {}), **patch["spec"]}}


def _short(reason: str) -> str:
    """A reason as the value of a label or taint: at most 63 letters, digits, dashes, dots and underscores."""
    replaced = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in reason.lower())
    value = "-".join(part for part in replaced.split("-") if part)
    return value[:60].strip("-._") or "unknown"


def _stamp(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moments(annotations: Mapping[str, str]) -> list[float]:
    found = []
    for part in annotations.get(REPAIRS, "").split(","):
        with contextlib.suppress(ValueError):
            found.append(dt.datetime.strptime(part, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=dt.UTC).timestamp())
    return found
