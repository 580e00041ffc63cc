"""Logins at image registries on a real API server."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from gpunodes.engine.cluster import connection
from gpunodes.engine.cluster.registries import Registries, secret_name
from gpunodes.engine.cluster.session import Session
from gpunodes.errors import WrongInput
from gpunodes.operations import registries

from . import apiserver
from .apiserver import ApiServer

SERVER = "registry.example:5000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made:
        for name in ("team", "secrets"):
            made.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
            pull = {"metadata": {"name": "default"}, "imagePullSecrets": [{"name": "own"}]}
            made.call("POST", f"/api/v1/namespaces/{name}/serviceaccounts", pull)
        yield made


@pytest.fixture
def cluster(server: ApiServer) -> Iterator[Registries]:
    session = Session(connection.here(sys.executable, server.kubeconfig))
    yield Registries(session)
    session.close()


def pulled(server: ApiServer, namespace: str) -> list[str]:
    account = server.call("GET", f"/api/v1/namespaces/{namespace}/serviceaccounts/default")
    return [each["name"] for each in account["imagePullSecrets"]]


def content(server: ApiServer, namespace: str, name: str) -> dict[str, Any]:
    secret = server.call("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
    assert secret["type"] == "kubernetes.io/dockerconfigjson"
    found: dict[str, Any] = json.loads(base64.b64decode(secret["data"][".dockerconfigjson"]))
    return found


def test_a_login_a_new_password_and_a_logout(server: ApiServer, cluster: Registries) -> None:
    name = secret_name(SERVER)
    registries.logged_in(cluster, SERVER, ["team", "secrets"], "robot", "one")
    registries.logged_in(cluster, SERVER, ["team"], "robot", "two")
    assert pulled(server, "team") == pulled(server, "secrets") == ["own", name]
    auths = content(server, "team", name)["auths"]
    pair = base64.b64encode(b"robot:two").decode()
    assert auths == {SERVER: {"username": "robot", "password": "two", "auth": pair}}
    registries.logged_in(cluster, "docker.io", ["team"], "me", "three")
    assert list(content(server, "team", secret_name("docker.io"))["auths"]) == ["https://index.docker.io/v1/"]
    found = cluster.logins()
    assert [(each.server, each.namespace, each.user, each.is_used) for each in found] == [
        ("docker.io", "team", "me", True),
        (SERVER, "secrets", "robot", True),
        (SERVER, "team", "robot", True),
    ]
    assert "two" not in str(found)
    assert len(registries.logged_out(cluster, SERVER, ["secrets"])) == 1
    assert pulled(server, "secrets") == ["own"]
    assert len(registries.logged_out(cluster, SERVER)) == 1
    assert pulled(server, "team") == ["own", secret_name("docker.io")]
    with pytest.raises(WrongInput, match="no login at registry"):
        registries.logged_out(cluster, SERVER)


def test_a_missing_namespace_changes_nothing(server: ApiServer, cluster: Registries) -> None:
    with pytest.raises(WrongInput, match="no namespace nowhere"):
        registries.logged_in(cluster, SERVER, ["secrets", "nowhere"], "robot", "one")
    assert pulled(server, "secrets") == ["own"]


def test_secrets_of_others_are_neither_listed_nor_deleted(server: ApiServer, cluster: Registries) -> None:
    labels = {"gpunodes.dev/registry": "true"}
    for name, kind in (("stolen", "Opaque"), (secret_name("other.example"), "Opaque")):
        notes = {"gpunodes.dev/registry-server": "other.example"}
        body = {"metadata": {"name": name, "labels": labels, "annotations": notes}, "type": kind}
        server.call("POST", "/api/v1/namespaces/team/secrets", body)
    assert "other.example" not in {each.server for each in cluster.logins()}
