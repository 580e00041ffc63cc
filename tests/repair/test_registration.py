"""Nodes of pools that scale on a real API server: providerID, starting taint, and what the autoscaler keeps off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from gpunodes.ansible.module_utils import kubeconfig, registration
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.cluster.session import Session
from gpunodes.repair.switched_off import CONFIG_MAP

from . import apiserver, kwok
from .apiserver import ApiServer

NODES = "/api/v1/nodes"
STARTING = {"key": "gpunodes.dev/starting", "effect": "NoSchedule"}
OTHER = {"key": "team", "value": "ml", "effect": "NoSchedule"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def admin(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))


def made(server: ApiServer, name: str, **spec: Any) -> None:
    node = kwok.node(name, {})
    server.call("POST", NODES, {**node, "spec": {**node.get("spec", {}), **spec}})


def spec_of(server: ApiServer, name: str) -> dict[str, Any]:
    found: dict[str, Any] = server.call("GET", f"{NODES}/{name}")["spec"]
    return found


@pytest.mark.usefixtures("admin")
def test_an_existing_node_gets_its_provider_id_once(server: ApiServer) -> None:
    made(server, "n1")
    assert len(registration.identify("n1", "gpunodes://n1", check=True)) == 1
    assert "providerID" not in spec_of(server, "n1")
    assert len(registration.identify("n1", "gpunodes://n1", check=False)) == 1
    assert spec_of(server, "n1")["providerID"] == "gpunodes://n1"
    assert registration.identify("n1", "gpunodes://n1", check=False) == []


@pytest.mark.usefixtures("admin")
def test_a_node_of_another_provider_stays_as_it_is(server: ApiServer) -> None:
    made(server, "n2", providerID="aws:///eu-1/i-0a")
    before = server.call("GET", f"{NODES}/n2")["metadata"]["resourceVersion"]
    with pytest.raises(MachineProblem, match="has the providerID aws:///eu-1/i-0a"):
        registration.identify("n2", "gpunodes://n2", check=False)
    assert server.call("GET", f"{NODES}/n2")["metadata"]["resourceVersion"] == before


@pytest.mark.usefixtures("admin")
def test_only_the_starting_taint_is_removed(server: ApiServer) -> None:
    made(server, "n3", taints=[STARTING, OTHER])
    assert len(registration.start("n3", check=False)) == 1
    assert spec_of(server, "n3")["taints"] == [OTHER]
    assert registration.start("n3", check=False) == []


def test_the_state_of_the_autoscaler_is_read(server: ApiServer) -> None:
    class Direct(Session):
        """The requests of a session, sent by the test itself."""

        def __init__(self) -> None:
            pass

        def request(self, method: str, path: str, *_: Any, **__: Any) -> Response:
            try:
                return Response(200, server.call(method, path), "", 0.0)
            except OSError as error:
                return Response(getattr(error, "code", 0), None, str(error), 0.0)

    cluster = Cluster(Direct(), patience_s=0)
    assert cluster.switched_off() == {}
    state = {"phase": "off", "since": 1_800_000_000, "reason": "no pod needs it"}
    maps = "/api/v1/namespaces/kube-system/configmaps"
    data = {"n1": json.dumps(state), "n2": "{", "n3": json.dumps({**state, "phase": "on"})}
    server.call("POST", maps, {"metadata": {"name": CONFIG_MAP}, "data": data})
    assert {name: each.reason for name, each in cluster.switched_off().items()} == {"n1": "no pod needs it"}
