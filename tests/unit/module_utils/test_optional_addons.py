"""Which objects with an add-on's label are deleted with it; tests/repair/test_addons.py has a real API server."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api
from gpunodes.ansible.module_utils.cluster import optional, settling
from gpunodes.ansible.module_utils.problem import MachineProblem

from tests.unit.module_utils.test_addons import Clock

VERBS = ["list", "delete"]
LABELS = {optional.LABEL: "metrics-server"}


class Cluster:
    """The API of a cluster in which everything has the label of an add-on."""

    def __init__(self) -> None:
        self.deleted: list[str] = []
        kinds = {"nodes": "Node", "services": "Service"}
        core = [{"name": name, "kind": kind, "namespaced": False, "verbs": VERBS} for name, kind in kinds.items()]
        requests = {"name": "certificatesigningrequests", "kind": "CertificateSigningRequest", "namespaced": False}
        self.answers: dict[str, Any] = {
            "/apis": {"groups": [{"preferredVersion": {"groupVersion": "certificates.k8s.io/v1"}}]},
            "/apis/apiregistration.k8s.io/v1/apiservices": {"items": []},
            "/api/v1": {"resources": core},
            "/apis/certificates.k8s.io/v1": {"resources": [{**requests, "verbs": VERBS}]},
        }

    def find(self, path: str) -> Any:
        found = {"items": [{"metadata": {"name": "x", "labels": LABELS}}]} if "?labelSelector=" in path else None
        return self.answers.get(path, found)

    def get(self, path: str, **_: str) -> Any:
        return self.find(path)

    def delete(self, path: str) -> None:
        self.deleted.append(path)


def test_what_users_of_other_namespaces_label_is_not_of_the_add_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an add-on's label a user of one namespace could stop its installation, and have an object listed as it."""
    waits = {"status": {}, "spec": {"replicas": 1, "selector": {"matchLabels": {}}}}
    ready = {**waits, "status": dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas"), 1)}

    def labelled(space: str, name: str = "metrics-server") -> dict[str, Any]:
        return {"metadata": {"name": "x", "namespace": space, "labels": {optional.LABEL: name}}}

    class Spaces(Cluster):
        def get(self, path: str, **_: str) -> Any:
            if path == "/api/v1/namespaces":
                return {"items": [{"metadata": {"name": "own", "labels": LABELS}}]}
            if path == "/apis/apps/v1/deployments":
                own = [labelled(space) | ready for space in ("kube-system", "own")]
                return {"items": [labelled("lab") | waits, *own, labelled("lab", "monitoring") | waits]}
            return self.answers.get(path, {"items": []})

        def find(self, path: str) -> Any:
            listed = {"items": [labelled("lab"), labelled("own"), labelled("kube-system")]}
            return listed if "?labelSelector=" in path else self.answers.get(path)

    cluster = Spaces()
    services = {"name": "services", "kind": "Service", "namespaced": True, "verbs": VERBS}
    cluster.answers["/api/v1"]["resources"] = [services]
    monkeypatch.setattr(kube_api, "admin", lambda: cluster)
    monkeypatch.setattr(settling, "SETTLE_S", 0)
    optional.wait("metrics-server", {}, 0)
    assert optional.installed() == {"metrics-server": ""}
    optional.down("metrics-server", (), check=False)
    assert sorted(cluster.deleted) == [f"/api/v1/namespaces/{space}/services/x" for space in ("kube-system", "own")]


def test_a_name_that_would_lead_to_another_object_is_refused() -> None:
    """Names of roles and bindings may have "?", and a path would end there."""
    cluster = Cluster()
    cluster.answers["/apis"] = {"groups": []}
    bindings = {"name": "rolebindings", "kind": "RoleBinding", "namespaced": True, "verbs": VERBS}
    cluster.answers["/api/v1"] = {"resources": [bindings]}
    cluster.answers["/api/v1/namespaces"] = {"items": []}
    metadata = {"name": "a:b?c", "namespace": "kube-system", "labels": LABELS}
    cluster.answers[f"/api/v1/rolebindings?labelSelector={optional.LABEL}%3Dmetrics-server"] = {
        "items": [{"metadata": metadata}]
    }
    [(path, _)] = optional._labelled(cluster, "metrics-server")  # type: ignore[arg-type]  # all that it uses of a client
    assert path == "/api/v1/namespaces/kube-system/rolebindings/a:b%3Fc"
    assert not kube_api.is_path(path)


@pytest.mark.parametrize("space", ["lab", None])
def test_objects_that_would_not_count_are_refused(monkeypatch: pytest.MonkeyPatch, space: str | None) -> None:
    cluster = Cluster()
    cluster.answers["/api/v1"] = {
        "resources": [
            {"name": "namespaces", "kind": "Namespace", "namespaced": False},
            {"name": "services", "kind": "Service", "namespaced": True},
        ]
    }
    monkeypatch.setattr(kube_api, "admin", lambda: cluster)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "x", **({"namespace": space} if space else {})},
    }
    own = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "own"}}
    with pytest.raises(
        MachineProblem, match=f"in the namespace {space or 'default'}, which its objects do not contain"
    ):
        optional.up([own, service], "kueue", "v1", check=True)


def test_what_a_node_labels_itself_is_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root on a node may give its own Node the label of an add-on: no lock of the machine is held here."""
    cluster = Cluster()
    monkeypatch.setattr(kube_api, "admin", lambda: cluster)
    assert optional.down("metrics-server", (), check=False)[0] == ["Service x"]
    assert cluster.deleted == ["/api/v1/services/x"]


class Running(Cluster):
    """A Deployment with a pod that is ready whenever it is looked at; its program ends ``crashes`` times.

    With ``nodes`` it is a DaemonSet for so many nodes.
    """

    def __init__(self, clock: Clock, crashes: int = 0, nodes: int | None = None) -> None:
        super().__init__()
        self._clock, self._crashes, self._nodes = clock, crashes, nodes

    def _workload(self) -> dict[str, Any]:
        about = {"name": "x", "namespace": "kube-system", "labels": LABELS, "uid": "u", "generation": 1}
        counts = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "desiredNumberScheduled": self._nodes}
        spec = {"replicas": 1, "selector": {"matchLabels": {"app": "x"}}}
        return {"metadata": about, "spec": spec, "status": {**counts, "observedGeneration": 1}}

    def _pod(self) -> dict[str, Any]:
        restarts = min(self._crashes, int(self._clock.now // 7))
        ended = {"terminated": {"exitCode": 1, "message": "no GPU"}} if restarts else {}
        container = {"name": "c", "restartCount": restarts, "state": {"running": {}}, "lastState": ended}
        status = {"containerStatuses": [container], "conditions": [{"type": "Ready", "status": "True"}]}
        return {"metadata": {"name": "x-1", "uid": "p"}, "spec": {"nodeName": "n", "containers": []}, "status": status}

    def get(self, path: str, **_: str) -> Any:
        if path.endswith("/daemonsets/x"):
            return self._workload()
        if path == f"/apis/apps/v1/{'deployments' if self._nodes is None else 'daemonsets'}":
            return {"items": [self._workload()]}
        if path == "/api/v1/namespaces/kube-system/pods":
            return {"items": [] if self._nodes == 0 else [self._pod()]}
        return {"items": []}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(optional, "time", made)
    return made


def test_a_program_that_ends_again_and_again_does_not_run(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(kube_api, "admin", lambda: Running(clock, crashes=1000))
    with pytest.raises(MachineProblem, match="pod x-1: a container was started again: exit code 1: no GPU"):
        optional.wait("metrics-server", {}, 60)
    assert 60 <= clock.now < 90


def test_a_program_that_ended_at_its_start_runs_when_it_has_lasted(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(kube_api, "admin", lambda: Running(clock, crashes=2))
    assert optional.wait("metrics-server", {}, 60) == []
    assert clock.now >= 14 + settling.SETTLE_S


def test_a_daemon_set_for_which_no_node_is_there_is_named(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(kube_api, "admin", lambda: Running(clock, nodes=0))
    assert optional.wait("metrics-server", {}, 60) == ["x"]
