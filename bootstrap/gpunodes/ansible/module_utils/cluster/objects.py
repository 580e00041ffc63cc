"""Objects that are applied to the cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import kube_api
from ..kube_api import ApiError, Client
from ..problem import MachineProblem
from ..report import Difference
from .nodes import not_ready

_FLANNEL = "flannel.alpha.coreos.com/"
"""How the annotations begin that flannel sets on its nodes. Source: flannel v0.26.7 pkg/subnet/kube/annotations.go."""


_POLL_S = 1.0


def apply(objects: Sequence[Mapping[str, Any]], check: bool) -> tuple[list[str], list[Difference]]:
    """Apply objects with server-side apply; returns the changed objects and the differences."""
    client = kube_api.admin()
    paths = Paths(client)
    changed, differences = [], []
    for wanted in objects:
        title = f"{wanted['kind']} {wanted['metadata']['name']}"
        path = paths.find(wanted)
        before = client.find(path)
        query = {"fieldManager": kube_api.MANAGER, "force": "true"}
        if check:
            query["dryRun"] = "All"
        try:
            after = client.call("PATCH", path, wanted, query, "application/apply-patch+yaml")
        except ApiError as error:
            # In check mode the objects' namespace may not exist yet.
            if not (check and error.status == kube_api.NOT_FOUND and before is None):
                raise
            after = wanted
        old, new = comparable(before), comparable(after)
        if old != new:
            changed.append(title)
            differences.append(Difference(title, old, new))
    return changed, differences


def check_network(objects: Sequence[Mapping[str, Any]]) -> None:
    """Check that no other network add-on connects the pods; raises MachineProblem.

    A node is ready only with a network: if one is, and the DaemonSet of ``objects`` does not exist, it has another one,
    and two would take each other's routes away. A node on which flannel once ran does not count: it was deleted.
    """
    client = kube_api.admin()
    own = next(each for each in objects if each["kind"] == "DaemonSet")
    if client.find(Paths(client).find(own)):
        return
    ready = [node["metadata"] for node in client.get("/api/v1/nodes")["items"] if not not_ready(node)]
    if ready and not any(key.startswith(_FLANNEL) for node in ready for key in node.get("annotations") or ()):
        raise MachineProblem(
            f"the node {ready[0]['name']} is ready without {own['metadata']['name']}: it has another network add-on",
            "the cluster's own network add-on",
            "set gpunodes_network to none",
        )


def delete(
    objects: Sequence[Mapping[str, Any]], label: str, check: bool, keep: bool, limit_s: float = 0
) -> tuple[list[str], list[Difference]]:
    """Delete ``objects``, the last one first, unless they are to ``keep``, and others of their kinds with ``label``.

    Returns the deleted objects and the differences. With ``limit_s`` the objects of a kind are gone before those of the
    next one are deleted. Raises MachineProblem for one that is still there then: what uses it may keep it, as a pod its
    claim, and what protects it stays.
    """
    client = kube_api.admin()
    paths = Paths(client)
    known = {paths.find(each): each["kind"] for each in objects}
    deleted, differences, last, deadline = [], [], "", time.monotonic() + limit_s
    leaving: dict[str, str] = {}
    for folder, kind in dict.fromkeys((path.rpartition("/")[0], kind) for path, kind in reversed(known.items())):
        if limit_s and kind != last:
            _wait_gone(client, leaving, deadline, limit_s)
        last = kind
        listed = client.get(folder, labelSelector=label)["items"] if label else []
        others = {f"{folder}/{each['metadata']['name']}": each for each in listed}
        own = {} if keep else {path: client.find(path) for path in known if path.rpartition("/")[0] == folder}
        for path, found in {**others, **own}.items():
            if found is None or (keep and path in known):
                continue
            title = f"{kind} {found['metadata']['name']}"
            deleted.append(title)
            differences.append(Difference(title, comparable({"kind": kind, **found}), None))
            if not check:
                leaving[path] = f"{kind} {'/'.join(_names(found))}"
                client.delete(path)
    if limit_s:
        _wait_gone(client, leaving, deadline, limit_s)
    return deleted, differences


def _names(found: Mapping[str, Any]) -> list[str]:
    metadata = found["metadata"]
    return [str(metadata[key]) for key in ("namespace", "name") if key in metadata]


def _wait_gone(client: Client, leaving: Mapping[str, str], deadline: float, limit_s: float) -> None:
    """Wait until these objects, titles by path, are gone."""
    while left := [title for path, title in leaving.items() if client.find(path) is not None]:
        if time.monotonic() >= deadline:
            kind, _, name = left[0].partition(" ")
            where, _, own = name.rpartition("/")
            raise MachineProblem(
                f"the {left[0]} is being deleted, and is still there after {limit_s:.0f} s",
                "an object that nothing uses",
                f"see `kubectl describe {kind.lower()} {own}{f' -n {where}' if where else ''}`, and end what uses it; "
                "then run the command again",
            )
        time.sleep(_POLL_S)


def comparable(obj: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An object without the fields that the cluster writes."""
    if obj is None:
        return None
    generated = {"managedFields", "resourceVersion", "generation", "creationTimestamp", "uid"}
    metadata = {key: value for key, value in obj["metadata"].items() if key not in generated}
    annotations = dict(metadata.get("annotations") or {})
    annotations.pop("deprecated.daemonset.template.generation", None)
    return {
        **{key: value for key, value in obj.items() if key != "status"},
        "metadata": {**metadata, "annotations": annotations},
    }


@dataclass
class Paths:
    """Finds the API path of an object by its kind."""

    client: Client
    known: dict[str, dict[str, tuple[str, bool]]] = field(default_factory=dict)

    def find(self, obj: Mapping[str, Any]) -> str:
        version = str(obj["apiVersion"])
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if version not in self.known:
            listed = self.client.get(base)["resources"]
            self.known[version] = {r["kind"]: (r["name"], r["namespaced"]) for r in listed if "/" not in r["name"]}
        if obj["kind"] not in self.known[version]:
            raise MachineProblem(f"the cluster has no kind {obj['kind']} in {version}", "a kind of its API", "")
        name, namespaced = self.known[version][obj["kind"]]
        folder = f"namespaces/{obj['metadata'].get('namespace', 'default')}/" if namespaced else ""
        return f"{base}/{folder}{name}/{obj['metadata']['name']}"
