"""The providerID of a node, and the removal of its starting taint, with an API in memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from gpunodes.ansible.module_utils import burn_in_taint, gpu_cluster, kube_api, kubeconfig, registration
from gpunodes.ansible.module_utils.cluster import nodes
from gpunodes.ansible.module_utils.kube_api import ApiError
from gpunodes.ansible.module_utils.problem import MachineProblem

OTHER = {"key": "team", "value": "a", "effect": "NoSchedule"}
STARTING = {"key": "gpunodes.dev/starting", "effect": "NoSchedule"}


class MemoryApi:
    """One node, whose patches are merged; ``conflicts`` patches fail first."""

    def __init__(self) -> None:
        self.node: dict[str, Any] | None = {
            "metadata": {"name": "gpu-1", "resourceVersion": "7"},
            "spec": {"taints": [OTHER, STARTING]},
        }
        self.conflicts = 0
        self.patches: list[dict[str, Any]] = []

    def find(self, path: str) -> Any:
        assert path == "/api/v1/nodes/gpu-1"
        return copy.deepcopy(self.node)

    def call(self, method: str, path: str, body: dict[str, Any], *_: Any) -> None:
        assert (method, body["metadata"]) == ("PATCH", {"resourceVersion": "7"})
        if self.conflicts:
            self.conflicts -= 1
            raise ApiError(409, "changed meanwhile")
        assert self.node
        self.patches.append(body["spec"])
        self.node["spec"] |= body["spec"]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> MemoryApi:
    made = MemoryApi()
    monkeypatch.setattr(kube_api, "admin", lambda **_: made)
    return made


def test_a_node_gets_its_provider_id_once(api: MemoryApi) -> None:
    api.conflicts = 2
    difference = registration.identify("gpu-1", "gpunodes://gpu-1", check=False)
    assert [(each.before, each.after) for each in difference] == [
        ({"providerID": ""}, {"providerID": "gpunodes://gpu-1"})
    ]
    assert registration.identify("gpu-1", "gpunodes://gpu-1", check=False) == []
    assert api.patches == [{"providerID": "gpunodes://gpu-1"}]


def test_another_provider_id_stays(api: MemoryApi) -> None:
    assert api.node
    api.node["spec"]["providerID"] = "aws:///i-0a"
    with pytest.raises(MachineProblem, match="has the providerID aws:///i-0a"):
        registration.identify("gpu-1", "gpunodes://gpu-1", check=False)
    assert api.patches == []


def test_the_starting_taint_goes_and_others_stay(api: MemoryApi) -> None:
    assert len(registration.start("gpu-1", check=False)) == 1
    assert api.patches == [{"taints": [OTHER]}]
    assert registration.start("gpu-1", check=False) == []


def test_check_mode_changes_nothing_and_a_missing_node_is_left_to_its_kubelet(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registration.start("gpu-1", check=True) == [], "without a cluster there is nothing yet"
    monkeypatch.setattr(kubeconfig, "load", lambda _: object())
    assert len(registration.start("gpu-1", check=True)) == 1
    assert len(registration.identify("gpu-1", "gpunodes://gpu-1", check=True)) == 1
    api.node = None
    assert registration.identify("gpu-1", "gpunodes://gpu-1", check=False) == []
    assert api.patches == []


def test_a_burn_in_is_due_on_a_node_that_is_starting(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kubelet registers it anew at each start, so that it never has the taint of the burn-in by itself."""
    monkeypatch.setattr(kubeconfig, "load", lambda _: object())
    monkeypatch.setattr(gpu_cluster, "pods_with_gpus", lambda *_: [])
    due, _, _ = burn_in_taint.hold("gpu-1", only_tainted=True, drain=False, limit_s=1, check=True)
    assert due
    assert api.node
    api.node["spec"] = {"taints": [OTHER]}
    assert burn_in_taint.hold("gpu-1", only_tainted=True, drain=False, limit_s=1, check=True)[0] is False


def test_a_node_reports_both() -> None:
    info = {"machineID": "", "systemUUID": "", "bootID": "", "kubeletVersion": "v1.36.3"}
    node = {
        "metadata": {"name": "gpu-1"},
        "spec": {"taints": [STARTING], "providerID": "gpunodes://gpu-1"},
        "status": {"nodeInfo": info},
    }
    told = nodes.describe(node, [])
    assert (told["starting"], told["provider_id"]) == (True, "gpunodes://gpu-1")
    told = nodes.describe({**node, "spec": {"providerID": "a\x1b[0m"}}, [])
    assert (told["starting"], told["provider_id"], told["ready"]) == (False, "", False)
