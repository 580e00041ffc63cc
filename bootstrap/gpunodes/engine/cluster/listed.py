"""The version and the nodes of a cluster, by its API alone. Nothing is changed."""

from __future__ import annotations

from typing import Any

from gpunodes.ansible.module_utils.cluster.nodes import describe
from gpunodes.engine.cluster.api import Api
from gpunodes.engine.cluster.errors import check
from gpunodes.shape import Many, Maybe, Named, Optional

_KEEP = (
    "metadata.name",
    "metadata.uid",
    "metadata.labels",
    "metadata.annotations",
    "spec",
    "status.addresses",
    "status.allocatable",
    "status.conditions",
    "status.nodeInfo",
)
_TEXTS = Optional(Maybe(Named(str, 100_000)))
_NODE = {
    "metadata": {"name": str, "uid": Optional(str), "labels": _TEXTS, "annotations": _TEXTS},
    "status": {
        "addresses": Optional(Many({"type": str, "address": str}, 1000)),
        "conditions": Optional(Many({"type": str, "status": str}, 1000)),
        "nodeInfo": dict.fromkeys(("kubeletVersion", "machineID", "systemUUID", "bootID"), str),
    },
}


class Listed(Api):
    """Reads a cluster; the method raises as those of ``Api``."""

    def read(self) -> dict[str, Any]:
        """The same as the module ``cluster_info`` reports, as far as nodes have it."""
        version = self._call("GET", "/version").body
        nodes = self._list("/api/v1/nodes", _KEEP)
        check(version, {"gitVersion": str}, "its version")
        check(nodes, Many(_NODE, 20_000), "its nodes")
        return {"version": str(version["gitVersion"]), "endpoint": "", "nodes": [describe(node, ()) for node in nodes]}
