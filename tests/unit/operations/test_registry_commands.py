"""`gpunodes registry up`, `status`, `verify` and `down`: what they refuse, make and leave. The API is a stand-in."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import bcrypt
import pytest
from gpunodes.cli import main, terminal
from gpunodes.engine import control_planes
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.cluster.registries import Registries, secret_name
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.registry.objects import RegistryServer
from gpunodes.errors import ExitCode, GpunodesError, WrongInput
from gpunodes.model import MachineResult, Outcome, RunResult
from gpunodes.operations.registry_server import commands, material, verify
from gpunodes.planner import registry, registry_image, storage

from tests.hostile import ATTACKS, CANARY, unprintable

ADDRESS = "10.96.0.15:5000"
NAMESPACE = "/api/v1/namespaces/gpunodes-registry"
SHARES = [{"name": "images", "server": "nas.example", "path": "/export", "size": "1Ti"}]
INVENTORY = """
control_plane: {hosts: {control-1: {ansible_host: 127.0.0.1}}}
workers: {hosts: {w1: {ansible_host: 127.0.0.2}}}
all: {vars: {gpunodes_storage: [{name: images, server: nas.example, path: /export, size: 1Ti}]}}
"""


class Cluster(Session):
    """An API that keeps objects by path, and applies them as they are."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.number = 0
        self.requests: list[tuple[str, str]] = []
        self.refused = ""
        self.pods: dict[str, Any] = {}
        """The status of a verifying pod, by its node."""

    def request(self, method: str, path: str, body: Any = None, *_: Any, **__: Any) -> Response:
        plain, _mark, query = path.partition("?")
        self.requests.append((method, path))
        if self.refused and method == "PATCH" and plain.endswith(self.refused):
            return Response(422, None, "provided IP is already allocated", time.time())
        if method in {"PATCH", "POST"}:
            at = plain if method == "PATCH" else f"{plain}/{body['metadata']['name']}"
            return Response(200, self._kept(at, body, dry_run="dryRun" in query), "", time.time())
        if method == "DELETE":
            gone = [each for each in self.objects if each == plain or each.startswith(f"{plain}/")]
            for each in gone:
                del self.objects[each]
            return Response(200 if gone else 404, {}, "", time.time())
        if plain in self.objects:
            return Response(200, self.objects[plain], "", time.time())
        kinds = "pods|nodes|secrets|configmaps|serviceaccounts|persistentvolumes|persistentvolumeclaims|events"
        if re.search(rf"/({kinds})$", plain):
            # Of all namespaces, or of one.
            kind = plain.rsplit("/", 1)[1]
            found = [
                value
                for at, value in self.objects.items()
                if Path(at).parent.name == kind and (plain.count("/") < 4 or at.startswith(plain))
            ]
            selector = re.search(r"labelSelector=([^&]*)", query)
            if selector:
                pairs = [each.split("=") for each in unquote(selector[1]).split(",")]
                found = [
                    each
                    for each in found
                    if all((each["metadata"].get("labels") or {}).get(key) == value for key, value in pairs)
                ]
            if name := re.search(r"fieldSelector=metadata\.name=([^&]*)", unquote(query)):
                found = [each for each in found if each["metadata"]["name"] == name[1]]
            return Response(200, {"items": found}, "", time.time())
        return Response(404, None, "not found", time.time())

    def _kept(self, at: str, body: Any, *, dry_run: bool) -> Any:
        self.number += 1
        made = json.loads(json.dumps(body))
        before = self.objects.get(at, {"metadata": {"uid": str(self.number)}})
        made["metadata"] |= {"uid": before["metadata"]["uid"], "resourceVersion": str(self.number), "generation": 1}
        made["metadata"].setdefault("name", at.rsplit("/", 1)[1])
        if "namespaces/" in at:
            made["metadata"].setdefault("namespace", at.partition("namespaces/")[2].partition("/")[0])
        if "stringData" in made:
            made["data"] = {
                key: base64.b64encode(text.encode()).decode() for key, text in made.pop("stringData").items()
            }
        if made.get("kind") == "Deployment":
            made["status"] = {"observedGeneration": 1, "readyReplicas": 1, "updatedReplicas": 1}
        if made.get("kind") == "Pod":
            made["status"] = self.pods[made["spec"]["nodeName"]](made)
        if not dry_run:
            self.objects[at] = made
        return made

    def account(self, namespace: str) -> None:
        at = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        self._kept(at, {"metadata": {}}, dry_run=False)

    def node(self, name: str, architecture: str, ready: str = "True") -> None:
        conditions = [{"type": "Ready", "status": ready}]
        body = {"metadata": {}, "status": {"nodeInfo": {"architecture": architecture}, "conditions": conditions}}
        self._kept(f"/api/v1/nodes/{name}", body, dry_run=False)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster whose share `gpunodes storage up` has made, and an inventory for it."""
    made = Cluster()

    @contextlib.contextmanager
    def connected(_: Any, kind: Any) -> Iterator[Any]:
        yield kind(made)

    monkeypatch.setattr(control_planes, "connected", connected)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "hosts.yml").write_text(INVENTORY)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for each in storage.objects(SHARES, ""):
        where = "/api/v1/persistentvolumes" if each["kind"] == "PersistentVolume" else "/api/v1/namespaces/default/x"
        made._kept(f"{where}/{each['metadata']['name']}", each, dry_run=False)
    return made


class Runs:
    """The runs of playbooks, and their outcome."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        self.outcome = Outcome.CHANGED
        self.interrupted = False
        monkeypatch.setattr(commands, "carry_out", self.carry_out)

    def carry_out(self, operation: Any, _: Any, machines: Any, __: Any, options: Any) -> RunResult:
        self.seen.append((operation.name, [each.name for each in machines], options.variables["wiring_given_registry"]))
        results = [MachineResult(each.name, self.outcome) for each in machines]
        return RunResult(operation.name, results, interrupted=self.interrupted)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def gpunodes(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["gpunodes", "registry", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def secret(cluster: Cluster) -> dict[str, str]:
    found = cluster.objects[f"{NAMESPACE}/secrets/registry"]["data"]
    return {key: base64.b64decode(text).decode() for key, text in found.items()}


def test_up_makes_all_shows_the_password_once_and_lets_the_nodes_trust(
    cluster: Cluster, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = gpunodes(capsys, "up", "--json")
    document = json.loads(out)
    own = secret(cluster)
    assert (code, document["address"], document["user"], document["password"]) == (
        0, ADDRESS, "gpunodes", own["password"]
    )  # fmt: skip
    assert [each.partition(" ")[0] for each in document["changed"]] == [
        "Namespace", "Service", "Secret", "PersistentVolume", "PersistentVolumeClaim", "ConfigMap", "Deployment"
    ]  # fmt: skip
    assert runs.seen == [("registry up", ["control-1", "w1"], {"address": ADDRESS, "ca": own["ca.crt"]})]
    published = cluster.objects[f"{NAMESPACE}/configmaps/registry"]["data"]
    assert published["ca.crt"] == own["ca.crt"]
    for private in (own["ca.key"], own["tls.key"], own["password"]):
        assert private not in json.dumps([published, *cluster.requests]) + err
    code, out, _ = gpunodes(capsys, "up", "--json")
    document = json.loads(out)
    assert (code, document["password"], document["changed"]) == (0, "", [])
    assert secret(cluster) == own


def password_in(cluster: Cluster, namespace: str) -> str:
    """The one in a namespace's login at the registry."""
    found = cluster.objects[f"/api/v1/namespaces/{namespace}/secrets/{secret_name(ADDRESS)}"]["data"]
    auths = json.loads(base64.b64decode(found[".dockerconfigjson"]))["auths"]
    return str(auths[ADDRESS]["password"])


def pod_template(cluster: Cluster) -> Any:
    return cluster.objects["/apis/apps/v1/namespaces/gpunodes-registry/deployments/registry"]["spec"]["template"]


@pytest.mark.usefixtures("runs")
def test_a_new_password_replaces_the_pod_and_the_logins_of_namespaces(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    gpunodes(capsys, "up")
    for each in ("team", "web"):
        cluster.account(each)
    code, _, err = gpunodes(capsys, "login", ADDRESS, "--namespace", "team", "--namespace", "web")
    assert (code, err) == (0, "")
    old, pod = secret(cluster), pod_template(cluster)
    assert password_in(cluster, "team") == old["password"]
    before = json.dumps(cluster.objects)
    document = json.loads(gpunodes(capsys, "up", "--new-password", "--dry-run", "--json")[1])
    assert (document["password"], document["logins"]) == ("", ["team", "web"])
    assert document["changed"] == ["Secret registry", "Deployment registry"]
    assert json.dumps(cluster.objects) == before
    code, out, _ = gpunodes(capsys, "up", "--new-password")
    new = secret(cluster)
    assert code == 0
    assert f"password: {new['password']}" in out
    assert "got the new password: team, web" in out
    assert old["password"] != new["password"]
    assert bcrypt.checkpw(new["password"].encode(), new["htpasswd"].strip().partition(":")[2].encode())
    assert {key for key in new if new[key] != old[key]} == {"password", "htpasswd"}
    assert pod_template(cluster) != pod
    assert password_in(cluster, "team") == password_in(cluster, "web") == new["password"]
    document = json.loads(gpunodes(capsys, "up", "--json")[1])
    assert (document["password"], document["changed"], document["logins"]) == ("", [], [])


@pytest.mark.parametrize("end", ["refused", "interrupted"])
def test_the_old_password_stays_until_the_nodes_are_done(
    cluster: Cluster, runs: Runs, end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The registry reads a new one within a minute, and refuses the logins of all namespaces from then on."""
    gpunodes(capsys, "up")
    before = secret(cluster)

    def refuse(*_: Any) -> None:
        raise GpunodesError("another command works on w1")

    if end == "refused":
        monkeypatch.setattr(commands, "carry_out", refuse)
    runs.interrupted = True
    code, out, _ = gpunodes(capsys, "up", "--new-password")
    assert code == (ExitCode.FAILED if end == "refused" else ExitCode.INTERRUPTED)
    assert secret(cluster) == before
    assert "password:" not in out
    assert "the registry is" not in out


@pytest.mark.usefixtures("runs")
def test_a_registry_that_is_new_gets_one_password(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    out = gpunodes(capsys, "up", "--new-password")[1]
    assert out.count("password:") == 1
    assert f"password: {secret(cluster)['password']}" in out


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("step", ["public", "deployment", "differs", "renew"])
def test_a_new_password_of_a_command_that_was_killed_is_completed(
    cluster: Cluster, step: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpunodes(capsys, "up")
    cluster.account("team")
    gpunodes(capsys, "login", ADDRESS, "--namespace", "team")
    old, pod = secret(cluster), pod_template(cluster)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(registry if step in {"public", "deployment"} else Registries, step, killed)
        assert gpunodes(capsys, "up", "--new-password")[0] != 0
    code, out, _ = gpunodes(capsys, "up", "--json")
    new = secret(cluster)
    assert (code, json.loads(out)["left"]) == (0, [])
    if step == "public":
        # Stopped before the Secret was written.
        assert new == old
        return
    assert json.loads(out)["logins"] == ["team"]
    assert old["password"] != new["password"] == password_in(cluster, "team")
    assert pod_template(cluster) != pod


@pytest.mark.usefixtures("runs")
def test_a_secret_that_a_team_made_gets_no_new_password(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """One that looks like a login; in place of one that was taken away; in place of one that it may have."""
    gpunodes(capsys, "up")
    for each in ("team", "gone", "other"):
        cluster.account(each)
    for each in ("team", "gone"):
        gpunodes(capsys, "login", ADDRESS, "--namespace", each)
    old = secret(cluster)["password"]
    gpunodes(capsys, "logout", ADDRESS, "--namespace", "gone")
    del cluster.objects[f"/api/v1/namespaces/team/secrets/{secret_name(ADDRESS)}"]
    for each in ("team", "gone", "other"):
        Registries(cluster).login(each, ADDRESS, "gpunodes", old)
    code, out, _ = gpunodes(capsys, "up", "--new-password")
    assert code == 0
    assert "these logins have another password, and no record of `registry login`: gone, other, team" in out
    assert {password_in(cluster, each) for each in ("team", "gone", "other")} == {old}
    gpunodes(capsys, "login", ADDRESS, "--namespace", "team")
    assert password_in(cluster, "team") == secret(cluster)["password"] != old
    gpunodes(capsys, "up", "--new-password")
    assert password_in(cluster, "team") == secret(cluster)["password"]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("named", [True, False])
def test_a_logout_does_not_need_the_label_of_the_secret(
    cluster: Cluster, named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users of a namespace may take it away, and bring it back after the logout."""
    gpunodes(capsys, "up")
    for each in ("team", "web"):
        cluster.account(each)
        gpunodes(capsys, "login", ADDRESS, "--namespace", each)
    name = secret_name(ADDRESS)
    stored = cluster.objects[f"/api/v1/namespaces/team/secrets/{name}"]
    labels = stored["metadata"].pop("labels")
    code, out, _ = gpunodes(capsys, "logout", ADDRESS, *(("--namespace", "team") if named else ()), "--json")
    [gone] = json.loads(out)["removed"]
    assert (code, gone["namespace"], gone["used"]) == (0, "team" if named else "web", True)
    if named:
        assert f"/api/v1/namespaces/team/secrets/{name}" not in cluster.objects
        assert not cluster.objects["/api/v1/namespaces/team/serviceaccounts/default"]["imagePullSecrets"]
    stored["metadata"]["labels"] = labels
    cluster.objects[f"/api/v1/namespaces/team/secrets/{name}"] = stored
    assert json.loads(gpunodes(capsys, "up", "--new-password", "--json")[1])["left"] == ["team"]
    assert password_in(cluster, "team") != secret(cluster)["password"]


@pytest.mark.usefixtures("runs")
def test_a_logout_deletes_no_secret_that_is_no_login(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.account("team")
    at = f"/api/v1/namespaces/team/secrets/{secret_name('ghcr.io')}"
    cluster._kept(at, {"metadata": {}, "type": "Opaque"}, dry_run=False)
    assert gpunodes(capsys, "logout", "ghcr.io", "--namespace", "team")[0] == ExitCode.WRONG_INPUT
    assert at in cluster.objects


@pytest.mark.usefixtures("runs")
def test_a_login_that_refuses_the_new_password_does_not_keep_it_from_others(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    gpunodes(capsys, "up")
    for each in ("a", "b"):
        cluster.account(each)
        gpunodes(capsys, "login", ADDRESS, "--namespace", each)
    cluster.refused = f"a/secrets/{secret_name(ADDRESS)}"
    code, _, err = gpunodes(capsys, "up", "--new-password")
    assert code == ExitCode.FAILED
    assert "could not be stored in a (" in " ".join(err.split())
    assert password_in(cluster, "b") == secret(cluster)["password"] != password_in(cluster, "a")


@pytest.mark.usefixtures("runs")
def test_a_logout_says_that_the_password_of_this_registry_stays_valid(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    gpunodes(capsys, "up")
    cluster.account("team")
    for server in ("ghcr.io", "10.0.0.1:5000"):
        Registries(cluster).login("team", server, "robot", "x")
        err = " ".join(gpunodes(capsys, "logout", server)[2].split())
        assert ("run until a container restarts" in err, "still" in err) == (True, False)
    gpunodes(capsys, "login", ADDRESS, "--namespace", "team")
    code, out, err = gpunodes(capsys, "logout", ADDRESS, "--json")
    assert (code, [each["namespace"] for each in json.loads(out)["removed"]]) == (0, ["team"])
    assert "`gpunodes registry up --new-password` ends it" in " ".join(err.split())
    assert not [each for each in cluster.objects if "/configmaps/login-" in each]


def test_a_password_is_printed_before_anything_else_can_fail(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise GpunodesError("no machine responds")

    monkeypatch.setattr(commands, "carry_out", fail)
    code, out, err = gpunodes(capsys, "up")
    assert code == ExitCode.FAILED
    assert secret(cluster)["password"] in out
    assert "no machine responds" in err


def test_a_dry_run_makes_nothing_and_lets_the_nodes_show_what_they_would_get(
    cluster: Cluster, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    before = dict(cluster.objects)
    code, out, _ = gpunodes(capsys, "up", "--json", "--dry-run")
    document = json.loads(out)
    assert (code, document["password"], len(document["changed"])) == (0, "", 7)
    assert cluster.objects == before
    assert runs.seen[0][2]["address"] == ADDRESS
    gpunodes(capsys, "up")
    before = dict(cluster.objects)
    assert json.loads(gpunodes(capsys, "up", "--json", "--dry-run")[1])["changed"] == []
    assert cluster.objects == before


def test_without_storage_nothing_is_made(cluster: Cluster, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.objects.clear()
    code, _, err = gpunodes(capsys, "up")
    assert code == ExitCode.WRONG_INPUT
    assert "run `gpunodes storage up` first" in err
    assert not cluster.objects
    assert not runs.seen


def test_a_share_of_its_own_has_no_other_volume(
    cluster: Cluster, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "pods of the namespace default may mount the share images" in " ".join(gpunodes(capsys, "up")[2].split())
    cluster.objects.clear()
    hosts = Path("inventory/hosts.yml")
    hosts.write_text(hosts.read_text().replace("size: 1Ti", "size: 1Ti, namespaces: []"))
    code, _, err = gpunodes(capsys, "up")
    assert (code, "may mount the share" in err, len(runs.seen)) == (0, False, 2)


def test_a_taken_address_is_refused_before_anything_depends_on_it(
    cluster: Cluster, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.refused = "services/registry"
    code, out, err = gpunodes(capsys, "up")
    assert code == ExitCode.WRONG_INPUT
    assert "already allocated" in err
    assert "set gpunodes_registry_address" in err
    assert f"{NAMESPACE}/secrets/registry" not in cluster.objects
    assert (out, runs.seen) == ("", [])


@pytest.mark.usefixtures("cluster", "runs")
def test_an_address_cannot_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    gpunodes(capsys, "up")
    hosts = Path("inventory/hosts.yml")
    hosts.write_text(hosts.read_text().replace("{vars: {", "{vars: {gpunodes_registry_address: 10.96.0.99, "))
    code, _, err = gpunodes(capsys, "up")
    assert code == ExitCode.WRONG_INPUT
    assert f"the registry exists at {ADDRESS}" in err


@pytest.mark.usefixtures("runs")
def test_objects_of_others_are_not_touched(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster._kept(NAMESPACE, {"kind": "Namespace", "metadata": {}}, dry_run=False)
    for words in (("up",), ("status",), ("down", "--yes")):
        code, _, err = gpunodes(capsys, *words)
        assert code == ExitCode.WRONG_INPUT
        assert "that gpunodes did not make" in err
    assert cluster.objects[NAMESPACE]["metadata"].get("labels") is None


def test_nodes_that_fail_do_not_keep_the_others_from_the_registry(
    cluster: Cluster, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.outcome = Outcome.FAILED
    assert gpunodes(capsys, "up")[0] == ExitCode.FAILED
    assert "/apis/apps/v1/namespaces/gpunodes-registry/deployments/registry" in cluster.objects


@pytest.mark.usefixtures("runs")
def test_status_shows_who_may_pull_and_reads_no_secret(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = gpunodes(capsys, "status")
    assert (code, "the cluster has no registry" in err) == (ExitCode.WRONG_INPUT, True)
    gpunodes(capsys, "up")
    cluster.account("team")
    Registries(cluster).login("team", ADDRESS, "gpunodes", "x")
    cluster.requests.clear()
    code, out, _ = gpunodes(capsys, "status", "--json")
    document = json.loads(out)
    assert (code, document["ready"], document["namespaces"]) == (0, True, ["team"])
    assert document["folder"] == "nas.example:/export/gpunodes-registry"
    assert document["certificate_end"] > time.time() + 300 * 86400
    assert not [path for method, path in cluster.requests if "secrets/" in path]
    assert "ends 20" in gpunodes(capsys, "status")[1]
    deployment = cluster.objects["/apis/apps/v1/namespaces/gpunodes-registry/deployments/registry"]
    deployment["status"] = {"observedGeneration": 1, "readyReplicas": 0}
    code, out, _ = gpunodes(capsys, "status")
    assert code == ExitCode.FAILED
    assert "it has no pod yet" in out


@pytest.mark.usefixtures("cluster", "runs")
@pytest.mark.parametrize(("left", "code"), [(29, ExitCode.DONE), (-1, ExitCode.FAILED)])
def test_status_asks_for_a_new_certificate_in_time(
    left: int, code: ExitCode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=365 - left)
    with monkeypatch.context() as patch:
        patch.setattr(material, "_now", lambda: made)
        gpunodes(capsys, "up")
    ended, out, _ = gpunodes(capsys, "status")
    assert (ended, "run `gpunodes registry up` again" in out) == (code, True)
    assert ("its certificate ended 20" in out) == (left < 0)
    gpunodes(capsys, "up")
    ended, out, _ = gpunodes(capsys, "status")
    assert (ended, "registry up" in out) == (ExitCode.DONE, False)


def test_down_removes_logins_trust_and_objects_and_says_where_the_images_are(
    cluster: Cluster, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    gpunodes(capsys, "up")
    cluster.account("team")
    Registries(cluster).login("team", ADDRESS, "gpunodes", "x")
    before = [each for each in cluster.objects if each.startswith("/api/v1/persistentvolumes/gpunodes-images.default")]
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "confirm", lambda what, *, yes: asked.append(f"{yes} {what}"))
        code, out, _ = gpunodes(capsys, "down", "--yes", "--dry-run")
    assert "run until a container restarts" in asked[0]
    assert NAMESPACE in cluster.objects
    assert code == 0
    code, out, _ = gpunodes(capsys, "down", "--yes")
    assert code == 0
    assert "the images stay in nas.example:/export/gpunodes-registry" in " ".join(out.split())
    assert runs.seen[-1] == ("registry down", ["control-1", "w1"], {"address": ADDRESS, "ca": ""})
    left = [each for each in cluster.objects if "registry" in each]
    assert left == []
    assert before
    assert all(each in cluster.objects for each in before)
    code, out, _ = gpunodes(capsys, "down", "--yes")
    assert (code, out.strip()) == (0, "the cluster has no registry")


@pytest.mark.usefixtures("cluster", "runs")
def test_down_waits_until_its_volume_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The API server keeps it until its claim is gone; `up` would apply to what is then deleted."""
    gpunodes(capsys, "up")
    name, seen = "gpunodes-images.gpunodes-registry", 4
    real = RegistryServer.volumes

    def volumes(api: RegistryServer) -> list[str]:
        nonlocal seen
        seen -= 1
        return [name] if seen > 0 else real(api)

    monkeypatch.setattr(RegistryServer, "volumes", volumes)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert gpunodes(capsys, "down", "--yes")[0] == 0
    assert seen <= 0


def test_down_keeps_the_address_while_a_node_trusts_it(
    cluster: Cluster, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    gpunodes(capsys, "up")
    runs.outcome = Outcome.UNREACHABLE
    for _ in range(2):
        code, out, _ = gpunodes(capsys, "down", "--yes")
        assert (code, "the cluster has no registry" in out) == (ExitCode.FAILED, False)
    assert f"{NAMESPACE}/configmaps/registry" in cluster.objects
    runs.outcome = Outcome.CHANGED
    code, out, _ = gpunodes(capsys, "down", "--yes")
    assert (code, "the images stay in nas.example:/export/gpunodes-registry" in " ".join(out.split())) == (0, True)
    assert runs.seen[-1][2]["address"] == ADDRESS
    assert NAMESPACE not in cluster.objects


@pytest.mark.usefixtures("runs")
def test_a_login_at_the_own_registry_needs_no_password(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    gpunodes(capsys, "up")
    cluster.account("default")
    code, out, err = gpunodes(capsys, "login", ADDRESS, "--json")
    assert (code, json.loads(out)["logins"][0]["user"]) == (0, "gpunodes"), err
    stored = next(
        value for at, value in cluster.objects.items() if at.startswith("/api/v1/namespaces/default/secrets/")
    )
    assert secret(cluster)["password"] in base64.b64decode(stored["data"][".dockerconfigjson"]).decode()
    assert gpunodes(capsys, "login", "10.96.0.77:5000")[0] == ExitCode.WRONG_INPUT


def pulled(digest: str, code: int = 0) -> Any:
    ended = {"state": {"terminated": {"exitCode": code}}, "imageID": f"{ADDRESS}/{verify.IMAGES}@{digest}"}
    return lambda _: {"phase": "Failed" if code else "Succeeded", "containerStatuses": [ended]}


WAITING = {"waiting": {"reason": "ImagePullBackOff", "message": "x509: certificate signed by unknown authority"}}


def test_each_node_must_run_exactly_what_was_pushed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, other = (f"sha256:{letter * 64}" for letter in "ab")
    nodes = {"good": "amd64", "other": "amd64", "crashed": "amd64", "stuck": "amd64", "odd": "s390x"}
    cluster.pods = {
        "good": pulled(digest),
        "other": pulled(other),
        "crashed": pulled(digest, 1),
        "stuck": lambda _: {"phase": "Pending", "containerStatuses": [{"state": WAITING}]},
    }
    monkeypatch.setattr(verify, "_POLL_S", 0.01)
    found = verify.pulled(RegistryServer(cluster), ADDRESS, nodes, {"amd64": ("n-amd64", digest)}, 0.1)
    problems = {each.node: each.problem for each in found}
    assert problems.pop("good") == ""
    assert "there is no image for its architecture, s390x" in problems["odd"]
    assert "it ran another image than the one that was pushed" in problems["other"]
    assert "ended with 1" in problems["crashed"]
    assert "ImagePullBackOff" in problems["stuck"]
    assert not [each for each in cluster.objects if "/pods/" in each]


class Images:
    """A client of the registry that keeps the digests of tags."""

    def __init__(self, *tags: str) -> None:
        self.digests = {each: f"digest of {each}" for each in tags}

    def tags(self, _: str) -> list[str]:
        return list(self.digests)

    def push_blob(self, *_: Any) -> None:
        pass

    def push_manifest(self, _: str, tag: str, __: str, content: bytes) -> None:
        self.digests[tag] = registry_image.digest(content)

    def digest_of(self, _: str, tag: str, __: str) -> str:
        return self.digests.get(tag, "")

    def delete_manifest(self, _: str, digest: str) -> None:
        self.digests = {tag: other for tag, other in self.digests.items() if other != digest}


def test_two_verifications_at_once_leave_each_other_alone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a command has left that was killed goes."""
    other, killed = (f"{time.time() - ago:.0f}-{'a' * 16}" for ago in (600, 86400))
    images = Images(f"{other}-amd64", f"{killed}-amd64")
    cluster.node("w1", "amd64")
    cluster.account(registry.NAMESPACE)
    cluster.pods["w1"] = lambda _: {"phase": "Pending"}
    for each in (other, killed):
        RegistryServer(cluster).start(registry.verifying_pod(f"verify-{each}-0", "w1", "x", "s"))
    cluster.pods["w1"] = lambda pod: pulled(images.digests[pod["spec"]["containers"][0]["image"].rpartition(":")[2]])(0)

    @contextlib.contextmanager
    def reached(*_: Any) -> Iterator[Any]:
        yield None, ADDRESS, images

    monkeypatch.setattr(verify, "reached", reached)
    monkeypatch.setattr(commands, "credentials", lambda _: material.made("10.96.0.15"))
    code, out, err = gpunodes(capsys, "verify")
    assert (code, "ran the image that was pushed" in out) == (0, True), err
    assert list(images.digests) == [f"{other}-amd64"]
    assert [at.rpartition("/")[2] for at in cluster.objects if "/pods/" in at] == [f"verify-{other}-0"]


def test_only_ready_nodes_are_asked(cluster: Cluster) -> None:
    cluster.node("a", "amd64")
    cluster.node("b", "arm64", "Unknown")
    assert RegistryServer(cluster).ready_nodes() == {"a": "amd64"}


@pytest.mark.parametrize("failed", ["a", "z"])
def test_the_pod_that_serves_is_used_not_one_that_was_evicted(cluster: Cluster, failed: str) -> None:
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    cluster.pods = {failed: lambda _: evicted, "n": lambda _: {"phase": "Pending"}}
    api, apps = RegistryServer(cluster), f"/apis/apps/v1/namespaces/{registry.NAMESPACE}"

    def owned(kind: str, name: str, found: Any) -> dict[str, Any]:
        return {"ownerReferences": [{"kind": kind, "name": name, "uid": found["metadata"]["uid"], "controller": True}]}

    deployment = cluster._kept(f"{apps}/deployments/registry", {"metadata": {"labels": registry.LABELS}}, dry_run=False)
    metadata = owned("Deployment", "registry", deployment)
    replicas = cluster._kept(f"{apps}/replicasets/registry-1", {"metadata": metadata}, dry_run=False)

    def made(node: str) -> None:
        pod = registry.verifying_pod(node, node, "x", "s")
        pod["metadata"]["labels"]["app.kubernetes.io/name"] = registry.NAME
        pod["metadata"] |= owned("ReplicaSet", "registry-1", replicas)
        api.start(pod)

    for each in sorted(cluster.pods):
        made(each)
    with pytest.raises(GpunodesError, match="no pod that is ready"):
        api.pod()
    cluster.pods["n"] = lambda _: {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    made("n")
    assert api.pod() == "n"


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_stands_in_the_cluster_is_shown_as_text(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], attack: str, runs: Runs
) -> None:
    """Its own namespace belongs to administrators, but a control plane may report anything."""
    gpunodes(capsys, "up")
    deployment = cluster.objects["/apis/apps/v1/namespaces/gpunodes-registry/deployments/registry"]
    deployment["metadata"]["annotations"][registry.SHARE_NOTE] = attack
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = attack
    conditions = [{"type": "ReplicaFailure", "status": "True", "message": attack}]
    deployment["status"] = {"observedGeneration": 1, "conditions": conditions}
    code, out, err = gpunodes(capsys, "status")
    assert (code, unprintable(out + err)) == (ExitCode.FAILED, [])
    assert CANARY not in (out + err).splitlines()
    published = cluster.objects[f"{NAMESPACE}/configmaps/registry"]["data"]
    runs.seen.clear()
    for key in ("address", "ca.crt"):
        before, published[key] = published[key], attack
        code, out, err = gpunodes(capsys, "status")
        assert code == ExitCode.FAILED
        assert unprintable(out + err) == []
        published[key] = before
    published["address"] = attack
    assert gpunodes(capsys, "verify")[0] == ExitCode.FAILED
    service = cluster.objects[f"{NAMESPACE}/services/registry"]["spec"]
    service["clusterIP"] = attack
    assert runs.seen == []
    code, out, err = gpunodes(capsys, "down", "--yes", "--dry-run")
    assert (code, runs.seen, unprintable(out + err)) == (0, [], [])
    service["clusterIP"] = "10.96.0.15"
    assert gpunodes(capsys, "down", "--yes")[0] == 0
    assert runs.seen == [("registry down", ["control-1", "w1"], {"address": ADDRESS, "ca": ""})]


def test_another_share_is_not_silent(cluster: Cluster, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """The images stay where they are."""
    gpunodes(capsys, "up")
    hosts = Path("inventory/hosts.yml")
    hosts.write_text(hosts.read_text().replace("name: images, server: nas.example", "name: new, server: nas2.example"))
    for each in storage.objects([{**SHARES[0], "name": "new", "server": "nas2.example"}], ""):
        where = "/api/v1/persistentvolumes" if each["kind"] == "PersistentVolume" else "/api/v1/namespaces/default/x"
        cluster._kept(f"{where}/{each['metadata']['name']}", each, dry_run=False)
    code, _, err = gpunodes(capsys, "up")
    assert (code, len(runs.seen)) == (0, 2)
    assert "the images so far stay in nas.example:/export/gpunodes-registry" in " ".join(err.split())
    assert "stay in" not in gpunodes(capsys, "up")[2]


def test_what_was_published_is_repaired(cluster: Cluster, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    gpunodes(capsys, "up")
    cluster.objects[f"{NAMESPACE}/configmaps/registry"]["data"] = {"address": "x"}
    assert gpunodes(capsys, "status")[0] == ExitCode.FAILED
    code, out, _ = gpunodes(capsys, "up", "--json")
    assert (code, json.loads(out)["changed"], len(runs.seen)) == (0, ["ConfigMap registry"], 2)
    assert gpunodes(capsys, "status")[0] == ExitCode.DONE


def test_a_password_that_another_command_made_meanwhile_is_not_undone(
    cluster: Cluster, runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpunodes(capsys, "up")
    cluster.account("team")
    gpunodes(capsys, "login", ADDRESS, "--namespace", "team")
    old = secret(cluster)["password"]

    def overtaken(*given: Any) -> RunResult:
        with monkeypatch.context() as patch:
            patch.setattr(commands, "carry_out", runs.carry_out)
            assert gpunodes(capsys, "up", "--new-password")[0] == 0
        return runs.carry_out(*given)

    monkeypatch.setattr(commands, "carry_out", overtaken)
    code, _, err = gpunodes(capsys, "up")
    assert (code, "another command makes the registry" in err) == (ExitCode.FAILED, True)
    assert password_in(cluster, "team") == secret(cluster)["password"] != old


def test_a_secret_of_another_command_is_noticed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    api = RegistryServer(cluster)
    from gpunodes.inventory import Inventory

    request = commands.request_of(Inventory(Path("inventory/hosts.yml")))
    apply = RegistryServer.apply

    def overtaken(self: RegistryServer, wanted: Any, *, dry_run: bool = False) -> str:
        if wanted["kind"] == "Secret":
            wanted = registry.secret(material.made(request.host).data)
        return apply(self, wanted, dry_run=dry_run)

    monkeypatch.setattr(RegistryServer, "apply", overtaken)
    with pytest.raises(GpunodesError, match="another command makes the registry"):
        commands.prepare(api, request)
    with pytest.raises(WrongInput):
        commands.existing(api)
