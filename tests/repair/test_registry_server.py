"""The registry of the cluster: its objects on a real API server, and a real registry with its configuration."""

from __future__ import annotations

import base64
import contextlib
import datetime
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes import shape
from gpunodes.ansible.module_utils.cluster import registry as published
from gpunodes.ansible.module_utils.kube_api import Client as Kube
from gpunodes.ansible.module_utils.kubeconfig import load
from gpunodes.engine.cluster import connection
from gpunodes.engine.cluster.errors import Refused
from gpunodes.engine.cluster.registries import Registries, secret_name
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.registry import client as client_of_registry
from gpunodes.engine.registry.client import Client
from gpunodes.engine.registry.objects import RegistryServer
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.lab.mirror import gobuild, pins, store
from gpunodes.operations.registry_server import commands, logins, material, verify
from gpunodes.planner import registry, registry_image, reports, storage

from tests import registry as real
from tests.programs import ending

from . import apiserver
from .apiserver import ApiServer

SETTINGS: dict[str, Any] = {
    "gpunodes_storage": [{"name": "images", "server": "nas.example", "path": "/export", "size": "1Ti"}],
    "gpunodes_registry_share": "",
    "gpunodes_registry_address": "",
    "gpunodes_registry_image": "docker.io/library/registry:3.0.0",
    # As apiserver.running has it.
    "gpunodes_service_subnet": "10.96.0.0/16",
}
REQUEST = registry.requested(SETTINGS, "")
NAMESPACE = f"/api/v1/namespaces/{registry.NAMESPACE}"
# Those that make and delete pods of a Deployment, which Pod Security admits, bind claims, and delete namespaces.
CONTROLLERS = (
    "deployment-controller,replicaset-controller,persistentvolume-binder-controller,"
    "persistentvolumeclaim-protection-controller,persistentvolume-protection-controller,namespace-controller,"
    "serviceaccount-controller,garbage-collector-controller"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made:
        apiserver.controllers(made, CONTROLLERS)
        yield made


@pytest.fixture
def api(server: ApiServer) -> Iterator[RegistryServer]:
    session = Session(connection.here(sys.executable, server.kubeconfig))
    yield RegistryServer(session, patience_s=5)
    session.close()


def until(what: str, seen: Any, limit_s: float = 90) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := seen()):
        assert time.monotonic() < deadline, what
        time.sleep(0.3)
    return found


def prepared(api: RegistryServer, *, dry_run: bool = False) -> commands.Prepared:
    return commands.prepare(api, REQUEST, dry_run=dry_run)


def test_a_dry_run_makes_nothing(api: RegistryServer) -> None:
    made = prepared(api, dry_run=True)
    assert commands.deploy(api, REQUEST, made, dry_run=True) == ["Deployment registry"]
    assert not api.has_namespace()
    assert len(made.started.changed) == 6


def test_the_api_server_accepts_all_and_pod_security_admits_the_pod(api: RegistryServer, server: ApiServer) -> None:
    made = prepared(api)
    assert len(made.started.changed) == 6
    assert made.started.password
    assert commands.deploy(api, REQUEST, made) == ["Deployment registry"]
    # The controllers make the pod, so the level restricted of its namespace admits it.
    [pod] = until("the pod is made", lambda: api.labelled_pods(registry.NAMESPACE, "app.kubernetes.io/name=registry"))
    whole = server.call("GET", f"{NAMESPACE}/pods/{pod['metadata']['name']}")
    assert whole["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    labels = server.call("GET", NAMESPACE)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert server.call("GET", f"{NAMESPACE}/services/registry")["spec"]["clusterIP"] == "10.96.0.15"
    until(
        "the claim is bound",
        lambda: server.call("GET", f"{NAMESPACE}/persistentvolumeclaims/images")["status"].get("phase") == "Bound",
    )


def test_again_changes_nothing_and_keeps_the_password(api: RegistryServer) -> None:
    before = api.secret()
    made = prepared(api)
    assert [*made.started.changed, *commands.deploy(api, REQUEST, made)] == []
    assert (made.started.password, api.secret()) == ("", before)
    assert [*prepared(api, dry_run=True).started.changed] == []


def test_control_planes_report_it_to_machines_that_join(api: RegistryServer, server: ApiServer) -> None:
    config = load(str(server.kubeconfig))
    assert config
    found = published.published(Kube(config))
    assert found == {"address": "10.96.0.15:5000", "ca": commands.credentials(api).ca}
    assert shape.wrong(found, reports._CLUSTER["registry"]) == ""


def test_status_is_read_without_the_secret(api: RegistryServer, server: ApiServer) -> None:
    server.call("POST", "/api/v1/namespaces", {"metadata": {"name": "team"}})
    until("the account is made", lambda: Registries(api.session).has_namespace("team"))
    own = commands.credentials(api)
    Registries(api.session).login("team", REQUEST.address, own.user, own.password)
    found = commands.status_of(api)
    assert (found.address, found.folder) == (REQUEST.address, "nas.example:/export/gpunodes-registry")
    assert [each.namespace for each in found.logins] == ["team"]
    assert found.problem, "nothing runs the pod here"


def test_a_new_password_gets_into_recorded_logins_only(api: RegistryServer, server: ApiServer) -> None:
    """And not into one that a user of the namespace put in its place."""
    cluster = Registries(api.session)
    old = commands.credentials(api)
    for each in ("own", "forged", "immutable"):
        server.call("POST", "/api/v1/namespaces", {"metadata": {"name": each}})
        until("the account is made", lambda name=each: cluster.has_namespace(name))
        cluster.login(each, REQUEST.address, old.user, old.password)
    logins.record(api, REQUEST.address, ["own", "forged", "immutable"])
    name = secret_name(REQUEST.address)
    server.call("DELETE", f"/api/v1/namespaces/forged/secrets/{name}")
    cluster.login("forged", REQUEST.address, old.user, old.password)
    before = api.deployment() or {}
    made = commands.prepare(api, REQUEST, new_password=True)
    new = commands.credentials(api)
    assert made.started.changed == ["Secret registry"]
    assert old.password != made.started.password == new.password
    assert commands.deploy(api, REQUEST, made) == ["Deployment registry"]
    assert (api.deployment() or {})["metadata"]["generation"] > before["metadata"]["generation"]
    # That of `team` was made without a record.
    wanted = logins.Renewed(["immutable", "own"], ["forged", "team"])
    assert logins.renew(api, REQUEST.address, new, dry_run=True) == wanted
    merge = "application/merge-patch+json"
    server.call("PATCH", f"/api/v1/namespaces/immutable/secrets/{name}", {"immutable": True}, merge)
    with pytest.raises(GpunodesError, match=r"could not be stored in immutable \("):
        logins.renew(api, REQUEST.address, new)
    differs = {each.namespace: cluster.differs(each, new.user, new.password) for each in cluster.logins()}
    assert differs == {"own": False, "forged": True, "immutable": True, "team": True}
    # One that another Secret replaced, and one that has gone, between the list and the request.
    [gone] = [each for each in cluster.logins() if each.namespace == "own"]
    for change in ("replaced", "deleted"):
        server.call("DELETE", f"/api/v1/namespaces/own/secrets/{name}")
        if change == "replaced":
            cluster.login("own", REQUEST.address, "x", "y")
        with pytest.raises(Refused):
            cluster.renew(gone, new.user, new.password)
    logins.forget(api)
    assert {api.recorded(each) for each in ("forged", "immutable")} == {""}
    for login in cluster.logins():
        if login.namespace in {"forged", "immutable"}:
            cluster.logout(login)


def test_a_verifying_pod_is_admitted(api: RegistryServer, server: ApiServer) -> None:
    own = commands.credentials(api)
    until("the account is made", lambda: Registries(api.session).has_namespace(registry.NAMESPACE))
    Registries(api.session).login(registry.NAMESPACE, REQUEST.address, own.user, own.password)
    pod = registry.verifying_pod("verify-1", "w1", f"{REQUEST.address}/x:1", secret_name(REQUEST.address))
    api.start(pod)
    assert [each["metadata"]["name"] for each in api.verifying()] == ["verify-1"]
    server.call("DELETE", f"{NAMESPACE}/pods/verify-1?gracePeriodSeconds=0")


class Kubelets:
    """Pull and run the verifying pods as the kubelets of their nodes: with the login of the pod's Secret."""

    def __init__(self, server: ApiServer, registry_port: int, ca: str) -> None:
        self.server, self.port, self.ca = server, registry_port, ca
        self.programs: dict[str, bytes] = {}
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self) -> None:
        selector = "labelSelector=app.kubernetes.io/name%3Dverify"
        while not self.stop.wait(0.2):
            for pod in self.server.call("GET", f"{NAMESPACE}/pods?{selector}")["items"]:
                if pod["status"].get("phase") == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                    self.run(pod)

    def run(self, pod: dict[str, Any]) -> None:
        image, [pull] = pod["spec"]["containers"][0]["image"], pod["spec"]["imagePullSecrets"]
        address, _, rest = image.partition("/")
        name, _, tag = rest.rpartition(":")
        secret = self.server.call("GET", f"{NAMESPACE}/secrets/{pull['name']}")
        auths = json.loads(base64.b64decode(secret["data"][".dockerconfigjson"]))["auths"]
        login = f"Basic {auths[address]['auth']}"
        manifest = got(self.port, self.ca, login, f"/v2/{name}/manifests/{tag}", registry_image.MANIFEST)
        [layer] = json.loads(manifest)["layers"]
        packed = got(self.port, self.ca, login, f"/v2/{name}/blobs/{layer['digest']}")
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            program = tar.extractfile("run")
            assert program
            self.programs[pod["spec"]["nodeName"]] = program.read()
        ended = {"state": {"terminated": {"exitCode": 0}}, "name": "verify", "image": image, "ready": False}
        ended |= {"restartCount": 0, "imageID": f"{address}/{name}@{registry_image.digest(manifest)}"}
        status = {"status": {"phase": "Succeeded", "containerStatuses": [ended]}}
        path = f"{NAMESPACE}/pods/{pod['metadata']['name']}/status"
        self.server.call("PATCH", path, status, "application/merge-patch+json")


def test_verify_from_the_push_to_the_pods_of_all_ready_nodes(
    api: RegistryServer, server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the tunnel and the kubelets is real; those do what the real ones do with an image."""
    for name, architecture, ready in (("w1", "amd64", "True"), ("w2", "arm64", "True"), ("w3", "amd64", "False")):
        node: dict[str, Any] = {"metadata": {"name": name}}
        node["status"] = {
            "nodeInfo": {"architecture": architecture},
            "conditions": [{"type": "Ready", "status": ready}],
        }
        server.call("POST", "/api/v1/nodes", node)
    [serving] = api.labelled_pods(registry.NAMESPACE, "app.kubernetes.io/name=registry")
    ready_status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    path = f"{NAMESPACE}/pods/{serving['metadata']['name']}/status"
    server.call("PATCH", path, {"status": ready_status}, "application/merge-patch+json")
    until("the Deployment is ready", lambda: not api.why_not_ready(api.deployment() or {}))
    own = commands.credentials(api)
    seen: list[Any] = []
    with real.running(tmp_path, own.data) as made:

        @contextlib.contextmanager
        def opened(*given: Any) -> Iterator[Any]:
            seen.append(given)
            yield SimpleNamespace(port=made.port)

        @contextlib.contextmanager
        def connected(_: Any, kind: Any) -> Iterator[Any]:
            yield kind(api.session)

        chosen = SimpleNamespace(machine=SimpleNamespace(name="control-1"))
        monkeypatch.setattr("gpunodes.engine.jupyter.tunnel.opened", opened)
        monkeypatch.setattr("gpunodes.engine.control_planes.connected", connected)
        monkeypatch.setattr("gpunodes.engine.control_planes.used", lambda *_: chosen)
        inventory: Any = SimpleNamespace(connection=lambda _: {})
        kubelets = Kubelets(server, made.port, own.ca)
        kubelets.thread.start()
        try:
            found = verify.run(inventory, print)
        finally:
            kubelets.stop.set()
            kubelets.thread.join()
        assert [(each.node, each.problem) for each in found] == [("w1", ""), ("w2", "")]
        assert seen[0][2:5] == (registry.NAMESPACE, serving["metadata"]["name"], registry.PORT)
        left = Client(REQUEST.address, made.port, own.ca, own.user, own.password)
        for image in ("amd64", "arm64"):
            assert kubelets.programs[{"amd64": "w1", "arm64": "w2"}[image]] == registry_image._program(image)
        assert left.digest_of(verify.IMAGES, "x", registry_image.MANIFEST) == ""
    assert api.verifying() == []
    assert [each.namespace for each in commands.status_of(api).logins] == [registry.NAMESPACE, "team"]


def test_a_certificate_that_ends_soon_replaces_secret_and_pod(
    api: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_now = material._now()
    monkeypatch.setattr(material, "_now", lambda: real_now + datetime.timedelta(days=300))
    before = api.deployment() or {}
    made = prepared(api)
    assert made.started.changed == ["Secret registry", "ConfigMap registry"]
    assert commands.deploy(api, REQUEST, made) == ["Deployment registry"]
    assert (api.deployment() or {})["metadata"]["generation"] > before["metadata"]["generation"]
    assert made.started.certificate_end > real_now.timestamp() + 600 * 86400


def test_an_address_that_a_service_has_is_refused(api: RegistryServer, server: ApiServer) -> None:
    spec = {"clusterIP": "10.96.0.40", "ports": [{"port": 80}]}
    server.call("POST", "/api/v1/namespaces/team/services", {"metadata": {"name": "other"}, "spec": spec})
    for address, message in (("10.96.0.40", "already allocated"), ("10.97.0.1", "does not match the current range")):
        # As `up` would, were there no registry yet.
        wanted = registry.service(registry.Request(f"{address}:5000", "x", "x", "x", []))
        wanted["metadata"]["name"] = "registry-2"
        with pytest.raises(WrongInput, match=message):
            # A dry run allocates nothing: only the address of another range is refused then.
            api.apply(wanted)


def test_a_volume_that_another_claim_had_is_no_obstacle(api: RegistryServer) -> None:
    from gpunodes.operations.storage.objects import Objects

    assert not storage.conflicts(REQUEST.volumes, Objects(api.session).present(REQUEST.volumes))


def test_all_is_deleted(api: RegistryServer) -> None:
    removed = commands._stopped(api, REQUEST.address, lambda *_: None)
    assert {each.partition(" ")[0] for each in removed} == {"Deployment", "Secret"}
    assert api.remove() == ["Namespace gpunodes-registry", "PersistentVolume gpunodes-images.gpunodes-registry"]
    assert not Registries(api.session).logins()
    assert not api.volumes()
    assert not api.has_namespace()


# The registry itself


@pytest.fixture(scope="module")
def own() -> material.Material:
    return material.made(REQUEST.host)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, own: material.Material) -> Iterator[real.Running]:
    with real.running(tmp_path_factory.mktemp("registry"), own.data) as made:
        yield made


@pytest.fixture
def client(started: real.Running, own: material.Material) -> Client:
    return Client(REQUEST.address, started.port, own.ca, own.user, own.password)


def test_an_image_is_pushed_and_leaves_nothing(client: Client) -> None:
    client.check()
    with verify.pushed(client, ["amd64", "arm64", "s390x"]) as made:
        assert sorted(made) == ["amd64", "arm64"]
        for tag, digest in made.values():
            assert client.digest_of(verify.IMAGES, tag, registry_image.MANIFEST) == digest
    for tag, _ in made.values():
        assert client.digest_of(verify.IMAGES, tag, registry_image.MANIFEST) == ""


def test_an_image_of_a_command_that_was_killed_is_deleted_by_a_later_one(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.tags("never/pushed") == []
    monkeypatch.setattr(verify, "_ENDED_S", -1.0)
    killed = verify.pushed(client, ["amd64"])
    killed.__enter__()
    [left] = client.tags(verify.IMAGES)
    with verify.pushed(client, ["amd64"]) as made:
        [(tag, _)] = made.values()
        assert client.tags(verify.IMAGES) == [tag]
        assert client.digest_of(verify.IMAGES, left, registry_image.MANIFEST) == ""
    assert client.tags(verify.IMAGES) == []


def test_the_registry_gives_what_was_pushed(client: Client, started: real.Running, own: material.Material) -> None:
    image = registry_image.made("amd64", "content")
    for blob in image.blobs:
        client.push_blob("team/model", registry_image.digest(blob), blob)
    client.push_manifest("team/model", "1", registry_image.MANIFEST, image.manifest)
    answer = _get(started, own, "/v2/team/model/manifests/1", registry_image.MANIFEST)
    assert answer == image.manifest
    for blob in image.blobs:
        assert _get(started, own, f"/v2/team/model/blobs/{registry_image.digest(blob)}") == blob


def _get(started: real.Running, own: material.Material, path: str, accept: str = "*/*") -> bytes:
    login = Client(REQUEST.address, started.port, own.ca, own.user, own.password)._login
    return got(started.port, own.ca, login, path, accept)


def got(port: int, ca: str, login: str, path: str, accept: str = "*/*") -> bytes:
    connection = client_of_registry._Connection(port, REQUEST.host, ca)
    connection.request("GET", path, None, {"Authorization": login, "Accept": accept})
    try:
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()
    finally:
        connection.close()


def test_nobody_else_gets_in(started: real.Running, own: material.Material) -> None:
    other = material.made(REQUEST.host)
    for given, message in (
        (Client(REQUEST.address, started.port, own.ca, own.user, other.password), "401 Unauthorized"),
        (Client(REQUEST.address, started.port, own.ca, "root", own.password), "401 Unauthorized"),
        (Client(REQUEST.address, started.port, other.ca, own.user, own.password), "certificate verify failed"),
        (Client("10.96.0.16:5000", started.port, own.ca, own.user, own.password), "IP address mismatch"),
    ):
        with pytest.raises(GpunodesError, match=message):
            given.check()


def test_an_old_password_is_refused_after_a_restart(tmp_path: Path, own: material.Material) -> None:
    new = material.wanted(own, REQUEST.host, new_password=True)
    with real.running(tmp_path, new.data) as second:
        Client(REQUEST.address, second.port, own.ca, new.user, new.password).check()
        with pytest.raises(GpunodesError, match="401 Unauthorized"):
            Client(REQUEST.address, second.port, own.ca, own.user, own.password).check()


def test_its_probe_needs_no_login_and_its_log_has_no_secret(
    started: real.Running, own: material.Material, client: Client
) -> None:
    answer = client._call("GET", "/", login=False)
    assert answer.status == 200
    client.check()
    log = started.log
    assert "authorized request" in log
    for secret in (own.password, client._login.split()[1], own.htpasswd.strip()):
        assert secret not in log
    assert "error" not in [json.loads(line)["level"] for line in log.splitlines() if line.startswith("{")]


def test_a_renewed_certificate_is_served_after_a_restart_and_images_stay(
    tmp_path: Path, own: material.Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = registry_image.made("amd64", "kept")
    with real.running(tmp_path, own.data) as first:
        before = Client(REQUEST.address, first.port, own.ca, own.user, own.password)
        for blob in image.blobs:
            before.push_blob("kept", registry_image.digest(blob), blob)
        before.push_manifest("kept", "1", registry_image.MANIFEST, image.manifest)
    now = material._now()
    monkeypatch.setattr(material, "_now", lambda: now - datetime.timedelta(days=300))
    old = material.made(REQUEST.host)
    monkeypatch.setattr(material, "_now", lambda: now)
    new = material.renewed(old, REQUEST.host)
    assert new.certificate != old.certificate
    with real.running(tmp_path, new.data) as second:
        # Nodes still have the CA of before.
        after = Client(REQUEST.address, second.port, old.ca, old.user, old.password)
        after.check()
        assert after.digest_of("kept", "1", registry_image.MANIFEST) == image.digest


# containerd, with what nodes get


@pytest.mark.skipif(os.geteuid() != 0, reason="containerd needs root")
def test_containerd_trusts_the_ca_of_a_node_s_files_and_no_other(tmp_path: Path) -> None:
    """Without a restart: it reads the files at each pull. On 127.0.0.1, since nothing here has a Service's address."""
    own, other = material.made("127.0.0.1"), material.made("127.0.0.1")
    (tmp_path / "registry").mkdir()
    with real.running(tmp_path / "registry", own.data) as made, containerd(tmp_path) as fetch:
        address = f"127.0.0.1:{made.port}"
        client = Client(address, made.port, own.ca, own.user, own.password)
        with verify.pushed(client, ["amd64"]) as images:
            [(tag, digest)] = images.values()
            image, login = f"{address}/{verify.IMAGES}:{tag}", ["-u", f"{own.user}:{own.password}"]
            write(tmp_path, address, other.ca)
            assert "certificate signed by unknown authority" in fetch(image, *login)
            write(tmp_path, address, own.ca)
            assert "no basic auth credentials" in fetch(image)
            # A CA that was replaced.
            write(tmp_path, address, other.ca + own.ca)
            assert digest in fetch(image, *login)


def write(folder: Path, address: str, ca: str) -> None:
    """The files of registry.trust below another folder than that of the machine."""
    for each in registry.trust(address, ca, {"containerd"}).files:
        target = Path(str(folder) + each.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(each.content.replace("/etc/containerd", f"{folder}/etc/containerd"))


@contextlib.contextmanager
def containerd(folder: Path) -> Iterator[Callable[..., str]]:
    """The mirror's containerd, without what starts containers: fetches an image, and returns what ctr prints."""
    known = pins.load()
    with store.locked(apiserver.cache(), print):
        go = gobuild.toolchain(apiserver.cache(), known, print)
        programs = gobuild.programs(known.components["containerd"], go, apiserver.cache(), print)
    # The path of a socket is short.
    with tempfile.TemporaryDirectory() as short, (folder / "containerd.log").open("wb") as log:
        off = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"]
        off += ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri"]
        (folder / "config.toml").write_text(
            f'version = 3\nroot = "{folder}/root"\nstate = "{folder}/state"\ndisabled_plugins = {json.dumps(off)}\n'
            f'[grpc]\naddress = "{short}/sock"\n'
        )
        argv = [str(programs / "containerd"), f"--config={folder}/config.toml"]
        ctr = [str(programs / "ctr"), "-a", f"{short}/sock"]

        def fetch(image: str, *more: str) -> str:
            options = ["--hosts-dir", f"{folder}/etc/containerd/certs.d", "--platform", "linux/amd64", *more]
            done = subprocess.run(
                [*ctr, "content", "fetch", *options, image], capture_output=True, text=True, check=False
            )
            listed = subprocess.run([*ctr, "images", "ls"], capture_output=True, text=True, check=False)
            return f"{done.stdout}{done.stderr}{listed.stdout}"

        with subprocess.Popen(ending(argv), stdout=log, stderr=log) as run:
            try:
                until("containerd responds", lambda: fetch("x").count("REF"))
                yield fetch
            finally:
                run.terminate()
