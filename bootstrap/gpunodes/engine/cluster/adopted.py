"""What is read of a cluster that kubeadm made, before gpunodes manages it. Nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.engine.cluster.api import Api
from gpunodes.engine.cluster.errors import check
from gpunodes.shape import Many, Maybe, Named, Optional

_NODES = (
    "metadata.name",
    "metadata.labels",
    "status.addresses",
    "status.nodeInfo.kubeletVersion",
    "status.nodeInfo.containerRuntimeVersion",
)
_SETS = ("metadata.name", "metadata.namespace", "spec.template.metadata.labels")
_LABELS = Optional(Maybe(Named(str, 100_000)))
_NODE = {
    "metadata": {"name": str, "labels": _LABELS},
    "status": {
        "addresses": Optional(Maybe(Many({"type": str, "address": str}, 1000))),
        "nodeInfo": {"kubeletVersion": str, "containerRuntimeVersion": str},
    },
}
_SET = {
    "metadata": {"name": str, "namespace": str},
    "spec": {"template": {"metadata": Optional(Maybe({"labels": _LABELS}))}},
}
_MAP = {"data": Optional(Maybe(Named(str, 1000)))}


@dataclass(frozen=True, slots=True)
class Reading:
    """The objects of a cluster, of a valid shape; their texts are untrusted."""

    version: str
    configuration: str | None
    """kubeadm's ClusterConfiguration as text, None if kubeadm did not make the cluster."""
    nodes: Sequence[Mapping[str, Any]]
    daemon_sets: Sequence[Mapping[str, Any]]


class Adopted(Api):
    """Reads a cluster; the methods raise as those of ``Api``."""

    def read(self) -> Reading:
        """Everything, with four requests."""
        version = self._call("GET", "/version").body
        nodes = self._call("GET", "/api/v1/nodes", keep=_NODES).body["items"]
        sets = self._call("GET", "/apis/apps/v1/daemonsets", keep=_SETS).body["items"]
        found = self._find("/api/v1/namespaces/kube-system/configmaps/kubeadm-config")
        check(version, {"gitVersion": str}, "its version")
        check(nodes, Many(_NODE, 20_000), "its nodes")
        check(sets, Many(_SET, 10_000), "its DaemonSets")
        if found is not None:
            check(found, _MAP, "kubeadm's ConfigMap")
        data = (found or {}).get("data") or {}
        return Reading(str(version["gitVersion"]), data.get("ClusterConfiguration"), nodes, sets)
