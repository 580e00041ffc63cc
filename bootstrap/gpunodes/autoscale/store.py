"""What the power server reads and writes in the cluster: nodes, and the states of its machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpunodes.ansible.module_utils.scaling import KEPT_OFF
from gpunodes.autoscale import kept_off, nodes, state
from gpunodes.autoscale.kept_off import KeptOff
from gpunodes.autoscale.nodes import SeenNode
from gpunodes.autoscale.state import MachineState
from gpunodes.engine.cluster.api import CONFLICT, NOT_FOUND
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.errors import Refused
from gpunodes.engine.cluster.marks import Patch
from gpunodes.engine.cluster.nodes import path
from gpunodes.errors import GpunodesError
from gpunodes.planner import versions
from gpunodes.repair.switched_off import CONFIG_MAP as NAME

POOL_LABEL = "gpunodes.dev/pool"
_MAPS = "/api/v1/namespaces/kube-system/configmaps"
_MERGE = "application/merge-patch+json"
_MAX_LOG = 64 << 10


class Overtaken(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """Another power server wrote the states: this one must not go on with what it knows."""


class Store(Cluster):
    """The cluster of the power server. The methods raise as those of ``Api``."""

    _version = ""

    def states(self, *, create: bool = True) -> dict[str, MachineState]:
        """The states of all machines; the ConfigMap is created if it does not exist, unless ``create`` is false."""
        found = self._find(f"{_MAPS}/{NAME}")
        if found is None and not create:
            return {}
        if found is None:
            labels = {"app.kubernetes.io/managed-by": "gpunodes"}
            found = self._call("POST", _MAPS, {"metadata": {"name": NAME, "labels": labels}, "data": {}}).body
        self._version = found["metadata"]["resourceVersion"]
        data = found.get("data")
        texts = data if isinstance(data, Mapping) else {}
        parsed = {str(name): state.parse(str(text)) for name, text in texts.items()}
        return {name: each for name, each in parsed.items() if each is not None}

    def write(self, changes: Mapping[str, MachineState | None]) -> None:
        """Write the states of some machines, None to forget one; raises Overtaken if anyone else wrote meanwhile."""
        patch = {
            "metadata": {"resourceVersion": self._version},
            "data": {name: each.text() if each else None for name, each in changes.items()},
        }
        try:
            written = self._call("PATCH", f"{_MAPS}/{NAME}", patch, _MERGE).body
        except Refused as error:
            if error.status not in (CONFLICT, NOT_FOUND):
                raise
            raise Overtaken(
                f"another program changed the ConfigMap {NAME}", "one power server", "it starts again and reads it anew"
            ) from error
        self._version = written["metadata"]["resourceVersion"]

    def kept_off(self) -> dict[str, KeptOff]:
        """The machines that users switched off, by the names of their nodes."""
        found = self._find(f"{_MAPS}/{KEPT_OFF}")
        return kept_off.parse((found or {}).get("data"))

    def keep_off(self, name: str, made: KeptOff | None) -> None:
        """Record that a user switched a machine off; None forgets that."""
        patch = {"data": {name: made.text() if made else None}}
        try:
            self._call("PATCH", f"{_MAPS}/{KEPT_OFF}", patch, _MERGE)
        except Refused as error:
            if error.status != NOT_FOUND:
                raise
            if made:
                metadata = {"name": KEPT_OFF, "labels": {"app.kubernetes.io/managed-by": "gpunodes"}}
                self._call("POST", _MAPS, {"metadata": metadata, **patch})

    def api_version(self) -> str:
        """The version of the API server, such as v1.36.3, "" if it reports none."""
        return versions.known(self._call("GET", "/version").body.get("gitVersion"))

    def seen_nodes(self) -> dict[str, SeenNode]:
        """All nodes that can be read, by name."""
        found = (nodes.seen(item, POOL_LABEL) for item in self._list("/api/v1/nodes", nodes.KEEP))
        return {each.node.name: each for each in found if each is not None}

    def seen_node(self, name: str) -> SeenNode | None:
        """One node as it is now; None if it does not exist or cannot be read."""
        found = self._find(path(name))
        return nodes.seen(found, POOL_LABEL) if found is not None else None

    def change(self, name: str, make: Callable[[SeenNode], Patch | None]) -> None:
        """Patch a node by what ``make`` returns for its current state; None changes nothing."""

        def patch(item: Mapping[str, Any]) -> Patch | None:
            found = nodes.seen(item, POOL_LABEL)
            return make(found) if found else None

        self._change(name, patch)

    def ask_off(self, name: str) -> None:
        """Mark a node so that its machine shuts itself down, in this boot."""
        self.change(name, lambda found: {"metadata": {"annotations": {nodes.POWER_OFF: found.node.boot_id}}})

    def pod(self, path: str) -> Mapping[str, Any] | None:
        """A pod as the API has it; None if it does not exist."""
        found: Mapping[str, Any] | None = self._find(path)
        return found

    def create_pod(self, path: str, pod: Mapping[str, Any]) -> None:
        """Create a pod; one that exists is no error."""
        try:
            self._call("POST", path, pod)
        except Refused as error:
            if error.status != CONFLICT:
                raise

    def log(self, path: str) -> str:
        """The last lines of a pod's log, from one attempt: a kubelet may keep each waiting to its limit."""
        return str(self.call_once("GET", f"{path}/log?tailLines=200&limitBytes={_MAX_LOG}").body["message"])

    def delete_pod(self, path: str) -> None:
        """Delete a pod; one that is gone is no error."""
        self._delete(path)

    def delete_node(self, name: str, may_go: Callable[[SeenNode], bool]) -> None:
        """Delete a node if it may go, as it is now; one that is gone is no error, one that cannot be read stays."""
        found = self._find(path(name))
        seen = nodes.seen(found, POOL_LABEL) if found is not None else None
        if found is None or seen is None or not may_go(seen):
            return
        try:
            self._call("DELETE", path(name), {"preconditions": {"uid": found["metadata"]["uid"]}})
        except Refused as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                raise
