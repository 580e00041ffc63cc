"""Objects that are deleted from the cluster: those that are given, and others that belong to them."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api
from gpunodes.ansible.module_utils.cluster import objects
from gpunodes.ansible.module_utils.problem import MachineProblem

LABEL = "part-of=x"


def some(kind: str, name: str, **labels: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "kube-system", "labels": labels}}


class Api:
    """An API with config maps and service accounts."""

    def __init__(self) -> None:
        self.kinds = {"ConfigMap": "configmaps", "ServiceAccount": "serviceaccounts"}
        self.objects: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []
        self.kept: dict[str, int] = {}
        """How often an object is found after its deletion, as one with a finalizer."""

    def add(self, obj: dict[str, Any]) -> None:
        self.objects[f"{kube_api.SYSTEM}/{self.kinds[obj['kind']]}/{obj['metadata']['name']}"] = obj

    def get(self, path: str, **query: str) -> Any:
        if path == "/api/v1":
            return {"resources": [{"kind": k, "name": n, "namespaced": True} for k, n in self.kinds.items()]}
        key, value = query["labelSelector"].split("=")
        found = [each for name, each in self.objects.items() if name.startswith(f"{path}/")]
        # A list has no kind in its items.
        return {"items": [{"metadata": e["metadata"]} for e in found if e["metadata"]["labels"].get(key) == value]}

    def find(self, path: str) -> Any:
        name = path.rpartition("/")[2]
        if name in self.deleted and self.kept.get(name):
            self.kept[name] -= 1
            if not self.kept[name]:
                del self.objects[path]
        return self.objects.get(path)

    def delete(self, path: str) -> bool:
        self.deleted.append(path.rpartition("/")[2])
        if self.deleted[-1] in self.kept:
            return True
        return self.objects.pop(path, None) is not None


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    made = Api()
    monkeypatch.setattr(kube_api, "admin", lambda: made)
    for each in (
        some("ServiceAccount", "account", **{"part-of": "x"}),
        some("ConfigMap", "config", **{"part-of": "x"}),
        some("ConfigMap", "of-a-pool-that-is-gone", **{"part-of": "x"}),
        some("ConfigMap", "unlabelled"),
        some("ConfigMap", "of-another", **{"part-of": "y"}),
    ):
        made.add(each)
    return made


GIVEN = [some("ServiceAccount", "account"), some("ConfigMap", "config"), some("ConfigMap", "unlabelled")]


def test_what_is_no_longer_among_them_is_deleted(api: Api) -> None:
    assert objects.delete(GIVEN, LABEL, True, keep=True)[0] == ["ConfigMap of-a-pool-that-is-gone"]
    assert api.deleted == []
    objects.delete(GIVEN, LABEL, False, keep=True)
    assert api.deleted == ["of-a-pool-that-is-gone"]
    assert objects.delete(GIVEN, LABEL, False, keep=True) == ([], [])


def test_all_are_deleted_the_last_kind_first(api: Api) -> None:
    deleted, differences = objects.delete(GIVEN, LABEL, False, keep=False)
    assert deleted[-1] == "ServiceAccount account"
    assert set(api.deleted) == {"account", "config", "of-a-pool-that-is-gone", "unlabelled"}
    assert {each.title for each in differences} == set(deleted)
    assert objects.delete(GIVEN, LABEL, False, keep=False) == ([], [])
    assert [each["metadata"]["name"] for each in api.objects.values()] == ["of-another"]


def test_what_has_a_finalizer_is_waited_for(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim stays while a pod uses it: its server must not be taken away."""
    monkeypatch.setattr(objects, "_POLL_S", 0.01)
    api.kept = {"config": 3}
    assert "ConfigMap config" in objects.delete(GIVEN, "", False, keep=False, limit_s=60)[0]
    assert not [each for each in api.objects if each.endswith("/config")]
    api.add(some("ConfigMap", "config"))
    api.kept = {"config": 10_000}
    assert "ConfigMap config" in objects.delete(GIVEN, "", True, keep=False, limit_s=60)[0]
    with pytest.raises(MachineProblem, match=r"ConfigMap kube-system/config is being deleted.*-n kube-system`"):
        objects.delete(GIVEN, "", False, keep=False, limit_s=0.05)


@pytest.mark.parametrize(
    ("ready", "annotations", "installed", "refused"),
    [
        ("False", {}, False, False),  # a cluster that was just created
        ("True", {}, True, False),
        ("True", {}, False, True),
        ("True", {"flannel.alpha.coreos.com/backend-type": "vxlan"}, False, False),  # flannel's DaemonSet was deleted
    ],
)
def test_a_network_add_on_is_not_applied_beside_another(
    monkeypatch: pytest.MonkeyPatch, ready: str, annotations: dict[str, str], installed: bool, refused: bool
) -> None:
    node = {
        "metadata": {"name": "control-1", "annotations": annotations},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }

    class Cluster:
        def get(self, path: str, **_: str) -> Any:
            if path == "/api/v1/nodes":
                return {"items": [node]}
            return {"resources": [{"kind": "DaemonSet", "name": "daemonsets", "namespaced": True}]}

        def find(self, path: str) -> Any:
            assert path == "/apis/apps/v1/namespaces/kube-flannel/daemonsets/kube-flannel-ds"
            return {} if not installed else {"metadata": {}}

    monkeypatch.setattr(kube_api, "admin", Cluster)
    own = {"metadata": {"name": "kube-flannel-ds", "namespace": "kube-flannel"}}
    given = [some("Namespace", "kube-flannel"), {"apiVersion": "apps/v1", "kind": "DaemonSet", **own}]
    if refused:
        with pytest.raises(MachineProblem, match=r"is ready without kube-flannel-ds.*gpunodes_network to none"):
            objects.check_network(given)
    else:
        objects.check_network(given)
