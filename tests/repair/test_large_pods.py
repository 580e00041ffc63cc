"""Pods that a user of one namespace made as large as an API server allows: a drain still reads those of its node."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api, kubeconfig
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.connection import here
from gpunodes.engine.cluster.direct import ByKubeconfig
from gpunodes.engine.cluster.session import Session

from . import apiserver
from .apiserver import ApiServer

PODS = 24
NAMES = [f"p{number:02}" for number in range(PODS)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with pods of 1.57 MB as JSON, 38 MB together."""
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made:
        for name in NAMES:
            spec = {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]}
            metadata: dict[str, Any] = {"name": name, "annotations": {"a": "\x01" * ((256 << 10) - 1)}}
            made.call("POST", "/api/v1/namespaces/default/pods", {"metadata": metadata, "spec": spec})
        yield made


@pytest.mark.parametrize("by", ["a control plane", "a kubeconfig"])
def test_the_pods_of_a_node_are_read(server: ApiServer, by: str) -> None:
    transport: Any = here(sys.executable, server.kubeconfig)
    if by == "a kubeconfig":
        pytest.importorskip("kubernetes.config.kube_config", reason="needs the extra gpunodes[kubeconfig]")
        transport = ByKubeconfig(server.kubeconfig)
    with contextlib.closing(Session(transport)) as session:
        found = Cluster(session).pods_on("n1")
        assert sorted(each.name for each in found) == NAMES
        assert Cluster(session).pods_on("n2") == []


def test_a_module_reads_them(server: ApiServer) -> None:
    config = kubeconfig.load(str(server.kubeconfig))
    assert config
    client = kube_api.Client(config, limits=kube_api.Limits(most=8 << 20))
    found = client.get("/api/v1/pods", fieldSelector="spec.nodeName=n1")
    assert sorted(each["metadata"]["name"] for each in found["items"]) == NAMES
