"""The fixtures of tests that run the programs of add-ons; other files have an API server of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpunodes.ansible.module_utils import kubeconfig

from tests.repair.addon_programs import cluster, node
from tests.repair.apiserver import ApiServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A cluster with a node whose kubelet serves its usage."""
    with cluster(tmp_path_factory.mktemp("cluster")) as made, node(made):
        yield made


@pytest.fixture
def admin(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules reach the cluster as its administrator."""
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))
