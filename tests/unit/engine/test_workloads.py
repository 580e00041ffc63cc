"""Which pod something secret may be sent to, in a cluster with hostile nodes; tests/repair has a real API server."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.engine.cluster.errors import Refused
from gpunodes.engine.cluster.workloads import Workloads
from gpunodes.engine.jupyter.objects import Notebooks
from gpunodes.engine.registry.objects import RegistryServer
from gpunodes.errors import GpunodesError
from gpunodes.planner import notebooks, registry
from gpunodes.planner.notebooks import Place

DEPLOYMENT = {"metadata": {"name": "web", "uid": "deployment-1", "generation": 1}}
MIRROR = {"kubernetes.io/config.mirror": "abc"}


def owned(kind: str, name: str, uid: str, *, controller: bool = True) -> dict[str, Any]:
    return {"ownerReferences": [{"kind": kind, "name": name, "uid": uid, "controller": controller}]}


def pod(name: str, *, ready: str = "True", **metadata: Any) -> dict[str, Any]:
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": {"name": name, **metadata}, "spec": {"nodeName": "w1"}, "status": status}


OURS = owned("ReplicaSet", "web-1", "set-1")
SETS = {
    "web-1": {"name": "web-1", "uid": "set-1", **owned("Deployment", "web", "deployment-1")},
    # Of an earlier Deployment of this name, of another one, and of none.
    "web-0": {"name": "web-0", "uid": "set-0", **owned("Deployment", "web", "deployment-0")},
    "api-1": {"name": "api-1", "uid": "set-2", **owned("Deployment", "api", "deployment-1")},
    "lone": {"name": "lone", "uid": "set-3"},
    "loose": {"name": "loose", "uid": "set-4", **owned("Deployment", "web", "deployment-1", controller=False)},
}


class _Answers:
    """What the cluster has: pods, ReplicaSets, and one Deployment, of whatever name."""

    pods: tuple[dict[str, Any], ...] = ()
    has: dict[str, Any] = DEPLOYMENT

    def __init__(self) -> None:
        pass

    def _call(self, method: str, path: str, *_: Any, **__: Any) -> Any:
        class Answer:
            body: Any = None
            time = 0.0

        assert method == "GET"
        place, name = path.partition("?")[0].split("/")[-2:]
        if name == "pods":
            Answer.body = {"items": list(self.pods)}
        elif place == "replicasets":
            if name not in SETS:
                raise Refused(404, "not found")
            Answer.body = {"metadata": SETS[name]}
        else:
            Answer.body = self.has
        return Answer


class Cluster(_Answers, Workloads):
    """Its Deployments."""


class Registry(_Answers, RegistryServer):
    """Its registry."""


class Jupyter(_Answers, Notebooks):
    """Its notebooks."""


def serving(*pods: dict[str, Any]) -> str:
    cluster = Cluster()
    cluster.pods = pods
    found = cluster.serving_pod("team", "app=web", DEPLOYMENT)
    return str(found["metadata"]["name"]) if found else ""


HOSTILE = [
    {},
    {"ownerReferences": None},
    owned("Node", "w1", "node-1"),
    {**OURS, "annotations": MIRROR},
    owned("ReplicaSet", "web-1", "set-9"),
    owned("ReplicaSet", "web-1", ""),
    owned("ReplicaSet", "web-1", "set-1", controller=False),
    owned("ReplicaSet", "gone", "set-1"),
    owned("ReplicaSet", "../deployments/web", "deployment-1"),
    owned("ReplicaSet", "web-0", "set-0"),
    owned("ReplicaSet", "api-1", "set-2"),
    owned("ReplicaSet", "lone", "set-3"),
    owned("ReplicaSet", "loose", "set-4"),
    owned("Deployment", "web", "deployment-1"),
    owned("DaemonSet", "web-1", "set-1"),
]


@pytest.mark.parametrize("metadata", HOSTILE, ids=str)
def test_only_a_pod_of_the_deployment_serves(metadata: dict[str, Any]) -> None:
    """The labels of all are right, all say that they are ready, and theirs is the first name."""
    assert serving(pod("a", **metadata)) == ""
    assert serving(pod("a", **metadata), pod("web-1-x", **OURS)) == "web-1-x"


def test_one_that_is_not_ready_does_not() -> None:
    assert serving(pod("web-1-x", ready="False", **OURS)) == ""
    assert serving(pod("web-1-x", deletionTimestamp="2026-01-01T00:00:00Z", **OURS)) == ""


@pytest.mark.parametrize("metadata", [{"ownerReferences": [{"kind": 1}]}, {"ownerReferences": "x"}], ids=str)
def test_one_with_owners_of_another_shape_does_not(metadata: dict[str, Any]) -> None:
    assert serving(pod("a", **metadata), pod("web-1-x", **OURS)) == "web-1-x"


@pytest.mark.parametrize("hidden", [{"annotations": MIRROR}, owned("Node", "w1", "node-1")], ids=str)
def test_pods_that_a_kubelet_made_are_not_listed(hidden: dict[str, Any]) -> None:
    """They would keep `down` waiting, or be shown as the reason why something is not ready."""
    cluster = Cluster()
    cluster.pods = (pod("a", **hidden), pod("verify-1"))
    assert [each["metadata"]["name"] for each in cluster.labelled_pods("team", "app=web")] == ["verify-1"]


def test_the_registry_s_password_goes_to_its_own_pod() -> None:
    cluster = Registry()
    cluster.has = {"metadata": {**DEPLOYMENT["metadata"], "labels": dict(registry.LABELS)}}
    cluster.pods = (pod("a", **owned("Node", "w1", "node-1")), pod("web-1-x", **OURS))
    assert cluster.pod() == "web-1-x"
    cluster.pods = cluster.pods[:1]
    with pytest.raises(GpunodesError, match="the registry has no pod that is ready"):
        cluster.pod()


def test_the_token_of_a_notebook_goes_to_its_own_pod() -> None:
    place, cluster = Place("alice", "team"), Jupyter()
    cluster.has = {"metadata": {**DEPLOYMENT["metadata"], "labels": dict(notebooks.labels(place))}}
    cluster.pods = (pod("a", **owned("Node", "w1", "node-1")), pod("web-1-x", **OURS))
    assert cluster.pod(place) == "web-1-x"
    cluster.pods = cluster.pods[:1]
    assert cluster.pod(place) == ""
