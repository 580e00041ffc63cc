"""Kubeconfigs of people on a real API server with RBAC, signed by a real kube-controller-manager."""

from __future__ import annotations

import base64
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from gpunodes.engine.cluster import connection
from gpunodes.engine.cluster.access import OWN, Access, Binding
from gpunodes.engine.cluster.session import Session
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.kubeconfig import reduced
from gpunodes.operations import kubeconfig, remains, users
from gpunodes.operations.remains import Remains
from gpunodes.operations.users import Made, Request

from . import apiserver
from .apiserver import ApiServer

REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
OK, CREATED, FORBIDDEN = 200, 201, 403


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    # As the role control_plane has it.
    flags = {"authorization-mode": "Node,RBAC", "service-account-max-token-expiration": "24h0m0s"}
    with apiserver.running(tmp_path_factory.mktemp("cluster"), flags) as made:
        apiserver.controllers(made, "csrsigning,csrapproving,clusterrole-aggregation")
        for name in ("team", "other"):
            made.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        _until_aggregated(made)
        yield made


def _until_aggregated(server: ApiServer) -> None:
    """Wait for the rules of the role `edit`, which a controller collects."""
    deadline = time.monotonic() + 120
    while not server.call("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles/edit").get("rules"):
        assert all(each.poll() is None for each in server.processes), (server.folder / "controllers.log").read_text()
        assert time.monotonic() < deadline, (server.folder / "controllers.log").read_text()[-2000:]
        time.sleep(0.3)


@pytest.fixture
def access(server: ApiServer) -> Iterator[Access]:
    session = Session(connection.here(sys.executable, server.kubeconfig))
    yield Access(session)
    session.close()


class Talk:
    """What the command reports and asks; ``answer`` is that of the user."""

    def __init__(self, *, answer: bool = False) -> None:
        self.reported: list[str] = []
        self.asked: list[str] = []
        self.answer = answer

    def confirm(self, what: str) -> None:
        self.asked.append(what)
        if not self.answer:
            raise GpunodesError("not confirmed")


def make(server: ApiServer, access: Access, request: Request, talk: Talk | None = None) -> Made:
    talk = talk or Talk()
    users.check(request)
    admin = reduced(yaml.safe_load(server.kubeconfig.read_text()), "control-1")
    return users.made(access, admin, request, talk.reported.append, talk.confirm)


def call(made: Made, folder: Path, path: str, method: str = "GET", body: bytes | None = None) -> int:
    """The status of a request with a person's kubeconfig, as kubectl reads it from its file."""
    file = folder / "kubeconfig"
    kubeconfig.write(file, made.document, merge=False)
    assert file.stat().st_mode & 0o777 == 0o600
    document: Mapping[str, Any] = yaml.safe_load(file.read_text())
    cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    ca = base64.b64decode(cluster["certificate-authority-data"]).decode()
    pair = folder / "pair.pem"
    pair.write_bytes(base64.b64decode(user["client-certificate-data"]) + base64.b64decode(user["client-key-data"]))
    context = ssl.create_default_context(cadata=ca)
    context.load_cert_chain(pair)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(  # noqa: S310 - an API server on loopback
        cluster["server"] + path, body, {"Content-Type": "application/json"}, method=method
    )
    try:
        with opener.open(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_person_has_the_role_in_the_namespace_and_nothing_else(
    server: ApiServer, access: Access, tmp_path: Path
) -> None:
    talk = Talk()
    made = make(server, access, Request("alice", "edit", "team", days=1), talk)
    assert made.document["contexts"][0]["context"]["namespace"] == "team"
    assert abs(made.end - time.time() - 86_400) < 600
    assert "pods of team may become root on their nodes" in talk.reported[0]
    own, other = "/api/v1/namespaces/team", "/api/v1/namespaces/other"
    assert call(made, tmp_path, f"{own}/pods") == OK
    assert call(made, tmp_path, f"{own}/secrets") == OK, "edit includes the namespace's Secrets"
    for path in (f"{other}/pods", f"{other}/secrets", "/api/v1/nodes", "/api/v1/secrets", "/api/v1/namespaces"):
        assert call(made, tmp_path, path) == FORBIDDEN, path
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/team/rolebindings/{made.bindings[0].name}"
    assert call(made, tmp_path, roles, "DELETE") == FORBIDDEN
    assert server.call("GET", REQUESTS)["items"] == [], "the request is deleted"


def test_another_role_a_renewal_and_a_removal(server: ApiServer, access: Access, tmp_path: Path) -> None:
    first = make(server, access, Request("bob@example.org", "edit", "team"))
    second = make(server, access, Request("bob@example.org", "view", "team"))
    secrets = "/api/v1/namespaces/team/secrets"
    assert call(first, tmp_path, secrets) == FORBIDDEN, "the old certificate has the new role"
    assert call(second, tmp_path, "/api/v1/namespaces/team/pods") == OK
    make(server, access, Request("bob@example.org", "view"))
    renewed = make(server, access, Request("bob@example.org", days=200), talk := Talk())
    assert talk.reported == ["warning: the cluster signed the certificate for 2 days only"], "its CA ends then"
    found = [(each.namespace, each.role, each.end) for each in users.of_people(access.bindings()) if "bob" in each.name]
    assert found == [("", "view", renewed.end), ("team", "view", renewed.end)]
    assert call(renewed, tmp_path, "/api/v1/namespaces/other/pods") == OK
    gone = users.removed(access, "bob@example.org")
    assert len(gone) == 2
    assert remains.of(access, gone) == [], "view leaves nothing"
    assert call(renewed, tmp_path, "/api/v1/namespaces/team/pods") == FORBIDDEN
    with pytest.raises(WrongInput, match="is no user of this cluster"):
        users.removed(access, "bob@example.org")
    with pytest.raises(WrongInput, match="is no user of this cluster"):
        make(server, access, Request("bob@example.org"))


def test_what_an_editor_leaves_is_counted(server: ApiServer, access: Access, tmp_path: Path) -> None:
    """What the role `edit` really allows: a CronJob, a pod of its own, a token without an end, one of thirty days."""
    dora = make(server, access, Request("dora", "edit", "other"))
    of = "/api/v1/namespaces/other"
    container = {"name": "x", "image": "x"}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    job = {"schedule": "* * * * *", "jobTemplate": {"spec": {"template": template}}}
    note = {"kubernetes.io/service-account.name": "robot"}
    token = {"metadata": {"name": "t", "annotations": note}, "type": "kubernetes.io/service-account-token"}
    account = {"metadata": {"name": "robot"}}
    for path, body in (
        (f"{of}/serviceaccounts", account),
        (f"{of}/serviceaccounts/robot/token", {"spec": {"expirationSeconds": 30 * 86400}}),
        (f"{of}/secrets", token),
        (f"{of}/secrets", {"metadata": {"name": "plain"}}),
        (f"{of}/pods", {"metadata": {"name": "p"}, "spec": {"containers": [container], "serviceAccountName": "robot"}}),
        ("/apis/batch/v1/namespaces/other/cronjobs", {"metadata": {"name": "c"}, "spec": job}),
    ):
        assert call(dora, tmp_path, path, "POST", json.dumps(body).encode()) == CREATED, path
    tokens = f"{of}/serviceaccounts/robot/token"
    requested = server.call("POST", tokens, {"spec": {"expirationSeconds": 30 * 86400}})
    assert requested["spec"]["expirationSeconds"] == 86400
    # As the kubelet requests one for a pod: it is not shortened.
    bound = {"expirationSeconds": 3607, "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "p"}}
    assert server.call("POST", tokens, {"spec": bound})["spec"]["expirationSeconds"] == 3607
    gone = users.removed(access, "dora")
    assert remains.of(access, gone) == [Remains("other", 2, 1, 0)]
    everywhere = remains.of(access, [Binding("", "x", "edit", True)])
    assert [(each.namespace, each.workloads, each.tokens) for each in everywhere] == [("", 2, 1)]
    assert server.call("GET", f"{of}/serviceaccounts/robot")


@pytest.mark.parametrize(
    "forged",
    [
        {"name": "gpunodes:user:bob?x"},
        {"name": "gpunodes:user:bob#x"},
        {"name": "gpunodes:user:bob x"},
        {"name": "gpunodes:user:bob", "finalizers": ["example.org/keep"]},
    ],
    ids=str,
)
def test_rights_that_a_user_keeps_are_reported(
    server: ApiServer, access: Access, tmp_path: Path, forged: dict[str, Any]
) -> None:
    """An admin of a namespace makes himself a binding there that looks like one of gpunodes, or keeps ours."""
    made = make(server, access, Request("bob", "admin", "team"))
    folder = "/apis/rbac.authorization.k8s.io/v1/namespaces/team/rolebindings"
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "bob"}
    metadata = {**forged, "labels": {OWN: "true"}}
    body = json.dumps({"metadata": metadata, "roleRef": reference, "subjects": [subject]}).encode()
    own = "finalizers" in forged
    changed = call(made, tmp_path, f"{folder}/{forged['name']}" if own else folder, "PUT" if own else "POST", body)
    assert changed == (OK if own else CREATED)
    with pytest.raises(GpunodesError, match="bob still has rights by bindings") as caught:
        users.removed(access, "bob")
    assert f"RoleBinding team/{forged['name']} (admin)" in str(caught.value)
    assert call(made, tmp_path, "/api/v1/namespaces/team/secrets") == OK, "he has these rights"
    left = [each["metadata"]["name"] for each in server.call("GET", folder)["items"] if "bob" in str(each["subjects"])]
    assert left == [forged["name"]]
    # What the message proposes.
    path = f"{folder}/{quote(forged['name'])}"
    server.call("PATCH", path, {"metadata": {"finalizers": None}}, "application/merge-patch+json")
    if not own:
        server.call("DELETE", path)
    with pytest.raises(WrongInput, match="bob is no user of this cluster"):
        users.removed(access, "bob")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("carol", "nothing"), "no ClusterRole nothing"),
        (Request("carol", "edit", "nowhere"), "no namespace nowhere"),
        (Request("carol", "cluster-admin"), "not confirmed"),
        (Request("carol", "system:node"), "not confirmed"),
    ],
)
def test_what_is_refused_changes_nothing(server: ApiServer, access: Access, request_: Request, message: str) -> None:
    before = access.bindings()
    with pytest.raises(GpunodesError, match=message):
        make(server, access, request_)
    assert access.bindings() == before
    assert server.call("GET", REQUESTS)["items"] == []


def test_rights_that_others_gave_are_asked_about(server: ApiServer, access: Access, tmp_path: Path) -> None:
    kind = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "dave"}
    for name, role, who in (
        ("own-dave", "cluster-admin", subject),
        ("own-sre", "cluster-admin", {**subject, "kind": "Group", "name": "sre"}),
        ("own-readers", "view", {**subject, "kind": "Group", "name": "readers"}),
    ):
        body = {"metadata": {"name": name}, "roleRef": {**reference, "name": role}, "subjects": [who]}
        server.call("POST", kind, body)
    talk = Talk()
    for request in (Request("dave", "view", "team"), Request("erin", "view", "team", ("sre",))):
        with pytest.raises(GpunodesError, match="not confirmed"):
            make(server, access, request, talk)
    assert "rights by other bindings already: ClusterRoleBinding own-dave (cluster-admin)" in talk.asked[0]
    assert "the group sre gives erin ClusterRoleBinding own-sre (cluster-admin)" in talk.asked[1]
    talk = Talk(answer=True)
    made = make(server, access, Request("erin", "view", "team", ("readers", "sre")), talk)
    assert call(made, tmp_path, "/api/v1/nodes") == OK
    make(server, access, Request("frank", "view", "team", ("readers",), days=1), talk := Talk())
    assert talk.reported == ["the group readers gives ClusterRoleBinding own-readers (view)"]


def test_edit_everywhere_is_warned_about(server: ApiServer, access: Access) -> None:
    make(server, access, Request("gina", "edit"), talk := Talk())
    assert "includes kube-system" in talk.reported[0]


def test_no_request_of_another_client_is_approved(
    server: ApiServer, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with the name that ours will have, for a group of administrators."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "00")
    key = users._new_key()
    pem = users._signing_request(key, Request("mallory", groups=("kubeadm:cluster-admins",)))
    spec = {
        "request": base64.b64encode(pem).decode(),
        "signerName": "kubernetes.io/kube-apiserver-client",
        "usages": ["client auth"],
    }
    server.call("POST", REQUESTS, {"metadata": {"name": "gpunodes-00"}, "spec": spec})
    with pytest.raises(GpunodesError, match="another client deleted or replaced"):
        make(server, access, Request("heidi", "view", "team"))
    assert not [each for each in users.of_people(access.bindings()) if each.users == ("heidi",)]


def test_a_signer_that_does_not_sign(server: ApiServer, access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunodes.engine.cluster.access._SIGNED_S", 1.0)
    monkeypatch.setattr(Access, "_approve", lambda *_: None)
    with pytest.raises(GpunodesError, match="has not signed the certificate after 1 s"):
        make(server, access, Request("ivan", "view", "team"))
    assert "ivan" not in str(server.call("GET", REQUESTS)["items"])
    assert not [each for each in access.bindings() if isinstance(each, Binding) and "ivan" in each.users]
