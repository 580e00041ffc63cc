"""What commands do with the cluster: read nodes and pods, mark nodes, evict pods, create Events."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlencode

from gpunodes.engine.cluster import marks, nodes, pages, pods
from gpunodes.engine.cluster.api import CONFLICT, NOT_FOUND, OK, PATIENCE_S, TOO_MANY_REQUESTS, Api, OnWait
from gpunodes.engine.cluster.errors import Refused
from gpunodes.engine.cluster.marks import NodeObject, Patch
from gpunodes.engine.cluster.pods import Pod
from gpunodes.engine.cluster.session import Session
from gpunodes.model import printable
from gpunodes.repair.maintenance import Maintenance
from gpunodes.repair.policy import Node
from gpunodes.repair.switched_off import CONFIG_MAP, Switched, parse

_PAUSE_S = 0.05
"""Pause between the attempts to change a node that another client changes, too."""
_MERGE = "application/merge-patch+json"
Check = Callable[[], None]
"""Raises to stop before a request."""


class Cluster(Api):
    """The nodes and pods of the cluster. The methods raise as those of ``Api``."""

    def __init__(
        self,
        session: Session,
        pool_label: str = "",
        patience_s: float = PATIENCE_S,
        on_wait: OnWait = lambda _: None,
    ) -> None:
        super().__init__(session, patience_s, on_wait)
        self._pool_label = pool_label

    # Nodes

    def nodes(self) -> list[Node]:
        """All nodes."""
        return [nodes.parse(item, self._pool_label) for item in self._list("/api/v1/nodes", nodes.KEEP)]

    def node(self, name: str, *, wait: bool = True) -> Node | None:
        """One node; None when it does not exist. Without ``wait`` a request without a response is not repeated."""
        found = self._find(nodes.path(name), wait=wait)
        return nodes.parse(found, self._pool_label) if found is not None else None

    def without_etcd(self, nodes: Iterable[Node]) -> frozenset[str]:
        """The control planes among ``nodes``, all nodes, whose member of etcd is not ready; none if etcd is elsewhere.

        A member is a static pod; a worker can make itself such a pod, too.
        """
        keep = ("metadata.name", "metadata.namespace", "spec.nodeName", "status.conditions")
        found = self._list(f"/api/v1/pods?{urlencode({'labelSelector': 'component=etcd,tier=control-plane'})}", keep)
        members: dict[str, bool] = {}
        for each in found:
            if each["metadata"].get("namespace") == "kube-system":
                node = str((each.get("spec") or {}).get("nodeName"))
                members[node] = members.get(node, True) and pods.is_ready(each)
        controls = {each.name for each in nodes if each.control_plane}
        if controls.isdisjoint(members):
            return frozenset()
        return frozenset(name for name in controls if not members.get(name, False))

    def cordon(self, name: str, repair: str, reason: str, now: float, check: Check = lambda: None) -> bool:
        """Cordon a node for a repair; False if its cordon is not that of a repair, or it is in maintenance.

        ``now`` in seconds since 1970. ``check`` raises if the lock was lost: it is called before each attempt, which
        may have waited for the API.
        """
        return self._change(name, lambda node: marks.cordon(node, repair, reason, now), check) is not None

    def note_repair(self, name: str, moment: float) -> None:
        """Record the time of a repair in an annotation of the node."""
        self._change(name, lambda node: marks.note_repair(node, moment))

    def taint_temporarily(self, name: str, repair: str) -> None:
        """Evict the pods that do not tolerate every taint from the node, so that they release its GPUs."""
        self._change(name, lambda node: marks.taint_temporarily(node, repair))

    def untaint(self, name: str) -> None:
        """Undo :meth:`taint_temporarily`."""
        self._change(name, marks.untaint)

    def uncordon(self, name: str, repair: str, now: float) -> bool:
        """Undo what a repair did to a node, and remove its cordon; returns whether the node is schedulable now.

        A cordon that does not belong to this repair stays, and that of maintenance; ``now`` in seconds since 1970.
        """
        before = self._change(name, lambda node: marks.uncordon(node, repair, now))
        return before is None or not marks.stays_cordoned(before, repair, now)

    def forget(self, name: str, repair: str) -> None:
        """Remove the taint of a repair that was dropped from a node, and its annotations if its cordon is gone."""
        self._change(name, lambda node: marks.forget(node, repair))

    def give_up(self, name: str, repair: str, reason: str) -> None:
        """Cordon, taint and label a node that gpunodes cannot repair."""
        self._change(name, lambda node: marks.give_up(node, repair, reason))

    def clear(self, name: str, now: float) -> bool:
        """Remove all annotations, labels and taints of repairs from a node, and their cordon; maintenance keeps it.

        Returns whether the node is schedulable now. ``now`` in seconds since 1970.
        """
        self._change(name, lambda node: marks.clear(node, now))
        after = self.node(name)
        return after is not None and not after.cordoned

    def begin_maintenance(self, name: str, made: Maintenance, *, cordon: bool) -> None:
        """Block repairs of a node, and cordon it unless it is cordoned."""
        self._change(name, lambda node: marks.begin_maintenance(node, made, cordon=cordon))

    def end_maintenance(self, name: str, kept: Maintenance | None = None) -> Maintenance | None:
        """Undo ``begin_maintenance`` and its cordon; returns the maintenance that ended, None when there was none.

        ``kept`` is the maintenance that goes on without a cordon.
        """
        before = self._change(name, lambda node: marks.end_maintenance(node, kept))
        return marks.maintenance_of(before) if before is not None else None

    def begin_rollout(self, name: str, rollout: str, *, cordon: bool, check: Check = lambda: None) -> bool:
        """Mark a node for a roll-out, and cordon it if ``cordon``; False if others cordoned it, or it has gone.

        ``check`` as of ``cordon``.
        """
        return self._change(name, lambda node: marks.begin_rollout(node, rollout, cordon=cordon), check) is not None

    def end_rollout(self, name: str, rollout: str, now: float, *, done: bool = False) -> bool:
        """Undo ``begin_rollout``; what others did to the node stays. Returns whether no cordon of others stays.

        ``now`` in seconds since 1970. ``done``: the work ended well; a command that resumes the roll-out reads it.
        """
        before = self._change(name, lambda node: marks.end_rollout(node, rollout, now, done=done))
        return before is None or not marks.cordoned_again(before)

    def return_plugin(self, name: str) -> bool:
        """Give the node back to the device plugin, if a command that did not end took it; whether it was away."""
        return self._change(name, marks.return_plugin) is not None

    def _change(
        self, name: str, change: Callable[[NodeObject], Patch | None], check: Check = lambda: None
    ) -> NodeObject | None:
        """Patch a node, starting from its current state; retry after a conflict. ``check`` as of ``cordon``.

        Returns the node as it was before, None if it was not changed. Raises Refused when every attempt fails with a
        conflict for ``patience_s``.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            node = self._find(nodes.path(name))
            patch = change(node) if node is not None else None
            if patch is None or node is None:
                return None
            try:
                path = f"{nodes.path(name)}?fieldManager=gpunodes"
                self._call("PATCH", path, marks.finished(patch, node), _MERGE, check=check)
            except Refused as error:
                if error.status != CONFLICT:
                    raise
                if time.monotonic() > deadline:
                    raise Refused(
                        CONFLICT,
                        f"another client changed the node {name} during every attempt for {self._patience_s:.0f} s",
                    ) from None
                time.sleep(_PAUSE_S)
            else:
                found: NodeObject = node
                return found

    # Machines that are off

    def switched_off(self) -> dict[str, Switched]:
        """The machines that the autoscaler keeps off, by the names that their nodes had; one request."""
        found = self._find(f"/api/v1/namespaces/kube-system/configmaps/{CONFIG_MAP}")
        return {name: each for name, each in parse((found or {}).get("data")).items() if each.on_purpose}

    # Pods

    def pods_on(self, name: str) -> list[Pod]:
        """The pods of a node."""
        query = urlencode({"fieldSelector": f"spec.nodeName={name}"})
        return [pods.parse(item) for item in self._list(f"/api/v1/pods?{query}", pods.KEEP, pages.PODS_AT_ONCE)]

    def evict(self, pod: Pod) -> str:
        """Request the eviction of a pod; returns why it is refused, "" when it is accepted or the pod is gone."""
        response = self.session.request("POST", f"{pod.path}/eviction", pods.eviction(pod))
        if response.status in {OK, NOT_FOUND, CONFLICT}:  # a conflict: a new pod has the same name
            return ""
        if response.status == TOO_MANY_REQUESTS:
            return response.error.rpartition("reports: ")[2] or "a disruption budget forbids it"
        return response.error

    def delete_now(self, pod: Pod) -> None:
        """Delete a pod without waiting for the kubelet."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}}
        with contextlib.suppress(Refused):
            self._call("DELETE", pod.path, body)

    # Events

    def event(self, node: str, reason: str, message: str, *, warning: bool) -> None:
        """Create an Event for a node; a failure is ignored, because nothing depends on Events."""
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body: dict[str, Any] = {
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
