"""Which objects with an add-on's label are deleted with it; tests/repair/test_addons.py has a real API server."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api
from gpunodes.ansible.module_utils.cluster import optional

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

    get = find

    def delete(self, path: str) -> None:
        self.deleted.append(path)


def test_what_a_node_labels_itself_is_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root on a node may give its own Node the label of an add-on: no lock of the machine is held here."""
    cluster = Cluster()
    monkeypatch.setattr(kube_api, "admin", lambda: cluster)
    assert optional.down("metrics-server", (), check=False)[0] == ["Service x"]
    assert cluster.deleted == ["/api/v1/services/x"]
