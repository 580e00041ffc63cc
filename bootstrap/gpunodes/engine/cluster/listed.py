"""The version and the nodes of a cluster, by its API alone. Nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunodes.ansible.module_utils.cluster.nodes import describe, unreadable
from gpunodes.engine.cluster.api import Api
from gpunodes.engine.cluster.errors import check
from gpunodes.engine.cluster.shapes import ANY_NUMBER
from gpunodes.shape import Many, Maybe, Named, Optional, wrong

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
_TEXTS = Optional(Maybe(Named(str, ANY_NUMBER)))
_NODE = {
    "metadata": {"name": str, "uid": Optional(str), "labels": _TEXTS, "annotations": _TEXTS},
    "status": {
        "addresses": Optional(Many({"type": str, "address": str}, ANY_NUMBER)),
        "conditions": Optional(Many({"type": str, "status": str}, ANY_NUMBER)),
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
        # One by one: a node that is not as it must be is no reason to show none.
        return {"version": str(version["gitVersion"]), "endpoint": "", "nodes": [_described(node) for node in nodes]}


def _described(node: Mapping[str, Any]) -> dict[str, Any]:
    found = wrong(node, _NODE)
    return unreadable(str(node["metadata"]["name"]), found) if found else describe(node, ())
