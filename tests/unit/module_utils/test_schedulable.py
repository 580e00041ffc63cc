"""The control plane's taint: removed and restored, both on a cluster that exists, and never what a user decided."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from gpunodes.ansible.module_utils import pools
from gpunodes.ansible.module_utils.cluster import schedulable
from gpunodes.ansible.module_utils.kube_api import ApiError
from gpunodes.ansible.module_utils.problem import MachineProblem

KUBEADM = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
OTHER = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
EVICTS = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoExecute"}


def node(*taints: dict[str, str], annotation: str | None = None) -> dict[str, Any]:
    annotations = {} if annotation is None else {schedulable.REMOVED: annotation}
    spec = {"taints": list(taints)} if taints else {}
    return {"metadata": {"name": "control-1", "resourceVersion": "7", "annotations": annotations}, "spec": spec}


class Api:
    """A cluster with one node; ``conflicts``: how many changes collide with another one."""

    def __init__(self, found: dict[str, Any] | None, conflicts: int = 0) -> None:
        self.node = found
        self.conflicts = conflicts
        self.patches: list[dict[str, Any]] = []

    def find(self, path: str) -> Any:
        assert path == "/api/v1/nodes/control-1"
        return copy.deepcopy(self.node)

    def call(self, method: str, path: str, body: dict[str, Any], *_: Any) -> None:
        assert (method, path) == ("PATCH", "/api/v1/nodes/control-1")
        if self.conflicts:
            self.conflicts -= 1
            raise ApiError(409, "changed")
        assert self.node is not None
        self.patches.append(body)
        self.node["spec"] = {key: value for key, value in body["spec"].items() if value is not None}
        changed = {**self.node["metadata"]["annotations"], **body["metadata"]["annotations"]}
        self.node["metadata"]["annotations"] = {key: value for key, value in changed.items() if value is not None}


def converge(api: Api, *, wanted: bool, check: bool = False) -> bool:
    return schedulable.converge(api, "control-1", schedulable=wanted, check=check) is not None  # type: ignore[arg-type]  # a stand-in


def test_the_taint_goes_and_comes_back_and_others_stay() -> None:
    before = node(KUBEADM, OTHER, EVICTS)
    api = Api(copy.deepcopy(before))
    assert converge(api, wanted=True)
    assert api.node == node(OTHER, EVICTS, annotation="removed")
    assert not converge(api, wanted=True)
    assert converge(api, wanted=False)
    assert api.node == node(OTHER, EVICTS, KUBEADM)
    assert not converge(api, wanted=False)
    assert [patch["metadata"]["resourceVersion"] for patch in api.patches] == ["7", "7"]


def test_a_taint_that_a_user_removed_stays_removed() -> None:
    api = Api(node(OTHER))
    for wanted in (False, True, False):
        assert not converge(api, wanted=wanted)
    assert api.patches == []


def test_a_user_who_restored_the_taint_is_overruled_only_by_the_setting() -> None:
    """With the setting it goes again; without it only the annotation goes."""
    assert converge(Api(node(KUBEADM, annotation="removed")), wanted=True)
    api = Api(node(KUBEADM, annotation="removed"))
    assert converge(api, wanted=False)
    assert api.node == node(KUBEADM)


@pytest.mark.parametrize("annotation", ["", "true", "{{ lookup('pipe', 'id') }}", "removed\n", "x" * 1_000_000])
def test_another_annotation_restores_nothing(annotation: str) -> None:
    assert not converge(Api(node(annotation=annotation)), wanted=False)


def test_check_mode_changes_nothing_and_says_the_same() -> None:
    api = Api(node(KUBEADM))
    assert converge(api, wanted=True, check=True)
    assert api.node == node(KUBEADM)
    assert converge(Api(None), wanted=True, check=True)
    assert not converge(Api(None), wanted=False, check=True)


def test_a_change_in_between_is_read_again() -> None:
    api = Api(node(KUBEADM), conflicts=2)
    assert converge(api, wanted=True)
    assert api.node == node(annotation="removed")


def test_a_node_that_is_missing_is_waited_for_only_if_it_must_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "REGISTERS_S", 0)
    monkeypatch.setattr(schedulable, "_PAUSE_S", 0)
    assert not converge(Api(None), wanted=False)
    with pytest.raises(MachineProblem, match="the cluster has no node control-1"):
        converge(Api(None), wanted=True)
