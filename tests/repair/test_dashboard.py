"""The rights of add-ons with a real API server; the dashboard with a real sshd, and a stand-in for Headlamp."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from gpunodes.ansible.module_utils import kubeconfig
from gpunodes.ansible.module_utils.cluster import optional
from gpunodes.engine import control_planes
from gpunodes.engine.cluster.connection import here
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.cluster.tokens import Tokens
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.operations import dashboard
from gpunodes.planner import addons

from tests import sshd
from tests.repair import apiserver
from tests.repair.apiserver import ApiServer
from tests.unit.test_addon_role import rendered

REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
PROMETHEUS = "system:serviceaccount:gpunodes-monitoring:prometheus"
STATE = "system:serviceaccount:gpunodes-monitoring:kube-state-metrics"
HEADLAMP = "system:serviceaccount:gpunodes-headlamp:headlamp"
VIEWER = "system:serviceaccount:gpunodes-headlamp:viewer"
ADDONS = ("dcgm-exporter", "headlamp", "monitoring")
OWN, HOSTILE = "127.96.0.9", "127.96.0.66"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    more = {"authorization-mode": "RBAC"}
    with apiserver.running(tmp_path_factory.mktemp("cluster"), more) as made, pytest.MonkeyPatch.context() as patch:
        apiserver.controllers(made, "clusterrole-aggregation-controller,deployment-controller,replicaset-controller")
        patch.setattr(kubeconfig, "ADMIN", str(made.kubeconfig))
        for name in ADDONS:
            optional.up(list(rendered(name)), name, addons.chosen(name).version, check=False)
        deadline = time.monotonic() + 60
        # The role view is put together by that controller.
        while not may(made, VIEWER, "list", "pods"):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield made


def may(server: ApiServer, user: str, verb: str, resource: str, group: str = "", **more: str) -> bool:
    """Whether an account may do that, as the API server decides."""
    resource, _, sub = resource.partition("/")
    asked = {"verb": verb, "resource": resource, "subresource": sub, "group": group, **more}
    _, _, space, _ = user.split(":")
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{space}", "system:authenticated"]
    review = {"spec": {"user": user, "groups": groups, "resourceAttributes": asked}}
    return bool(server.call("POST", REVIEWS, review)["status"]["allowed"])


@pytest.fixture
def session(server: ApiServer) -> Iterator[Session]:
    with contextlib.closing(Session([here(sys.executable, server.kubeconfig, "cp-1")])) as opened:
        yield opened


def as_user(server: ApiServer, token: str, method: str, path: str) -> int:
    """The status of a request with a token."""
    handler = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(server.folder / "ca.crt")))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), handler)
    request = urllib.request.Request(
        f"https://127.0.0.1:{server.port}{path}",
        None if method == "GET" else b"{}",
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        method=method,
    )
    try:
        with opener.open(request, timeout=30) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_a_token_may_view_for_an_hour_and_nothing_else(server: ApiServer, session: Session) -> None:
    token = Tokens(session).token(dashboard.NAMESPACE, dashboard.ACCOUNT, dashboard.TOKEN_S)
    assert 3500 < token.end - time.time() <= 3600
    assert token.text not in repr(token)
    pods = "/api/v1/namespaces/gpunodes-headlamp/pods"
    for path in ("/api/v1/pods", "/api/v1/nodes", pods, "/apis/apps/v1/deployments"):
        assert as_user(server, token.text, "GET", path) == 200
    for method, path in (
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/namespaces/kube-system/secrets"),
        ("POST", pods),
        ("DELETE", "/api/v1/nodes/x"),
        ("POST", f"{pods}/x/exec"),
        ("POST", "/api/v1/namespaces/gpunodes-headlamp/serviceaccounts/viewer/token"),
    ):
        assert as_user(server, token.text, method, path) == 403


@pytest.mark.parametrize(
    ("user", "allowed"),
    [
        (PROMETHEUS, {("list", "nodes"), ("get", "nodes/metrics")}),
        (STATE, {("list", "nodes"), ("list", "pods")}),
        (HEADLAMP, set()),
        (VIEWER, {("list", "nodes"), ("list", "pods")}),
    ],
)
def test_an_account_has_the_rights_that_it_needs(server: ApiServer, user: str, allowed: set[tuple[str, str]]) -> None:
    asked = [
        *(("list", kind) for kind in ("nodes", "pods", "secrets")),
        *((verb, kind) for verb in ("create", "update", "patch", "delete") for kind in ("pods", "nodes", "secrets")),
        *(("get", f"nodes/{sub}") for sub in ("metrics", "proxy", "log", "stats")),
        *(("create", sub) for sub in ("pods/exec", "pods/portforward", "serviceaccounts/token")),
    ]
    assert {each for each in asked if may(server, user, *each)} == allowed


def test_prometheus_sees_the_pods_of_node_exporter_only(server: ApiServer) -> None:
    assert may(server, PROMETHEUS, "list", "pods", namespace="gpunodes-node-exporter")
    for space in ("gpunodes-monitoring", "gpunodes-dcgm", "kube-system", "default"):
        assert not may(server, PROMETHEUS, "list", "pods", namespace=space)


@pytest.mark.parametrize("name", ADDONS)
def test_the_namespaces_admit_the_pods_of_the_add_on(server: ApiServer, name: str) -> None:
    for each in rendered(name):
        if each["kind"] not in {"Deployment", "DaemonSet"}:
            continue
        template, space = each["spec"]["template"], each["metadata"]["namespace"]
        pod = {**template, "metadata": {**template["metadata"], "name": "x"}}
        # The RuntimeClass comes with the device plugin.
        pod["spec"] = {key: value for key, value in template["spec"].items() if key != "runtimeClassName"}
        path = f"/api/v1/namespaces/{space}/pods?dryRun=All&fieldValidation=Strict"
        server.call("POST", path, pod)
        if space in {"gpunodes-monitoring", "gpunodes-headlamp"}:
            pod["spec"] = {**pod["spec"], "hostNetwork": True}
            with pytest.raises(HTTPError, match="403"):
                server.call("POST", path, pod)


class Headlamp(BaseHTTPRequestHandler):
    """A stand-in."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"log in")

    def log_message(self, *_: Any) -> None:
        pass


needs_sshd = pytest.mark.skipif(
    sshd.SSHD is None or os.geteuid() != 0, reason="needs sshd (package openssh-server), and root to run it"
)


@pytest.fixture
def inventory(
    server: ApiServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Inventory]:
    """One control plane: an sshd of this machine, whose API server is the real one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "state/gpunodes").mkdir(parents=True)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    transport = here(sys.executable, server.kubeconfig, "cp-1")
    monkeypatch.setattr(control_planes, "session", lambda *_: Session([transport]))
    [port] = sshd.free_ports(1)
    with sshd.serving(tmp_path_factory.mktemp("sshd"), [{("127.0.0.1", port): ""}]) as running:
        path = tmp_path / "hosts.yml"
        host = f"{{ansible_host: 127.0.0.1, ansible_port: {port}, ansible_user: root, "
        path.write_text(f"control_plane: {{hosts: {{cp-1: {host}ansible_ssh_private_key_file: {running.login}}}}}}}\n")
        yield Inventory(path)


@contextlib.contextmanager
def standing_in(address: str) -> Iterator[None]:
    page = ThreadingHTTPServer((address, 4466), Headlamp)
    threading.Thread(target=page.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        page.shutdown()
        page.server_close()


@pytest.fixture
def pods(server: ApiServer) -> str:
    """The pods of Headlamp: its own, and one that root of a worker made, which is listed first. Here is no kubelet."""
    path, deadline = "/api/v1/namespaces/gpunodes-headlamp/pods", time.monotonic() + 60
    while not (found := [each for each in server.call("GET", path)["items"] if each["metadata"]["name"] != "a"]):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    ready(server, f"{path}/{found[0]['metadata']['name']}", OWN)
    if len(server.call("GET", path)["items"]) < 2:
        owner = {"apiVersion": "v1", "kind": "Node", "name": "w1", "uid": "w1", "controller": True}
        mirror: dict[str, Any] = {"name": "a", "labels": {"app": "headlamp"}, "ownerReferences": [owner]}
        mirror["annotations"] = {"kubernetes.io/config.mirror": "x"}
        server.call("POST", path, {"metadata": mirror, "spec": found[0]["spec"] | {"nodeName": "w1"}})
    ready(server, f"{path}/a", HOSTILE)
    return path


def ready(server: ApiServer, path: str, address: str) -> None:
    """Report what a kubelet does."""
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    status |= {"conditions": [{"type": "Ready", "status": "True"}]}
    server.call("PATCH", f"{path}/status", {"status": status}, "application/merge-patch+json")


def get(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        return connection.getresponse().read()


@needs_sshd
@pytest.mark.usefixtures("pods")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_opens_the_dashboard_until_it_is_ended(
    server: ApiServer, inventory: Inventory, number: signal.Signals
) -> None:
    [local], seen = sshd.free_ports(1), []

    def show(found: dashboard.Dashboard) -> None:
        seen.append(found)
        assert get(local) == b"log in"
        assert as_user(server, found.token.text, "GET", "/api/v1/nodes") == 200
        threading.Timer(1, os.kill, (os.getpid(), number)).start()

    # In the background of a shell, these tests inherit a SIGINT that is ignored.
    interactive = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(number)
    try:
        with standing_in(OWN):
            dashboard.run(inventory, local, show)
        assert [each.url for each in seen] == [f"http://127.0.0.1:{local}"]
        assert signal.getsignal(number) == before
    finally:
        signal.signal(signal.SIGINT, interactive)
    with pytest.raises(ConnectionError):
        get(local)


@needs_sshd
@pytest.mark.usefixtures("pods")
def test_a_dashboard_that_does_not_answer_gives_no_token(inventory: Inventory) -> None:
    [local] = sshd.free_ports(1)
    with standing_in(HOSTILE), pytest.raises(GpunodesError, match=r"cp-1: .*see `gpunodes addon verify headlamp`"):
        dashboard.run(inventory, local, never)


@needs_sshd
def test_the_pod_of_another_gets_no_token(server: ApiServer, inventory: Inventory, pods: str) -> None:
    [own] = [each["metadata"]["name"] for each in server.call("GET", pods)["items"] if each["metadata"]["name"] != "a"]
    failing = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    server.call("PATCH", f"{pods}/{own}/status", failing, "application/merge-patch+json")
    with standing_in(HOSTILE), pytest.raises(GpunodesError, match="Headlamp has no pod that is ready"):
        dashboard.run(inventory, 4466, never)


@needs_sshd
def test_without_the_add_on_it_says_how_to_install_it(server: ApiServer, inventory: Inventory) -> None:
    server.call("DELETE", "/apis/apps/v1/namespaces/gpunodes-headlamp/deployments/headlamp")
    with pytest.raises(WrongInput, match=r"is not installed.* run `gpunodes addon up headlamp`"):
        dashboard.run(inventory, 4466, never)


def never(_: dashboard.Dashboard) -> None:
    raise AssertionError("nothing may be shown")
