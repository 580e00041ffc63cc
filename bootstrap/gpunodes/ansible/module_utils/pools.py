"""The labels and taints of nodes that gpunodes manages; others are never touched."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import devices, kube_api, kubeconfig
from .kube_api import ApiError
from .problem import MachineProblem
from .report import Difference

MANAGED = "gpunodes.dev/managed"
"""Node annotation: the names of the managed labels and taints."""
_LONGEST = 1 << 16
"""Maximum length of the annotation in characters; a node could write a much longer one."""
# Taints that Kubernetes and gpunodes set on unhealthy nodes. A node can write the annotation but not taints (admission
# plugin NodeRestriction): it must not be able to make gpunodes remove these taints.
_PROTECTED = re.compile(r"([^/]*\.)?(kubernetes\.io|k8s\.io|gpunodes\.dev)/")
# The same for labels. A node may change its labels of other names itself (NodeRestriction), those of gpunodes too.
_PROTECTED_LABELS = re.compile(r"([^/]*\.)?(kubernetes\.io|k8s\.io)/")
_CONFLICT = 409
REGISTERS_S = 180.0
"""Seconds to wait until a kubelet registers its node: `kubeadm join` can end before that."""
_PAUSE_S = 1.0
Patch = Callable[[Mapping[str, Any]], "dict[str, Any] | None"]
"""Gives the merge patch of a node, None if nothing has to change."""
_NEW: Mapping[str, Any] = {"metadata": {"resourceVersion": ""}}
"""A node that does not exist yet."""


def managed(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node's managed labels and taints with their current values: {"labels": {...}, "taints": [...]}."""
    metadata = node["metadata"]
    names = _managed_names((metadata.get("annotations") or {}).get(MANAGED))
    labels = metadata.get("labels") or {}
    keys = set(names["taints"])
    return {
        "labels": {name: labels[name] for name in names["labels"] if name in labels},
        "taints": [_plain(taint) for taint in node.get("spec", {}).get("taints") or () if _key(taint) in keys],
    }


def plugin_is_away(node: Mapping[str, Any]) -> bool:
    """Whether a command took the label from a node with GPUs that the device plugin follows."""
    labels = node["metadata"].get("labels") or {}
    return devices.COUNT in labels and devices.PLUGIN not in labels


def with_plugin(node: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The labels and annotations that give such a node back to the device plugin, {} for another node."""
    if not plugin_is_away(node):
        return {}
    names = _managed_names((node["metadata"].get("annotations") or {}).get(MANAGED))
    text = json.dumps({"labels": sorted({*names["labels"], devices.PLUGIN}), "taints": sorted(names["taints"])})
    return {"labels": {devices.PLUGIN: "true"}, "annotations": {MANAGED: text}}


def apply(
    name: str, labels: Mapping[str, str], taints: Sequence[Mapping[str, str]], check: bool
) -> tuple[list[str], list[Difference]]:
    """Replace a node's managed labels and taints; returns the names of changed nodes, and the differences.

    Raises MachineProblem if the node does not exist and is not registered in time. With ``check`` a node, or a whole
    cluster, that does not exist yet gets them.
    """
    return _converge(name, lambda node: patch_of(node, labels, taints), check)


def add(name: str, labels: Mapping[str, str], check: bool) -> list[Difference]:
    """Add managed labels to a node, whose others stay; returns the differences. Raises and checks as ``apply`` does."""

    def patch(node: Mapping[str, Any]) -> dict[str, Any] | None:
        present = managed(node)
        if labels.items() <= present["labels"].items():
            return None
        return patch_of(node, {**present["labels"], **labels}, present["taints"])

    return _converge(name, patch, check)[1]


def planned(name: str, labels: Mapping[str, str]) -> list[Difference]:
    """The differences that ``add`` makes on a node that does not exist yet."""
    return _changed(name, _NEW, patch_of(_NEW, labels, ()))[1]


def _converge(name: str, patch_of_node: Patch, check: bool) -> tuple[list[str], list[Difference]]:
    if check and kubeconfig.load(kubeconfig.ADMIN) is None:
        return _changed(name, _NEW, patch_of_node(_NEW))
    client = kube_api.admin()
    deadline = time.monotonic() + REGISTERS_S
    while True:
        node = client.find(f"/api/v1/nodes/{name}")
        if node is None:
            if check or patch_of_node(_NEW) is None:
                return _changed(name, _NEW, patch_of_node(_NEW))
            if time.monotonic() > deadline:
                raise MachineProblem(
                    f"the cluster has no node {name}",
                    f"a node that its kubelet registers within {REGISTERS_S:.0f} s",
                    f"see `journalctl -u kubelet` on {name}",
                )
            time.sleep(_PAUSE_S)
            continue
        patch = patch_of_node(node)
        if patch is not None and not check:
            try:
                client.call("PATCH", f"/api/v1/nodes/{name}", patch, {"fieldManager": kube_api.MANAGER}, kube_api.MERGE)
            except ApiError as error:
                if error.status != _CONFLICT:
                    raise
                continue  # the node was changed meanwhile: read it again
        return _changed(name, node, patch)


def _changed(name: str, node: Mapping[str, Any], patch: Mapping[str, Any] | None) -> tuple[list[str], list[Difference]]:
    """The node's name and its differences, both empty without a patch."""
    if patch is None:
        return [], []
    new = {kind: patch["metadata"][kind] for kind in ("labels", "annotations")}
    old = {kind: node["metadata"].get(kind) or {} for kind in new}
    before: dict[str, Any] = {kind: {key: old[kind][key] for key in new[kind] if key in old[kind]} for kind in new}
    after: dict[str, Any] = {
        kind: {key: value for key, value in new[kind].items() if value is not None} for kind in new
    }
    if "spec" in patch:
        before["taints"] = [_plain(taint) for taint in node.get("spec", {}).get("taints") or ()]
        after["taints"] = [_plain(taint) for taint in patch["spec"]["taints"] or ()]
    return [name], [Difference(f"Node {name}", before, after)]


def patch_of(
    node: Mapping[str, Any], labels: Mapping[str, str], taints: Sequence[Mapping[str, str]]
) -> dict[str, Any] | None:
    """The merge patch that sets these labels and taints on a node, None if it has them."""
    metadata, spec = node["metadata"], node.get("spec", {})
    now = metadata.get("labels") or {}
    annotation = (metadata.get("annotations") or {}).get(MANAGED)
    names = _managed_names(annotation)
    wanted = json.dumps({"labels": sorted(labels), "taints": sorted(_key(taint) for taint in taints)})
    changed: dict[str, str | None] = {key: value for key, value in labels.items() if now.get(key) != value}
    changed |= {key: None for key in names["labels"] if key not in labels and key in now}
    managed_keys = {*names["taints"], *(_key(taint) for taint in taints)}
    present = list(spec.get("taints") or ())
    kept = [taint for taint in present if _key(taint) not in managed_keys]
    replaced = [taint for taint in present if _key(taint) in managed_keys]
    same = sorted(map(_text, map(_plain, replaced))) == sorted(map(_text, map(_plain, taints)))
    if not changed and same and (annotation == wanted or (annotation is None and not labels and not taints)):
        return None
    empty = not labels and not taints
    patch: dict[str, Any] = {
        # The patch replaces the whole list of taints: it must fail if the node was changed meanwhile.
        "metadata": {
            "resourceVersion": metadata["resourceVersion"],
            "labels": changed,
            "annotations": {MANAGED: None if empty else wanted},
        }
    }
    if not same:
        patch["spec"] = {"taints": [*kept, *map(_plain, taints)] or None}
    return patch


def _managed_names(annotation: str | None) -> dict[str, list[str]]:
    """The names in the annotation; a node can write anything into it, and everything but lists of names is ignored."""
    try:
        found = json.loads(annotation or "{}") if len(annotation or "") <= _LONGEST else {}
    except (ValueError, RecursionError):
        found = {}
    listed = {kind: found.get(kind) if isinstance(found, dict) else None for kind in ("labels", "taints")}
    valid = {
        kind: [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        for kind, names in listed.items()
    }
    return {
        "labels": [name for name in valid["labels"] if not _PROTECTED_LABELS.match(name)],
        "taints": [name for name in valid["taints"] if not _PROTECTED.match(name)],
    }


def _key(taint: Mapping[str, str]) -> str:
    return f"{taint['key']}:{taint['effect']}"


def _plain(taint: Mapping[str, str]) -> dict[str, str]:
    return {key: taint[key] for key in ("key", "value", "effect") if taint.get(key)}


def _text(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
