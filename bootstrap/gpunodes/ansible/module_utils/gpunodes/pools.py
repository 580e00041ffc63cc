"""The labels and taints of nodes that are ours; no other is ever touched."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import kube_api, kubeconfig
from .kube_api import ApiError
from .problem import MachineProblem

MANAGED = "gpunodes.dev/managed"
"""Node annotation: the names of the labels and taints that are ours."""
_MERGE = "application/merge-patch+json"
_LONGEST = 1 << 16
"""Longest annotation, in characters, that is read; a node may write much more."""
# Taints by which Kubernetes, and we, keep pods from a node that is not well. A node can write our annotation, and no
# taint (the admission plugin NodeRestriction): it must not get rid of these by us.
_OTHERS = re.compile(r"([^/]*\.)?(kubernetes\.io|k8s\.io|gpunodes\.dev)/")
_CONFLICT = 409
REGISTERS_S = 180.0
"""Seconds that a kubelet gets to register its node: `kubeadm join` ends when it may, which can be before it has."""
_PAUSE_S = 1.0


def managed(node: Mapping[str, Any]) -> dict[str, Any]:
    """What of a node's labels and taints is ours: {"labels": {...}, "taints": [...]}, as they are now."""
    metadata = node["metadata"]
    ours = _ours((metadata.get("annotations") or {}).get(MANAGED))
    labels = metadata.get("labels") or {}
    keys = set(ours["taints"])
    return {
        "labels": {name: labels[name] for name in ours["labels"] if name in labels},
        "taints": [_plain(taint) for taint in node.get("spec", {}).get("taints") or () if _key(taint) in keys],
    }


def settle(
    name: str, labels: Mapping[str, str], taints: Sequence[Mapping[str, str]], check: bool
) -> tuple[list[str], list[dict[str, str]]]:
    """Give a node these labels and taints in place of those that it had from us; what changed, and how.

    Raises MachineProblem when there is no such node, and none comes.
    """
    if check and kubeconfig.load(kubeconfig.ADMIN) is None:
        return [], []  # the cluster is yet to be made
    client = kube_api.admin()
    deadline = time.monotonic() + REGISTERS_S
    while True:
        node = client.find(f"/api/v1/nodes/{name}")
        if node is None:
            if check or not (labels or taints):
                return [], []
            if time.monotonic() > deadline:
                raise MachineProblem(
                    f"the cluster has no node {name}",
                    f"its kubelet to register it within {REGISTERS_S:.0f} s",
                    f"see `journalctl -u kubelet` on {name}",
                )
            time.sleep(_PAUSE_S)
            continue
        patch = patch_of(node, labels, taints)
        if patch is None:
            return [], []
        before = _text(managed(node))
        after = _text({"labels": dict(labels), "taints": [_plain(taint) for taint in taints]})
        diff = {"before": before, "after": after, "before_header": f"Node {name}", "after_header": f"Node {name}"}
        if not check:
            try:
                client.call("PATCH", f"/api/v1/nodes/{name}", patch, {"fieldManager": kube_api.MANAGER}, _MERGE)
            except ApiError as error:
                if error.status != _CONFLICT:
                    raise
                continue  # somebody else has changed the node meanwhile: look again
        return [name], [diff]


def patch_of(
    node: Mapping[str, Any], labels: Mapping[str, str], taints: Sequence[Mapping[str, str]]
) -> dict[str, Any] | None:
    """The merge patch that gives a node these labels and taints, None when it has them."""
    metadata, spec = node["metadata"], node.get("spec", {})
    now = metadata.get("labels") or {}
    annotation = (metadata.get("annotations") or {}).get(MANAGED)
    ours = _ours(annotation)
    wanted = json.dumps({"labels": sorted(labels), "taints": sorted(_key(taint) for taint in taints)})
    changed: dict[str, str | None] = {key: value for key, value in labels.items() if now.get(key) != value}
    changed |= {key: None for key in ours["labels"] if key not in labels and key in now}
    mine = {*ours["taints"], *(_key(taint) for taint in taints)}
    present = list(spec.get("taints") or ())
    kept = [taint for taint in present if _key(taint) not in mine]
    there = [taint for taint in present if _key(taint) in mine]
    same = sorted(map(_text, map(_plain, there))) == sorted(map(_text, map(_plain, taints)))
    if not changed and same and (annotation == wanted or (annotation is None and not labels and not taints)):
        return None
    empty = not labels and not taints
    patch: dict[str, Any] = {
        # Taints are one list for all who set them: nobody may have changed it meanwhile.
        "metadata": {
            "resourceVersion": metadata["resourceVersion"],
            "labels": changed,
            "annotations": {MANAGED: None if empty else wanted},
        }
    }
    if not same:
        patch["spec"] = {"taints": [*kept, *map(_plain, taints)] or None}
    return patch


def _ours(annotation: str | None) -> dict[str, list[str]]:
    """The names in our annotation; a node can write what it likes there, and what is no list of names is none."""
    try:
        found = json.loads(annotation or "{}") if len(annotation or "") <= _LONGEST else {}
    except (ValueError, RecursionError):
        found = {}
    listed = {part: found.get(part) if isinstance(found, dict) else None for part in ("labels", "taints")}
    named = {
        part: [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        for part, names in listed.items()
    }
    return {**named, "taints": [name for name in named["taints"] if not _OTHERS.match(name)]}


def _key(taint: Mapping[str, str]) -> str:
    return f"{taint['key']}:{taint['effect']}"


def _plain(taint: Mapping[str, str]) -> dict[str, str]:
    return {key: taint[key] for key in ("key", "value", "effect") if taint.get(key)}


def _text(thing: Any) -> str:
    return json.dumps(thing, indent=1, sort_keys=True) + "\n"
