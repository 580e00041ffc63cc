"""A machine that was removed and kept its kubelet's certificate, against a real API server with its authorizer."""

from __future__ import annotations

import base64
import datetime
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from gpunodes.ansible.module_utils import kube_api, kubeconfig, process
from gpunodes.ansible.module_utils.cluster import removal, removed_nodes, tokens
from gpunodes.ansible.module_utils.cluster.removal import remove
from gpunodes.ansible.module_utils.kube_api import ApiError, Client
from gpunodes.ansible.module_utils.problem import MachineProblem

from . import apiserver, kwok
from .apiserver import ApiServer

NODES = "/api/v1/nodes"
REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
FORBIDDEN = 403


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    flags = {"authorization-mode": "Node,RBAC", "enable-admission-plugins": "NodeRestriction"}
    with apiserver.running(tmp_path_factory.mktemp("cluster"), flags) as made:
        # As kubeadm has it: nodes renew their certificates.
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole"}
        role["name"] = "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}
        binding = {"metadata": {"name": "renewal"}, "roleRef": role, "subjects": [subject]}
        made.call("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)
        yield made


@pytest.fixture
def admin(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))
    monkeypatch.setattr(process, "PATH", f"{apiserver.programs()[0].parent}:{process.PATH}")
    # Without patience: a 403 is the answer here.
    client = kube_api.admin(0)
    yield client
    for name in (each["metadata"]["name"] for each in client.get(NODES)["items"]):
        client.delete(f"{NODES}/{name}")
    client.close()


def signing_request(name: str) -> dict[str, Any]:
    """A request for a certificate as a kubelet makes it to renew its own."""
    subject = f"/O=system:nodes/CN=system:node:{name}"
    words = ["openssl", "req", "-new", "-newkey", "rsa:2048", "-nodes", "-keyout", "/dev/null", "-subj", subject]
    text = subprocess.run(words, check=True, capture_output=True).stdout
    signer = "kubernetes.io/kube-apiserver-client-kubelet"
    usages = ["digital signature", "key encipherment", "client auth"]
    spec = {"request": base64.b64encode(text).decode(), "signerName": signer, "usages": usages}
    return {"metadata": {"generateName": "csr-"}, "spec": spec}


def as_node(client: Client, name: str, path: str = NODES) -> str:
    """What the API says when the machine makes its node, or requests a certificate: "" if it does it."""
    body = {"metadata": {"name": name}} if path == NODES else signing_request(name)
    try:
        client.call("POST", path, body, user=f"system:node:{name}")
    except ApiError as error:
        if error.status != FORBIDDEN:
            raise
        return str(error)
    return ""


def until_admitted(client: Client, name: str) -> None:
    """A kubelet tries to register until it succeeds."""
    deadline = time.monotonic() + 60
    while as_node(client, name):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def ready(client: Client, node: dict[str, Any], status: str) -> None:
    """What the kubelet, or the node lifecycle controller without it, reports."""
    conditions = [{"type": "Ready", "status": status, "reason": "Test", "message": "for the test"}]
    path = f"{NODES}/{node['metadata']['name']}/status"
    client.call("PATCH", path, {"status": {"conditions": conditions}}, None, kube_api.MERGE)


def removed(name: str, *, control_plane: bool = False, returns: bool = False) -> list[str]:
    _, notes = remove(name, 5, force=True, check=False, control_plane=control_plane, returns=returns)
    return notes


@pytest.mark.parametrize("role", ["worker", "control plane"])
def test_a_removed_machine_does_not_come_back(admin: Client, role: str) -> None:
    """Root on it copied the certificate of the kubelet before."""
    name = f"n-{role[0]}"
    labels = {"node-role.kubernetes.io/control-plane": ""} if role == "control plane" else {}
    admin.call("POST", NODES, kwok.node(name, labels))
    assert removed(name, control_plane=role == "control plane") == []
    for path in (NODES, REQUESTS):
        assert "gpunodes removed this machine from the cluster" in as_node(admin, name, path)
    # Others are as free as before.
    assert (as_node(admin, "other"), as_node(admin, "other", REQUESTS)) == ("", "")
    assert admin.get(NODES)["items"][0]["metadata"]["name"] == "other"


def test_a_machine_that_joins_is_let_in_before_it_has_its_token(admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.call("POST", NODES, kwok.node("n-1", {}))
    removed("n-1")
    assert as_node(admin, "n-1")
    # No controller signs cluster-info here.
    signed = {"data": {"jws-kubeconfig-abcdef": "x"}}
    monkeypatch.setattr(
        Client, "get", lambda self, path, **_: signed if "cluster-info" in path else self.call("GET", path)
    )
    monkeypatch.setattr(tokens, "new_token", lambda: "abcdef.0123456789abcdef")
    tokens.create(900, 5, "run", ["n-1", "n-2"])
    until_admitted(admin, "n-1")
    assert as_node(admin, "n-1", REQUESTS) == ""


def test_the_old_node_of_a_machine_that_joins_again_is_not_refused(admin: Client) -> None:
    admin.call("POST", NODES, kwok.node("n-3", {}))
    assert removed("n-3", returns=True) == []
    assert as_node(admin, "n-3") == ""


def test_a_node_whose_kubelet_works_is_not_the_old_one_of_a_machine_that_joins(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may report the identity of another one; a node also stays ready shortly after its kubelet ended."""
    made = admin.call("POST", NODES, kwok.node("n-5", {}))
    ready(admin, made, "True")
    monkeypatch.setattr(removal, "_SILENT_S", 0.5)
    monkeypatch.setattr(removal, "_POLL_S", 0.1)
    with pytest.raises(MachineProblem, match="node n-5 stays ready: a kubelet runs on its machine"):
        removed("n-5", returns=True)
    assert not admin.get(f"{NODES}/n-5")["spec"].get("unschedulable")
    later = threading.Timer(0.3, ready, (admin, made, "Unknown"))
    later.start()
    assert removed("n-5", returns=True) == []
    later.join()
    assert admin.find(f"{NODES}/n-5") is None


def test_a_removal_that_was_interrupted_goes_on(admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when the name was on the list, and the node still there."""
    admin.call("POST", NODES, kwok.node("n-4", {}))
    with monkeypatch.context() as killed:
        killed.setattr(removed_nodes, "_is_in_force", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            removed("n-4")
    assert admin.find(f"{NODES}/n-4")
    assert removed("n-4") == []
    assert as_node(admin, "n-4")
    assert removed("n-4") == []


def test_names_leave_the_list_when_their_certificates_have_ended(admin: Client) -> None:
    old = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=401)).strftime("%Y-%m-%dT%H:%M:%SZ")
    admin.call("POST", NODES, kwok.node("n-5", {}))
    removed("n-5")
    removed_nodes._patch(admin, {"gone": old, "by-hand": "for ever"})
    admin.call("POST", NODES, kwok.node("n-6", {}))
    removed("n-6")
    assert {"n-5", "n-6", "by-hand"} <= {*admin.get(removed_nodes.PATH)["data"]}
    assert "gone" not in admin.get(removed_nodes.PATH)["data"]


def test_a_node_cannot_take_itself_off_the_list_and_without_a_list_all_join(admin: Client) -> None:
    admin.call("POST", NODES, kwok.node("n-7", {}))
    removed("n-7")
    with pytest.raises(ApiError, match="cannot patch"):
        admin.call("PATCH", removed_nodes.PATH, {"data": {"n-7": None}}, None, kube_api.MERGE, user="system:node:n-7")
    admin.delete(removed_nodes.PATH)
    until_admitted(admin, "n-7")


def test_a_dry_run_refuses_nobody(admin: Client) -> None:
    admin.call("POST", NODES, kwok.node("n-8", {}))
    report, _ = remove("n-8", 5, force=True, check=True)
    assert [each.title for each in report.differences] == ["pods", "nodes", "refused nodes"]
    assert "n-8" not in ((admin.find(removed_nodes.PATH) or {}).get("data") or {})


def test_a_policy_without_an_effect_is_reported(admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed_nodes, "_IN_FORCE_S", 0)
    admin.call("POST", NODES, kwok.node("n-9", {}))
    [note] = removed("n-9")
    assert note.startswith("root on the machine of n-9 can make its node again")
    assert admin.find(f"{NODES}/n-9") is None
