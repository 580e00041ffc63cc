"""An add-on updated, waited for and put back, on a stand-in of the API with a controller of DaemonSets."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api
from gpunodes.ansible.module_utils.cluster import addons
from gpunodes.ansible.module_utils.kube_api import ApiError
from gpunodes.ansible.module_utils.problem import MachineProblem

PATH = "/apis/apps/v1/namespaces/kube-system/daemonsets/plugin"


def daemon_set(image: str, most: object = 1) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "plugin", "namespace": "kube-system"},
        "spec": {
            "selector": {"matchLabels": {"name": "plugin"}},
            "updateStrategy": {"rollingUpdate": {"maxUnavailable": most}},
            "template": {"spec": {"containers": [{"name": "c", "image": image}]}},
        },
    }


class Cluster:
    """Three nodes with GPUs; the controller replaces one pod at each look, and ``broken`` images do not run."""

    def __init__(self, image: str = "p:1") -> None:
        self.nodes = dict.fromkeys(("n1", "n2", "n3"), True)
        self.gpus = dict.fromkeys(self.nodes, "8")
        self.broken: set[str] = set()
        self.without_gpus: set[str] = set()
        self.applied: list[str] = []
        self.stuck = False
        self.crashing: set[str] = set()
        self.restarts = 0
        self.object: dict[str, Any] | None = None
        self.revisions: dict[str, int] = {}
        self.pods: dict[str, str] = {}
        if image:
            self._store(daemon_set(image))
            self.pods = dict.fromkeys(self.nodes, image)

    def _store(self, obj: Mapping[str, Any]) -> None:
        before = self.object["metadata"]["generation"] if self.object else 0
        meta = {**obj["metadata"], "uid": "u", "generation": before + 1, "managedFields": [], "resourceVersion": "7"}
        self.object = {**copy.deepcopy(dict(obj)), "metadata": meta, "status": {}}
        self.revisions[self._image()] = max(self.revisions.values(), default=0) + 1

    def _image(self) -> str:
        assert self.object is not None
        return str(self.object["spec"]["template"]["spec"]["containers"][0]["image"])

    def _work(self) -> None:
        assert self.object is not None
        behind = [node for node, image in self.pods.items() if image != self._image() and self.nodes[node]]
        if behind and not self.stuck:
            self.pods[behind[0]] = self._image()
        generation = self.object["metadata"]["generation"]
        self.object["status"] = {"observedGeneration": generation, "desiredNumberScheduled": len(self.nodes)}

    def find(self, path: str) -> Any:
        return copy.deepcopy(self.object) if path == PATH else None

    def call(self, method: str, path: str, body: Any, query: Mapping[str, str], _: str) -> Any:
        assert (method, path) == ("PATCH", PATH)
        assert not {"managedFields", "resourceVersion", "uid", "generation"} & {*body["metadata"]}
        assert "status" not in body
        if "dryRun" in query:
            return {
                **(self.object or {}),
                **body,
                "metadata": {**(self.object or {}).get("metadata", {}), **body["metadata"]},
            }
        self.applied.append(body["spec"]["template"]["spec"]["containers"][0]["image"])
        if self.object is None or self.applied[-1] != self._image():
            self._store(body)
        return copy.deepcopy(self.object)

    def get(self, path: str, **_: str) -> Any:
        if path == "/apis/apps/v1":
            return {"resources": [{"kind": "DaemonSet", "name": "daemonsets", "namespaced": True}]}
        if path == PATH:
            self._work()
            return copy.deepcopy(self.object)
        if path.endswith("/controllerrevisions"):
            own = {"ownerReferences": [{"uid": "u"}]}
            rows = [
                {"metadata": {**own, "labels": {"controller-revision-hash": image}}, "revision": number}
                for image, number in self.revisions.items()
            ]
            other = {"metadata": {"labels": {"controller-revision-hash": "other"}}, "revision": 99}
            return {"items": [*rows, other]}
        if path.endswith("/pods"):
            return {"items": [self._pod(node, image) for node, image in self.pods.items()]}
        if path == "/api/v1/nodes":
            return {"items": [self._node(name, ready) for name, ready in self.nodes.items()]}
        raise ApiError(404, path)

    def _pod(self, node: str, image: str) -> dict[str, Any]:
        good = image not in self.broken
        if image in self.crashing:
            self.restarts += 1
        return {
            "metadata": {
                "name": f"plugin-{node}",
                "uid": node + image,
                "ownerReferences": [{"uid": "u"}],
                "labels": {"controller-revision-hash": image},
            },
            "spec": {"nodeName": node, "containers": [{"image": image}]},
            "status": {
                "containerStatuses": [
                    {
                        "name": "c",
                        "restartCount": self.restarts if image in self.crashing else 3,
                        "state": {} if good else {"waiting": {"reason": "CrashLoopBackOff"}},
                    }
                ],
                "conditions": [{"type": "Ready", "status": str(good)}],
            },
        }

    def _node(self, name: str, ready: bool) -> dict[str, Any]:
        count = "0" if self.pods.get(name) in self.without_gpus else self.gpus[name]
        return {
            "metadata": {"name": name},
            "status": {
                "conditions": [{"type": "Ready", "status": str(ready), "message": "it is off"}],
                "allocatable": {"nvidia.com/gpu": count},
            },
        }


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(kube_api, "admin", lambda *_: made)
    monkeypatch.setattr(addons, "time", Clock())
    return made


def test_an_update_is_applied_and_waited_for_on_each_node(cluster: Cluster) -> None:
    [before] = addons.pending([daemon_set("p:2")])
    assert before == {
        "name": "plugin",
        "wanted": ["p:2"],
        "running": {"p:1": 3},
        "changes": ["DaemonSet plugin"],
        "behind": [],
    }
    assert cluster.applied == []
    changed, [difference] = addons.upgrade([daemon_set("p:2")], 60, check=True)
    assert (changed, difference.title, cluster.applied) == (["DaemonSet plugin"], "DaemonSet plugin", [])
    assert addons.upgrade([daemon_set("p:2")], 60, check=False)[0] == ["DaemonSet plugin"]
    assert cluster.pods == dict.fromkeys(cluster.nodes, "p:2")
    assert addons.upgrade([daemon_set("p:2")], 60, check=False) == ([], [])
    assert cluster.applied == ["p:2"]
    assert addons.pending([daemon_set("p:2")])[0]["changes"] == []


def test_what_is_not_installed_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Cluster("")
    monkeypatch.setattr(kube_api, "admin", lambda *_: made)
    assert addons.pending([daemon_set("p:2")]) == []
    assert addons.upgrade([daemon_set("p:2")], 60, check=False) == ([], [])
    assert made.applied == []


def test_an_update_whose_pods_do_not_run_is_put_back(cluster: Cluster) -> None:
    cluster.broken = {"p:2"}
    with pytest.raises(MachineProblem) as error:
        addons.upgrade([daemon_set("p:2")], 60, check=False)
    assert "n1: pod plugin-n1: CrashLoopBackOff" in str(error.value)
    assert "the earlier objects were applied again, and they run again" in str(error.value)
    assert cluster.applied == ["p:2", "p:1"]
    assert cluster.pods == dict.fromkeys(cluster.nodes, "p:1")


def test_an_update_whose_programs_end_again_and_again_is_put_back(cluster: Cluster) -> None:
    """The kubelet starts them at once: whenever one looks they are ready."""
    cluster.crashing = {"p:2"}
    with pytest.raises(MachineProblem, match=r"plugin-n1: a container was started again.*they run again"):
        addons.upgrade([daemon_set("p:2")], 60, check=False)
    assert cluster.applied == ["p:2", "p:1"]


def test_an_update_after_which_gpus_are_missing_is_put_back(cluster: Cluster) -> None:
    cluster.without_gpus = {"p:2"}
    with pytest.raises(MachineProblem, match=r"n1 offers 0 nvidia\.com/gpu, and offered 8 before; the earlier objects"):
        addons.upgrade([daemon_set("p:2")], 60, check=False)
    assert cluster.pods == dict.fromkeys(cluster.nodes, "p:1")


def test_an_interrupted_update_is_waited_for(cluster: Cluster) -> None:
    """All objects are as wanted already: what they were before is not known any more."""
    cluster._store(daemon_set("p:2"))
    cluster.stuck = True
    assert addons.pending([daemon_set("p:2")])[0]["behind"] == ["n1", "n2", "n3"]
    with pytest.raises(MachineProblem, match=r"n1: its pod is of an earlier version; n2: .*; wanted: pods that run"):
        addons.upgrade([daemon_set("p:2")], 60, check=False)
    assert cluster.applied == []
    cluster.stuck = False
    assert addons.upgrade([daemon_set("p:2")], 60, check=False) == ([], [])
    assert cluster.pods == dict.fromkeys(cluster.nodes, "p:2")


def test_a_node_that_is_not_ready_holds_up_others_only_where_one_follows_the_other(cluster: Cluster) -> None:
    cluster.nodes["n3"] = False
    with pytest.raises(MachineProblem, match="n3 is not ready, and plugin is replaced on one node after the other"):
        addons.upgrade([daemon_set("p:2")], 60, check=False)
    assert cluster.applied == []
    addons.upgrade([daemon_set("p:2", "100%")], 60, check=False)
    assert cluster.pods == {"n1": "p:2", "n2": "p:2", "n3": "p:1"}


def test_progress_on_a_large_cluster_extends_the_limit(cluster: Cluster) -> None:
    for number in range(4, 60):
        cluster.nodes[f"n{number}"], cluster.gpus[f"n{number}"] = True, "8"
    cluster.pods = dict.fromkeys(cluster.nodes, "p:1")
    addons.upgrade([daemon_set("p:2")], 5, check=False)
    assert set(cluster.pods.values()) == {"p:2"}


def test_a_node_without_a_pod_is_waited_for(cluster: Cluster) -> None:
    del cluster.pods["n2"]
    cluster.stuck = True
    with pytest.raises(MachineProblem, match="they do not run either"):
        addons.upgrade([daemon_set("p:2")], 10, check=False)


def test_the_report_is_plain_data(cluster: Cluster) -> None:
    assert cluster
    assert json.loads(json.dumps(addons.pending([daemon_set("p:2")])))
