"""Updates the DaemonSets of an add-on, waits for their pods on each node, and goes back if these do not run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import devices, kube_api
from ..kube_api import ApiError, Client
from ..problem import MachineProblem
from ..report import Difference
from . import objects
from .nodes import not_ready, pod_problem
from .settling import Settling

_KIND = "DaemonSet"
_POLL_S = 2.0
_SHOWN = 3


@dataclass
class _State:
    """How far the pods of a DaemonSet are."""

    images: dict[str, int] = field(default_factory=dict)
    """The number of nodes by image."""
    behind: dict[str, str] = field(default_factory=dict)
    """Nodes whose pod is of an earlier version or does not run, with the reason."""
    missing: int = 0
    """How many nodes have no pod at all, or are not known yet."""
    pods: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """What is still missing, "" if nothing is."""
        if not self.behind:
            return f"{self.missing} nodes have no pod of it" if self.missing else ""
        shown = [f"{node}: {why}" for node, why in list(self.behind.items())[:_SHOWN]]
        more = len(self.behind) - len(shown)
        return "; ".join([*shown, *([f"and {more} other nodes"] if more else [])])


def pending(wanted: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each DaemonSet of an add-on that is installed: its images by node, what would change, and who is behind.

    ``wanted`` are the objects of the add-on. Changes nothing.
    """
    client = kube_api.admin()
    found: list[dict[str, Any]] = []
    installed = _installed(client, wanted)
    changes = objects.apply(wanted, check=True)[0] if installed else []
    for each, path in installed:
        state = _state(client, path, ())
        found.append(
            {
                "name": str(each["metadata"]["name"]),
                "wanted": _images(each["spec"]["template"]["spec"]),
                "running": state.images,
                "changes": changes,
                "behind": sorted(state.behind),
            }
        )
    return found


def upgrade(wanted: Sequence[Mapping[str, Any]], limit_s: float, check: bool) -> tuple[list[str], list[Difference]]:
    """Apply the objects of an add-on that is installed, and wait until its pods run on all nodes.

    ``limit_s`` is how long no further node may follow. Nodes must then offer as many GPUs as before. Otherwise the
    earlier objects are applied again. Returns the changed objects, and the differences. Raises MachineProblem with the
    nodes on which it does not run.
    """
    client = kube_api.admin()
    installed = _installed(client, wanted)
    if not installed:
        return [], []
    changed, differences = objects.apply(wanted, check=True)
    if check or (not changed and not any(_state(client, path, ()).reason for _, path in installed)):
        return changed, differences
    down = _not_ready(client)
    _check_unblocked(client, installed, down)
    before = _present(client, wanted)
    offered = _gpus(client)
    if changed:
        objects.apply(wanted, check=False)
    why = _wait(client, [path for _, path in installed], down, offered, limit_s, settle=bool(changed))
    if not why:
        return changed, differences
    if not changed:
        raise MachineProblem(why, "pods that run on all nodes", "correct that, then run the same command again")
    objects.apply(before, check=False)
    after = _wait(client, [path for _, path in installed], down, offered, limit_s, settle=True)
    undone = f"they do not run either: {after}" if after else "they run again"
    raise MachineProblem(
        f"{why}; the earlier objects were applied again, and {undone}",
        "pods of the new version that run on all nodes",
        "correct that, then run the same command again",
    )


def unfinished(client: Client, path: str) -> str:
    """Why the pods of the DaemonSet at ``path`` do not run on all nodes that are ready, "" if they do."""
    return _state(client, path, _not_ready(client)).reason


def _installed(client: Client, wanted: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], str]]:
    """The DaemonSets that exist, with their paths: what was never installed, is not installed by an upgrade."""
    paths = objects.Paths(client)
    found = [(each, paths.find(each)) for each in wanted if each["kind"] == _KIND]
    return [(each, path) for each, path in found if client.find(path) is not None]


def _present(client: Client, wanted: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The objects as they are now, in a form that can be applied again."""
    paths = objects.Paths(client)
    found = [objects.comparable(client.find(paths.find(each))) for each in wanted]
    return [each for each in found if each is not None]


def _not_ready(client: Client) -> set[str]:
    return {str(node["metadata"]["name"]) for node in client.get("/api/v1/nodes")["items"] if not_ready(node)}


def _gpus(client: Client) -> dict[str, dict[str, int]]:
    """The GPUs that each node offers."""
    nodes = client.get("/api/v1/nodes")["items"]
    return {str(node["metadata"]["name"]): devices.counts(node["status"].get("allocatable") or {}) for node in nodes}


def _check_unblocked(client: Client, installed: Sequence[tuple[Mapping[str, Any], str]], down: set[str]) -> None:
    """Raise MachineProblem if a node that is not ready would hold up the pods of the others."""
    for each, path in installed:
        strategy = (each["spec"].get("updateStrategy") or {}).get("rollingUpdate") or {}
        if str(strategy.get("maxUnavailable", 1)) == "100%":
            continue
        here = {str(pod["spec"].get("nodeName")) for pod in _pods(client, client.get(path))}
        if blocking := sorted(here & down):
            raise MachineProblem(
                f"{', '.join(blocking[:_SHOWN])} {'is' if len(blocking) == 1 else 'are'} not ready, and "
                f"{each['metadata']['name']} is replaced on one node after the other",
                "ready nodes: the others would wait for these",
                "repair them, or remove them with `gpunodes remove`; then run the same command again",
            )


def _wait(
    client: Client,
    paths: Sequence[str],
    down: set[str],
    offered: Mapping[str, Mapping[str, int]],
    limit_s: float,
    *,
    settle: bool,
) -> str:
    """Wait until the pods run on all nodes but those that were ``down``; why they do not, or ""."""
    deadline, least, settling = time.monotonic() + limit_s, 1 << 30, Settling()
    while True:
        try:
            states = [_state(client, path, down) for path in paths]
            why = next((state.reason for state in states if state.reason), "") or _lost(client, offered, down)
            why = settling.problem(why, [pod for state in states for pod in state.pods])
            left = sum(len(state.behind) + state.missing for state in states)
        except ApiError as error:
            why, left = str(error), least
        now = time.monotonic()
        if left < least:
            least, deadline = left, now + limit_s
        if settling.is_over(why, now) or not (why or settle):
            return ""
        if why and now >= deadline:
            return why
        time.sleep(_POLL_S)


def _lost(client: Client, offered: Mapping[str, Mapping[str, int]], down: set[str]) -> str:
    """The first node that offers fewer GPUs than before, "" for none."""
    now = _gpus(client)
    for node, before in offered.items():
        for name, count in before.items():
            if node in now and node not in down and now[node].get(name, 0) < count:
                return f"{node} offers {now[node].get(name, 0)} {name}, and offered {count} before"
    return ""


def _state(client: Client, path: str, down: set[str] | tuple[()]) -> _State:
    """How far the pods of a DaemonSet are; nodes that are ``down`` do not count."""
    owner = client.get(path)
    status, newest, state = owner.get("status") or {}, _newest(client, owner), _State()
    nodes = set()
    state.pods = _pods(client, owner)
    for pod in state.pods:
        node = str(pod["spec"].get("nodeName") or "?")
        nodes.add(node)
        for image in _images(pod["spec"]):
            state.images[image] = state.images.get(image, 0) + 1
        labels = pod["metadata"].get("labels") or {}
        if pod["metadata"].get("deletionTimestamp") or labels.get("controller-revision-hash") != newest:
            why = "its pod is of an earlier version"
        else:
            why = pod_problem(pod)
        if why and node not in down:
            state.behind.setdefault(node, why)
    seen = int(status.get("observedGeneration") or 0) >= int(owner["metadata"].get("generation") or 0)
    desired = int(status.get("desiredNumberScheduled") or 0)
    # Until the controller has seen the object, its status and its newest revision are those of the one before.
    state.missing = max(0, desired - len(nodes)) if seen else max(1, desired)
    return state


def _newest(client: Client, owner: Mapping[str, Any]) -> str:
    """The hash of the newest revision of a DaemonSet, which is a label of its pods."""
    namespace = owner["metadata"]["namespace"]
    listed = client.get(f"/apis/apps/v1/namespaces/{namespace}/controllerrevisions")["items"]
    own = [each for each in listed if _is_owned(each, owner)]
    newest = max(own, key=lambda each: int(each.get("revision") or 0), default=None)
    labels = (newest["metadata"].get("labels") or {}) if newest else {}
    return str(labels.get("controller-revision-hash", ""))


def _pods(client: Client, owner: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    selector = ",".join(f"{name}={value}" for name, value in owner["spec"]["selector"]["matchLabels"].items())
    path = f"/api/v1/namespaces/{owner['metadata']['namespace']}/pods"
    return [pod for pod in client.get(path, labelSelector=selector)["items"] if _is_owned(pod, owner)]


def _is_owned(obj: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    uids = {each.get("uid") for each in obj["metadata"].get("ownerReferences") or ()}
    return owner["metadata"]["uid"] in uids


def _images(spec: Mapping[str, Any]) -> list[str]:
    """The images of a pod, each once."""
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    return list(dict.fromkeys(str(each["image"]) for each in containers))
