"""Optional add-ons: their objects carry a label, by which they are found, verified and deleted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from .. import kube_api
from ..kube_api import ApiError, Client
from ..problem import MachineProblem
from ..report import Difference
from . import addons, objects
from .nodes import pod_problem
from .settling import Settling

LABEL = "gpunodes.dev/addon"
"""Label of every object of an optional add-on: the name of the add-on."""
VERSION = "gpunodes.dev/addon-version"
"""Annotation of the same objects."""
_POLL_S = 2.0
_LEAVE_S = 120.0
"""How long the objects of an earlier installation may take until they are deleted: a namespace ends after all in it."""
_SHOWN = 4
_FIRST = ("Namespace", "CustomResourceDefinition")
"""Kinds that others need: applied first, deleted last."""
# A client that calls these waits for a server that is gone.
_LAST = ("APIService", "ValidatingWebhookConfiguration", "MutatingWebhookConfiguration")
"""Kinds that call the others: applied last, deleted first."""
_WORKLOADS = ("daemonsets", "deployments", "statefulsets")
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
# The cluster's controllers make these, with the labels of a Service or beside an object.
_MADE = ("Endpoints", "EndpointSlice", "Event", "ReplicaSet", "ControllerRevision", "Pod", "Lease")
# A kubelet may give these of its own any label.
_NODES = ("Node", "CSINode", "CertificateSigningRequest", "ResourceSlice")
_CONTAINED = (
    "apps/v1/deployments", "apps/v1/daemonsets", "apps/v1/statefulsets", "batch/v1/jobs", "batch/v1/cronjobs",
    "v1/persistentvolumeclaims", "v1/pods", "v1/services",
)  # fmt: skip
"""What of others in a namespace forbids to delete it."""


def up(given: Sequence[Mapping[str, Any]], name: str, version: str, check: bool) -> tuple[list[str], list[Difference]]:
    """Apply the objects of an add-on, and delete those that an earlier version had; the changed ones, and differences.

    Raises MachineProblem for objects that exist and are not of this add-on: then nothing was changed.
    """
    client = kube_api.admin()
    wanted = sorted((_marked(each, name, version) for each in given), key=_order)
    known = _Kinds(client)
    _check_spaces(known, wanted, name)
    _wait_for_deleted(client, known, wanted)
    known = _Kinds(client)
    _check_ours(client, known, wanted, name)
    first = [each for each in wanted if each["kind"] in _FIRST]
    changed, differences = objects.apply(first, check)
    if not check:
        _wait_for_kinds(client, [each for each in first if each["kind"] == _FIRST[1]])
        known = _Kinds(client)
    rest = [each for each in wanted if each["kind"] not in _FIRST]
    more, shown = objects.apply([each for each in rest if known.has(each)], check)
    # In check mode the add-on's own kinds may not exist yet.
    new = [each for each in rest if not known.has(each)]
    if new and not check:
        raise MachineProblem(f"the cluster has no kind {new[0]['kind']}", "a kind of its API", "")
    kept = {known.path(each) for each in wanted if known.has(each)}
    old = [(path, each) for path, each in _labelled(client, name) if path not in kept]
    gone, removed = _delete(client, old, check)
    added = [Difference(_title(each), None, each) for each in new]
    return [*changed, *more, *map(_title, new), *gone], [*differences, *shown, *added, *removed]


def down(name: str, uses: Sequence[Mapping[str, Any]], check: bool) -> tuple[list[str], list[Difference]]:
    """Delete an add-on's objects; the deleted ones, and the differences. Raises MachineProblem while it is in use."""
    client = kube_api.admin()
    found = _labelled(client, name)
    if not found:
        return [], []
    problems = [*_used(client, uses), *_custom(client, found, name), *_contained(client, found, name)]
    if problems:
        raise MachineProblem(
            f"{name} is in use: {'; '.join(problems[:_SHOWN])}", "nothing that needs it", "delete or move that first"
        )
    return _delete(client, found, check)


def wait(name: str, proof: Mapping[str, Any], limit_s: float) -> list[str]:
    """Wait until the workloads of an add-on run and it answers; its DaemonSets that no node of the cluster is to run.

    Raises MachineProblem with the reason if they do not.
    """
    client, settling, look = kube_api.admin(), Settling(), _Look()
    deadline = time.monotonic() + limit_s
    while True:
        try:
            look = _look(client, name)
            why = settling.problem(look.why or _unanswered(client, proof), look.pods)
        except ApiError as error:
            why = str(error)
        now = time.monotonic()
        if settling.is_over(why, now):
            return look.idle
        if why and now >= deadline:
            raise MachineProblem(
                f"{name}: {why}", "an add-on that runs", "correct that, then run the same command again"
            )
        time.sleep(_POLL_S)


def installed() -> dict[str, str]:
    """The versions of the add-ons that are installed, by name."""
    client = kube_api.admin()
    found: dict[str, str] = {}
    for folder in (*(f"/apis/apps/v1/{kind}" for kind in _WORKLOADS), _CRDS):
        for each in _own(client, client.get(folder, labelSelector=LABEL)["items"]):
            about = each["metadata"]
            # The API server deletes a kind a moment after the command.
            if about.get("deletionTimestamp"):
                continue
            found[about["labels"][LABEL]] = str((about.get("annotations") or {}).get(VERSION, ""))
    return found


def _marked(given: Mapping[str, Any], name: str, version: str) -> dict[str, Any]:
    metadata = given["metadata"]
    return {
        **given,
        "metadata": {
            **metadata,
            "labels": {**(metadata.get("labels") or {}), LABEL: name, "app.kubernetes.io/managed-by": "gpunodes"},
            "annotations": {**(metadata.get("annotations") or {}), VERSION: version},
        },
    }


def _order(each: Mapping[str, Any]) -> int:
    if each["kind"] in _FIRST:
        return _FIRST.index(each["kind"])
    return len(_FIRST) + (each["kind"] in _LAST)


def _title(each: Mapping[str, Any]) -> str:
    return f"{each['kind']} {each['metadata']['name']}"


class _Kinds:
    """The kinds of the cluster, those of missing groups included."""

    def __init__(self, client: Client) -> None:
        self._paths = objects.Paths(client)

    def path(self, each: Mapping[str, Any]) -> str:
        return self._paths.find(each)

    def has(self, each: Mapping[str, Any]) -> bool:
        try:
            self._paths.find(each)
        except ApiError as error:
            if error.status != kube_api.NOT_FOUND:
                raise
            return False
        except MachineProblem:
            return False
        return True


def _check_spaces(known: _Kinds, wanted: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raise MachineProblem for objects that would not count as the add-on's (``_own``)."""
    own = {"kube-system", *(str(each["metadata"]["name"]) for each in wanted if each["kind"] == "Namespace")}
    paths = [known.path(each) if known.has(each) else _space_path(each) for each in wanted]
    others = {path.split("/namespaces/")[1].split("/")[0] for path in paths if path.count("/namespaces/")} - own
    if others:
        raise MachineProblem(
            f"{name} has objects in the namespace {min(others)}, which its objects do not contain",
            "objects in kube-system, or in namespaces that are among them",
            "add that Namespace to the file",
        )


def _space_path(each: Mapping[str, Any]) -> str:
    space = each["metadata"].get("namespace")
    return f"/namespaces/{space}/" if space else ""


def _wait_for_deleted(client: Client, known: _Kinds, wanted: Sequence[Mapping[str, Any]]) -> None:
    """Wait until those that are being deleted are gone: the API server makes nothing in a namespace that ends."""
    deadline = time.monotonic() + _LEAVE_S
    left = [each for each in wanted if known.has(each)]
    while left := [each for each in left if _is_being_deleted(client.find(known.path(each)))]:
        if time.monotonic() >= deadline:
            raise MachineProblem(
                f"{_title(left[0])} is being deleted, and still exists after {_LEAVE_S:.0f} s",
                "none, or one that stays",
                f"`kubectl get {left[0]['kind']} {left[0]['metadata']['name']} -o yaml` shows what it waits for; "
                "run the same command again when it is gone",
            )
        time.sleep(_POLL_S)


def _is_being_deleted(found: Mapping[str, Any] | None) -> bool:
    return found is not None and "deletionTimestamp" in found["metadata"]


def _check_ours(client: Client, known: _Kinds, wanted: Sequence[Mapping[str, Any]], name: str) -> None:
    foreign = []
    for each in wanted:
        found = client.find(known.path(each)) if known.has(each) else None
        if found is not None and (found["metadata"].get("labels") or {}).get(LABEL) != name:
            foreign.append(_title(each))
    if foreign:
        more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        raise MachineProblem(
            f"{', '.join(foreign[:_SHOWN])}{more} exist, without the label {LABEL}={name}",
            "objects of this add-on, or none",
            "keep what is installed, or delete it first",
        )


def _wait_for_kinds(client: Client, wanted: Sequence[Mapping[str, Any]], limit_s: float = 60.0) -> None:
    """Wait until the API serves new kinds."""
    deadline = time.monotonic() + limit_s
    for each in wanted:
        path = f"{_CRDS}/{each['metadata']['name']}"
        while "Established" not in _true_conditions(client.get(path)):
            if time.monotonic() > deadline:
                raise MachineProblem(f"the API does not serve {each['metadata']['name']}", "a kind that is served", "")
            time.sleep(_POLL_S)


def _true_conditions(found: Mapping[str, Any]) -> set[str]:
    conditions = (found.get("status") or {}).get("conditions") or ()
    return {str(each["type"]) for each in conditions if each["status"] == "True"}


def _own(client: Client, labelled: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those of these objects that are of the add-on of their label: of no namespace, of kube-system, or of its own.

    Who may make objects in another namespace may give them the label, too.
    """
    spaces: dict[str, str] | None = None
    for each in labelled:
        space, name = each["metadata"].get("namespace", ""), each["metadata"]["labels"][LABEL]
        if space and spaces is None:
            listed = client.get("/api/v1/namespaces", labelSelector=LABEL)["items"]
            spaces = {one["metadata"]["name"]: one["metadata"]["labels"][LABEL] for one in listed}
        if space in {"", "kube-system"} or (spaces or {}).get(space) == name:
            yield each


def _labelled(client: Client, name: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of an add-on with their paths, of all kinds, in the order in which they were applied."""
    found = []
    for base, resource in _resources(client):
        listed = client.find(f"{base}/{resource['name']}?labelSelector={LABEL}%3D{name}")
        for each in _own(client, (listed or {}).get("items", ())):
            if each["metadata"].get("ownerReferences") or each["metadata"].get("deletionTimestamp"):
                continue
            space = f"namespaces/{each['metadata']['namespace']}/" if resource["namespaced"] else ""
            # A role or a binding may have a name with "?", which would begin a query: the client refuses it quoted.
            path = f"{base}/{space}{resource['name']}/{quote(each['metadata']['name'], safe=':')}"
            found.append((path, {**each, "kind": resource["kind"]}))
    return sorted(found, key=lambda each: _order(each[1]))


def _resources(client: Client) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The kinds that can be listed and deleted, in the preferred version of their group, with its path."""
    groups = [group["preferredVersion"]["groupVersion"] for group in client.get("/apis")["groups"]]
    # Those of other servers: an add-on has no objects there, and such a server may not respond.
    services = client.get("/apis/apiregistration.k8s.io/v1/apiservices")["items"]
    remote = {f"{each['spec']['group']}/{each['spec']['version']}" for each in services if each["spec"].get("service")}
    for base in ("/api/v1", *(f"/apis/{group}" for group in groups if group not in remote)):
        listed = client.find(base)
        for resource in (listed or {}).get("resources", ()):
            if {"list", "delete"} <= set(resource["verbs"]) and resource["kind"] not in (*_MADE, *_NODES):
                yield base, resource


def _delete(
    client: Client, found: Sequence[tuple[str, Mapping[str, Any]]], check: bool
) -> tuple[list[str], list[Difference]]:
    """Delete in the reverse order of their application."""
    deleted, differences = [], []
    for path, each in sorted(found, key=lambda one: -_order(one[1])):
        deleted.append(_title(each))
        differences.append(Difference(_title(each), objects.comparable(each), None))
        if not check:
            client.delete(path)
    return deleted, differences


def _used(client: Client, uses: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The objects of users that need the add-on."""
    for use in uses:
        names = [
            str(each["metadata"]["name"])
            for each in (client.find(use["list"]) or {}).get("items", ())
            if "field" not in use or _field(each, use["field"]) == use["equals"]
        ]
        if names:
            yield f"there are {use['what']} ({_few(names)})"


def _field(each: Any, path: str) -> Any:
    for key in path.split("."):
        each = each.get(key) if isinstance(each, dict) else None
    return each


def _custom(client: Client, found: Sequence[tuple[str, Mapping[str, Any]]], name: str) -> Iterator[str]:
    """Objects of the add-on's own kinds that others made: they would be deleted with the kind."""
    for _, each in found:
        if each["kind"] != "CustomResourceDefinition":
            continue
        spec = each["spec"]
        version = next(one["name"] for one in spec["versions"] if one["served"])
        listed = client.find(f"/apis/{spec['group']}/{version}/{spec['names']['plural']}") or {}
        if names := _of_others(listed, name):
            yield f"there are objects of the kind {spec['names']['kind']} ({_few(names)})"


def _contained(client: Client, found: Sequence[tuple[str, Mapping[str, Any]]], name: str) -> Iterator[str]:
    """What others have in the add-on's namespaces: it would be deleted with them."""
    for _, each in found:
        if each["kind"] != "Namespace":
            continue
        space = each["metadata"]["name"]
        for kind in _CONTAINED:
            group, _, plural = kind.rpartition("/")
            base = f"/apis/{group}" if "/" in group else f"/api/{group}"
            if names := _of_others(client.get(f"{base}/namespaces/{space}/{plural}"), name):
                yield f"the namespace {space} has {plural} of others ({_few(names)})"


def _of_others(listed: Mapping[str, Any], name: str) -> list[str]:
    return [
        str(each["metadata"]["name"])
        for each in listed.get("items", ())
        if (each["metadata"].get("labels") or {}).get(LABEL) != name and not each["metadata"].get("ownerReferences")
    ]


def _few(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


@dataclass
class _Look:
    """How the workloads of an add-on are."""

    why: str = ""
    """Why one of them does not run."""
    pods: list[Mapping[str, Any]] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    """DaemonSets for which there is no node."""


def _look(client: Client, name: str) -> _Look:
    look, count = _Look(), 0
    for kind in _WORKLOADS:
        for each in _own(client, client.get(f"/apis/apps/v1/{kind}", labelSelector=f"{LABEL}={name}")["items"]):
            count += 1
            title = each["metadata"]["name"]
            space = f"namespaces/{each['metadata']['namespace']}"
            path = f"/apis/apps/v1/{space}/{kind}/{title}"
            why = addons.unfinished(client, path) if kind == "daemonsets" else _unfinished(each)
            pods = _pods(client, each, space)
            look.pods += pods
            if why:
                look.why = look.why or next(filter(None, map(pod_problem, pods)), "") or f"{title}: {why}"
            elif kind == "daemonsets" and not (each.get("status") or {}).get("desiredNumberScheduled"):
                look.idle.append(title)
    if not count and not client.get(_CRDS, labelSelector=f"{LABEL}={name}")["items"]:
        look.why = "it is not installed"
    return look


def _unfinished(each: Mapping[str, Any]) -> str:
    """Why the roll-out of a Deployment or StatefulSet has not ended, "" if it has."""
    status, wanted = each.get("status") or {}, int(each["spec"].get("replicas", 1))
    if int(status.get("observedGeneration") or 0) < int(each["metadata"].get("generation") or 0):
        return "its controller has not seen it yet"
    counts = [int(status.get(key) or 0) for key in ("updatedReplicas", "readyReplicas", "replicas")]
    return "" if counts == [wanted] * 3 else f"{counts[1]} of {wanted} pods are ready"


def _pods(client: Client, owner: Mapping[str, Any], space: str) -> list[Mapping[str, Any]]:
    selector = ",".join(f"{key}={value}" for key, value in owner["spec"]["selector"]["matchLabels"].items())
    return list(client.get(f"/api/v1/{space}/pods", labelSelector=selector)["items"])


def _unanswered(client: Client, proof: Mapping[str, Any]) -> str:
    """Why the add-on does not answer, "" if it does, or there is nothing to query."""
    if not proof:
        return ""
    answer = client.get(proof["path"])
    return f"{proof['path']} has no item yet" if proof.get("items") and not answer.get("items") else ""
