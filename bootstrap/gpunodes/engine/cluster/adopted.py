"""What is read of a cluster that kubeadm made, before gpunodes manages it. Nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.engine.cluster.api import NOT_FOUND, Api
from gpunodes.engine.cluster.errors import Refused, check
from gpunodes.engine.cluster.shapes import ANY_NUMBER
from gpunodes.shape import Many, Maybe, Named, Optional

_NODES = (
    "metadata.name",
    "metadata.labels",
    "status.addresses",
    "status.allocatable",
    "status.nodeInfo.kubeletVersion",
    "status.nodeInfo.containerRuntimeVersion",
)
_SETS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.labels",
    "spec.template.metadata.labels",
    "spec.template.spec.containers.image",
)
_SLICES = ("metadata.name", "spec.driver", "spec.nodeName")
_LABELS = Optional(Maybe(Named(str, ANY_NUMBER)))
_NODE = {
    "metadata": {"name": str, "labels": _LABELS},
    "status": {
        "addresses": Optional(Maybe(Many({"type": str, "address": str}, ANY_NUMBER))),
        "allocatable": Optional(Maybe(Named(str, ANY_NUMBER))),
        "nodeInfo": {"kubeletVersion": str, "containerRuntimeVersion": str},
    },
}
_SET = {
    "metadata": {"name": str, "namespace": str, "labels": _LABELS},
    "spec": {
        "template": {
            "metadata": Optional(Maybe({"labels": _LABELS})),
            "spec": Optional({"containers": Optional(Many({"image": Optional(str)}, 1000))}),
        }
    },
}
_SLICE = {"spec": {"driver": str, "nodeName": Optional(str)}}
_MAP = {"data": Optional(Maybe(Named(str, 1000)))}


@dataclass(frozen=True, slots=True)
class Reading:
    """The objects of a cluster, of a valid shape; their texts are untrusted."""

    version: str
    configuration: str | None
    """kubeadm's ClusterConfiguration as text, None if kubeadm did not make the cluster."""
    nodes: Sequence[Mapping[str, Any]]
    daemon_sets: Sequence[Mapping[str, Any]]
    slices: Sequence[Mapping[str, Any]] = ()
    """ResourceSlices, of a cluster that has them."""


class Adopted(Api):
    """Reads a cluster; the methods raise as those of ``Api``."""

    def read(self) -> Reading:
        """Everything."""
        version = self._call("GET", "/version").body
        nodes = self._list("/api/v1/nodes", _NODES)
        sets = self._list("/apis/apps/v1/daemonsets", _SETS)
        slices = self._slices()
        found = self._find("/api/v1/namespaces/kube-system/configmaps/kubeadm-config")
        check(version, {"gitVersion": str}, "its version")
        check(nodes, Many(_NODE, 20_000), "its nodes")
        check(sets, Many(_SET, 10_000), "its DaemonSets")
        check(slices, Many(_SLICE, ANY_NUMBER), "its ResourceSlices")
        if found is not None:
            check(found, _MAP, "kubeadm's ConfigMap")
        data = (found or {}).get("data") or {}
        return Reading(str(version["gitVersion"]), data.get("ClusterConfiguration"), nodes, sets, slices)

    def _slices(self) -> Any:
        try:
            return self._list("/apis/resource.k8s.io/v1/resourceslices", _SLICES)
        except Refused as error:
            if error.status == NOT_FOUND:
                return []  # an older API, or one where they are switched off
            raise
