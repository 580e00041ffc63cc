"""Removing a node on a real API server: which pods are deleted, and how they are reported."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.ansible.module_utils import kubeconfig, process
from gpunodes.ansible.module_utils.cluster.removal import remove
from gpunodes.ansible.module_utils.problem import MachineProblem

from . import apiserver, kwok
from .apiserver import ApiServer

PODS = "/api/v1/namespaces/default/pods"
PATCH = "application/merge-patch+json"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def node(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A node with a pod that a budget protects, one of a DaemonSet, and one that has ended."""
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))
    monkeypatch.setattr(process, "PATH", f"{apiserver.programs()[0].parent}:{process.PATH}")
    server.call("POST", "/api/v1/nodes", kwok.node("n1", {}))
    for name, owner in (("web", "ReplicaSet"), ("agent", "DaemonSet"), ("ended", "ReplicaSet")):
        pod = kwok.pod(name, "n1", owner)
        pod["metadata"]["labels"] = {"app": name}
        server.call("POST", PODS, pod)
        phase = "Succeeded" if name == "ended" else "Running"
        status = {"status": {"phase": phase, "conditions": [{"type": "Ready", "status": "True"}]}}
        server.call("PATCH", f"{PODS}/{name}/status", status, PATCH)
    budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}
    server.call("POST", budgets, {"metadata": {"name": "web"}, "spec": spec})
    # No controller runs that would set these counts.
    counts = {"disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1}
    server.call("PATCH", f"{budgets}/web/status", {"status": {**counts, "observedGeneration": 1}}, PATCH)
    return "n1"


@pytest.fixture(autouse=True)
def clean(server: ApiServer) -> Iterator[None]:
    yield
    for path in (PODS, "/apis/policy/v1/namespaces/default/poddisruptionbudgets", "/api/v1/nodes"):
        for thing in server.call("GET", path)["items"]:
            body = {"gracePeriodSeconds": 0}
            server.call("DELETE", f"{path}/{thing['metadata']['name']}", body)


def report(server: ApiServer, node: str, *, ready: bool) -> None:
    condition = {"type": "Ready", "status": "True" if ready else "Unknown", "reason": "NodeStatusUnknown"}
    condition |= {"message": "Kubelet stopped posting node status."}
    server.call("PATCH", f"/api/v1/nodes/{node}/status", {"status": {"conditions": [condition]}}, PATCH)


def names(server: ApiServer, path: str) -> list[str]:
    found: list[dict[str, Any]] = server.call("GET", path)["items"]
    return sorted(thing["metadata"]["name"] for thing in found)


@pytest.mark.parametrize("check", [True, False])
def test_a_node_that_is_not_ready_keeps_its_pods_without_force(server: ApiServer, node: str, check: bool) -> None:
    """Without force a node that is not ready is not changed, not even cordoned, and the pods are named."""
    report(server, node, ready=False)
    with pytest.raises(MachineProblem, match=r"these pods have ended: default/web;.*--force-drain"):
        remove(node, 5, force=False, check=check)
    assert names(server, PODS) == ["agent", "ended", "web"]
    assert "unschedulable" not in server.call("GET", f"/api/v1/nodes/{node}")["spec"]

    _, notes = remove(node, 5, force=True, check=check)
    assert notes == ["pods of n1 deleted by force: default/web"]
    assert names(server, PODS) == (["agent", "ended", "web"] if check else ["agent", "ended"])
    assert names(server, "/api/v1/nodes") == ([node] if check else [])


def test_a_node_that_is_ready_is_drained_within_the_budgets(server: ApiServer, node: str) -> None:
    """A disruption budget blocks the drain of a working node; with force the pod is deleted and named."""
    report(server, node, ready=True)
    with pytest.raises(MachineProblem, match=r"n1 cannot be drained within 3 s.*--force-drain"):
        remove(node, 3, force=False, check=False)
    assert "web" in names(server, PODS)
    _, notes = remove(node, 3, force=True, check=False)
    assert notes == ["pods of n1 deleted by force: default/web"]
    assert names(server, "/api/v1/nodes") == []


@pytest.mark.parametrize("ready", [True, False])
def test_a_machine_that_was_reset_joins_again_whatever_its_old_node_lists(
    server: ApiServer, node: str, ready: bool
) -> None:
    """Its stale node is deleted at once; `join` failed at its pods and named an option that it does not have."""
    report(server, node, ready=ready)
    tasks = yaml.safe_load((Path(__file__).parents[2] / "roles/worker/tasks/main.yml").read_text())
    name = "gpunodes.bootstrap.node_removed"
    [order] = [task[name] for block in tasks for task in block.get("block", ()) if name in task]
    began = time.monotonic()
    _, notes = remove(node, order["timeout"], order.get("force", False), check=False)
    assert time.monotonic() - began < 15
    assert notes == ["pods of n1 deleted by force: default/web"]
    assert names(server, "/api/v1/nodes") == []
    assert "web" not in names(server, PODS)


def test_a_node_without_pods_is_removed_without_notes(server: ApiServer, node: str) -> None:
    """A node without pods that is not ready needs no force."""
    server.call("DELETE", f"{PODS}/web", {"gracePeriodSeconds": 0})
    report(server, node, ready=False)
    removed, notes = remove(node, 5, force=False, check=False)
    assert (removed.actions, notes) == (["drain n1", "delete node n1"], [])
    assert names(server, "/api/v1/nodes") == []
