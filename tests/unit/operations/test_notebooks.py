"""`gpunodes jupyter`: what it prints, what it refuses, and a hostile cluster. tests/repair has a real API server."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gpunodes.cli import root
from gpunodes.engine.cluster.errors import Refused
from gpunodes.engine.jupyter.objects import Notebooks
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.operations import notebooks
from gpunodes.planner.notebooks import PATHS, Place, Request, objects, requested

from tests.hostile import ATTACKS, hostile, unprintable

TOKEN = "t" * 43
HERE = "http://127.0.0.1:8899"


class Cluster(Notebooks):
    """Objects by path. A new Deployment is ready at once; its pods are ``pods``."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {"/api/v1/namespaces/default": {"metadata": {"name": "default"}}}
        self.pods_of: list[Any] = []
        self.events: list[Any] = []
        self.claimed = ["training"]
        self.ready = True

    def _call(self, method: str, path: str, body: Any = None, *_: Any, **__: Any) -> Any:
        class Answer:
            body: Any = None
            time = 0.0

        answer, (plain, _mark, query) = Answer(), path.partition("?")
        lists = {"persistentvolumeclaims": [{"metadata": {"name": each}} for each in self.claimed]}
        lists |= {"pods": self.pods_of, "events": self.events}
        if method == "GET" and (kind := plain.rpartition("/")[2]) in lists:
            answer.body = {"items": lists[kind]}
        elif plain == "/apis/apps/v1/deployments":
            answer.body = {"items": [each for each in self.objects.values() if each.get("kind") == "Deployment"]}
        elif method == "POST":
            made = {**body, "metadata": {**body["metadata"], "uid": "1", "generation": 1}}
            if body["kind"] == "Deployment":
                made["status"] = {
                    "observedGeneration": 1,
                    **dict.fromkeys(("readyReplicas", "updatedReplicas"), int(self.ready)),
                }
            if "dryRun" not in query:
                self.objects[f"{plain}/{body['metadata']['name']}"] = made
            answer.body = made
        elif plain not in self.objects:
            if plain != "/apis/apps/v1/namespaces/default/replicasets/replicas":
                raise Refused(404, "not found")
            owner = {"kind": "Deployment", "name": "jupyter-notebook", "uid": "1", "controller": True}
            answer.body = {"metadata": {"uid": "2", "ownerReferences": [owner]}}
        elif method == "DELETE":
            del self.objects[plain]
        else:
            answer.body = self.objects[plain]
        return answer


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory/hosts.yml").write_text("control_plane: {hosts: {control-1: {}}}\n")
    made = Cluster()
    monkeypatch.setattr(notebooks, "connected", lambda _: contextlib.nullcontext(made))
    monkeypatch.setattr("secrets.token_urlsafe", lambda _: TOKEN)
    monkeypatch.setattr(notebooks, "_POLL_S", 0.05)
    return made


def run(*words: str) -> Result:
    return CliRunner().invoke(root, ["jupyter", *words], standalone_mode=False)


def pod(**status: Any) -> dict[str, Any]:
    owner = {"kind": "ReplicaSet", "name": "replicas", "uid": "2", "controller": True}
    metadata = {"name": "jupyter-notebook-1", "ownerReferences": [owner]}
    return {"metadata": metadata, "spec": {"nodeName": "gpu-1"}, "status": status}


def refused(name: str = "refused", reason: str = "UnexpectedAdmissionError") -> dict[str, Any]:
    """A pod that its kubelet did not start, or evicted: it stays beside the one that replaced it."""
    message = "Allocate failed due to no healthy devices present"
    return {**pod(phase="Failed", reason=reason, message=message), "metadata": {"name": name}}


def files_with(text: str, folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file() and text in each.read_text(errors="replace")]


def test_the_token_is_printed_once(cluster: Cluster, tmp_path: Path) -> None:
    done = run("up")
    assert done.exception is None
    assert done.stdout.count(TOKEN) == 1
    assert TOKEN not in done.stderr
    assert "made NetworkPolicy, Secret, Deployment jupyter-notebook in the namespace default" in done.stdout
    assert "ready: gpunodes jupyter open\n" in done.stdout
    before = json.dumps(cluster.objects)
    for words in ((), ("--json",), ("--gpus", "1")):
        again = run("up", *words)
        assert again.exception is None
        assert TOKEN not in again.output
        assert json.dumps(cluster.objects) == before
    assert "exists; nothing was changed" in run("up").stdout
    assert TOKEN not in run("list").output + run("list", "--json").output + run("down", "--yes").output
    assert files_with(TOKEN, tmp_path) == []


def test_documents(cluster: Cluster) -> None:
    made = json.loads(run("up", "alice", "--json", "--node-port", "--gpus", "0").stdout)
    assert made["schema"] == "gpunodes.notebook/1"
    assert (made["token"], made["made"], made["ready"]) == (TOKEN, list(PATHS), True)
    assert made["request"]["storage"] == "training"
    (row,) = json.loads(run("list", "--json").stdout)["notebooks"]
    assert row == {"name": "alice", "namespace": "default", "ready": True, "request": made["request"]}
    assert json.loads(run("down", "alice", "--yes", "--json").stdout)["removed"] == list(PATHS)
    assert list(cluster.objects) == ["/api/v1/namespaces/default"]


def test_a_dry_run_has_no_token(cluster: Cluster) -> None:
    done = run("up", "--dry-run")
    assert "would make NetworkPolicy, Secret, Deployment" in done.stdout
    assert "token" not in done.stdout
    assert len(cluster.objects) == 1


def test_a_notebook_that_is_not_ready_keeps_its_printed_token(cluster: Cluster) -> None:
    cluster.ready = False
    reason = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    cluster.pods_of = [pod(conditions=[{"type": "PodScheduled", "status": "False", "message": reason}])]
    done = run("up", "--timeout", "1")
    assert TOKEN in done.stdout
    assert isinstance(done.exception, GpunodesError)
    assert reason in done.exception.problem.found
    assert "free GPUs" in done.exception.problem.remedy


READY = [{"type": "Ready", "status": "True"}]


@pytest.mark.parametrize("place", [0, 1])
def test_the_pod_that_serves_is_used_not_one_that_failed(cluster: Cluster, place: int) -> None:
    """The API lists them by their random names."""
    run("up")
    ending = {**pod(phase="Running", conditions=READY), "metadata": {"name": "old", "deletionTimestamp": "2026"}}
    cluster.pods_of = [refused(), refused("evicted", "Evicted"), ending]
    assert cluster.pod(Place("notebook")) == ""
    cluster.pods_of.insert(place * 2, pod(phase="Running", conditions=READY))
    assert cluster.pod(Place("notebook")) == "jupyter-notebook-1"


@pytest.mark.parametrize("first", [True, False])
def test_the_reason_is_that_of_the_pod_that_starts(cluster: Cluster, first: bool) -> None:
    cluster.ready = False
    deployment: dict[str, Any] = {"metadata": {}, "status": {}}
    reason = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    waits = pod(phase="Pending", conditions=[{"type": "PodScheduled", "status": "False", "message": reason}])
    cluster.pods_of = [waits, refused()] if first else [refused(), waits]
    assert cluster.reason(Place("notebook"), deployment) == f"pod jupyter-notebook-1: {reason}"
    cluster.pods_of = [refused()]
    assert "pod refused: UnexpectedAdmissionError: Allocate failed due to" in cluster.reason(
        Place("notebook"), deployment
    )


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_reasons_of_the_cluster_are_one_line(cluster: Cluster, attack: str) -> None:
    cluster.ready = False
    statuses: list[dict[str, Any]] = [
        {"conditions": [{"type": "PodScheduled", "status": "False", "message": attack}]},
        {"containerStatuses": [{"state": {"waiting": {"reason": attack, "message": attack}}}]},
        {"containerStatuses": [{"state": {"terminated": {"exitCode": 1, "reason": attack, "message": attack}}}]},
        {"phase": "Pending"},
        {"phase": "Failed", "reason": attack, "message": attack},
    ]
    cluster.events = [{"metadata": {"name": "x"}, "reason": attack, "message": attack, "lastTimestamp": attack}]
    place = Place("notebook")
    notebooks.up(cluster, place, {}, "x", print)
    for status in statuses:
        cluster.pods_of = [pod(**status)]
        with pytest.raises(GpunodesError) as caught:
            notebooks.wait(cluster, place, 0, print)
        assert "\n" not in caught.value.problem.found
        assert not unprintable(caught.value.problem.found)


def test_a_cluster_of_which_every_string_is_hostile(cluster: Cluster) -> None:
    run("up")
    genuine = dict(cluster.objects)
    cluster.pods_of = [hostile(pod(phase="Pending", conditions=[{"type": "a", "status": "b"}]))]
    cluster.ready = False
    for path, each in genuine.items():
        if each.get("kind") == "Deployment":
            cluster.objects[path] = {**each, "status": {"conditions": hostile([{"type": "a", "status": "b"}])}}
    # Its pod is nobody's: one whose status is invalid is left out.
    done = run("up", "--timeout", "1")
    assert isinstance(done.exception, GpunodesError)
    assert "it has no pod yet" in str(done.exception)
    for path, each in genuine.items():
        cluster.objects[path] = hostile(each)
    for words in (("up",), ("down", "--yes"), ("open", "--no-browser")):
        done = run(*words)
        assert isinstance(done.exception, WrongInput)
        assert "that gpunodes did not make" in str(done.exception)
    assert cluster.objects.keys() == genuine.keys()
    assert run("list").exception is None


@pytest.mark.parametrize("note", ["", "[]", "{}", "[" * 100_000, '{"gpus": 1}', "null", '{"image": 1}'])
def test_annotations_that_are_no_request(note: str) -> None:
    notes = {"gpunodes.dev/notebook-request": note}
    assert requested({"metadata": {"annotations": notes}}) is None


@pytest.mark.parametrize("field", ["image", "storage", "pool"])
@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_an_annotation_with_an_attack_is_no_request(field: str, attack: str) -> None:
    made = objects(Place("x"), Request("x"), TOKEN)[-1]
    document = json.loads(made["metadata"]["annotations"]["gpunodes.dev/notebook-request"])
    assert requested(made) == Request("x")
    notes = {"gpunodes.dev/notebook-request": json.dumps(document | {field: attack})}
    assert requested({"metadata": {"annotations": notes}}) is None


@pytest.mark.parametrize(
    "words",
    [
        ("up", "../x"),
        ("up", "A"),
        ("up", "x" * 41),
        ("up", "-x-"),
        ("up", "x\n"),
        ("up", "--namespace", "a/b"),
        ("up", "--image", "a b"),
        ("up", "--image", "$(reboot)"),
        ("up", "--storage", "a/../b"),
        ("up", "--pool", "a,b"),
        ("up", "--storage", "x", "--scratch"),
        ("open", "../x"),
        ("verify", "x", "--namespace", "A"),
        ("down", "a/b", "--yes"),
        ("down",),
    ],
)
def test_what_is_refused_before_the_cluster_is_contacted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    monkeypatch.setattr(notebooks, "connected", None)
    done = run(*words) if words[1:2] != ("-x-",) else run("up", "--", "-x-")
    assert isinstance(done.exception, WrongInput)
    assert not unprintable(str(done.exception))
    assert len(cluster.objects) == 1


def test_a_notebook_without_shared_storage_is_requested_by_name(cluster: Cluster) -> None:
    cluster.claimed = []
    assert "use --scratch" in str(run("up").exception)
    done = run("up", "--scratch")
    assert "warning: without shared storage" in done.stderr
    assert "its files end with it" in run("down", "--yes").stdout


def test_namespaces_of_a_share_have_homes_of_their_own() -> None:
    """All have the same folder: notebooks of one name had one home, which both wrote."""
    homes = set()
    for place in (Place("notebook"), Place("notebook", "ml"), Place("notebook-a", "b"), Place("notebook", "a-b")):
        [container] = objects(place, Request("x", storage="s"), TOKEN)[-1]["spec"]["template"]["spec"]["containers"]
        homes |= {each["subPath"] for each in container["volumeMounts"] if "subPath" in each}
    assert homes == {"jupyter-notebook.default", "jupyter-notebook.ml", "jupyter-notebook-a.b", "jupyter-notebook.a-b"}


def test_down_names_the_home_that_a_notebook_has(cluster: Cluster) -> None:
    run("up")
    assert "the folder jupyter-notebook.default of the claim training" in run("down", "--yes").stdout
    run("up")
    path = Place("notebook").path("Deployment")
    text = json.dumps(cluster.objects[path]).replace("jupyter-notebook.default", "jupyter-notebook")
    cluster.objects[path] = json.loads(text)
    assert "the folder jupyter-notebook of the claim training" in run("down", "--yes").stdout


class Opened:
    """A tunnel that the user ends with Ctrl-C."""

    url = HERE
    port = 8888

    def __init__(self) -> None:
        self.pages: list[tuple[str, int, str]] = []

    def follow(self) -> None:
        raise KeyboardInterrupt

    def show(self, uri: str) -> bool:
        path = Path(uri.removeprefix("file://"))
        self.pages.append((uri, path.stat().st_mode & 0o777, path.read_text()))
        return True


@pytest.fixture
def opened(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Opened:  # noqa: ARG001 - it makes the inventory
    made = Opened()

    @contextlib.contextmanager
    def reached(*_: Any) -> Iterator[Any]:
        yield made, TOKEN, Request("x")

    monkeypatch.setattr(notebooks, "reached", reached)
    monkeypatch.setattr("webbrowser.open", made.show)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    return made


def test_the_browser_gets_a_file_that_only_the_user_reads(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The token is in no argument, and the file is gone afterwards."""
    monkeypatch.setenv("DISPLAY", ":0")
    left = tmp_path / "state/gpunodes/notebook-0.html"
    left.parent.mkdir(parents=True)
    left.write_text(TOKEN)
    done = run("open")
    assert done.exception is None
    ((uri, mode, text),) = opened.pages
    assert TOKEN not in uri + done.output
    assert mode == 0o600
    assert set(re.findall(r'url=([^"]+)"|href="([^"]+)"', text)) == {
        (f"{HERE}/lab?token={TOKEN}", ""),
        ("", f"{HERE}/lab?token={TOKEN}"),
    }
    assert files_with(TOKEN, tmp_path) == []
    assert f"{HERE}/lab until Ctrl-C\n" in done.stdout


def test_the_page_of_another_command_that_runs_stays(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its browser may not have read it yet."""
    monkeypatch.setenv("DISPLAY", ":0")

    def follow() -> None:
        monkeypatch.setattr(opened, "follow", lambda: None)
        first = Path(opened.pages[0][0].removeprefix("file://"))
        assert run("open").exception is None
        assert (first.exists(), len(opened.pages)) == (True, 2)

    monkeypatch.setattr(opened, "follow", follow)
    assert run("open").exception is None
    assert len(opened.pages) == 2


@pytest.mark.parametrize("words", [(), ("--no-browser",)])
def test_a_program_reads_one_line_without_the_token(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    done = run("open", "--json", *words)
    assert done.exception is None
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert (found["schema"], found["url"], found["port"]) == ("gpunodes.tunnel/1", f"{HERE}/lab", 8888)
    assert (found["name"], found["browser"], TOKEN in done.output) == ("notebook", not words, False)
    assert len(opened.pages) == (not words)


@pytest.mark.parametrize(("words", "display"), [((), ""), (("--no-browser",), ":0")])
def test_without_a_browser_the_token_is_not_shown(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, words: Sequence[str], display: str
) -> None:
    monkeypatch.setenv("DISPLAY", display)
    done = run("open", *words)
    assert done.exception is None
    assert opened.pages == []
    assert TOKEN not in done.output
    assert "log in with the token that `jupyter up` printed" in done.stdout


@pytest.mark.parametrize(
    "text", ["", "short", "x" * 200, '"><script>' + "x" * 40, "x" * 40 + "\n", f"{'x' * 40}&next=//evil.example"]
)
def test_a_token_of_another_form_is_never_used(cluster: Cluster, text: str) -> None:
    """The URL that a browser opens has only our own values: this form cannot change it."""
    run("up")
    path = Place("notebook").path("Secret")
    cluster.objects[path]["data"]["token"] = base64.b64encode(text.encode()).decode()
    with pytest.raises(GpunodesError, match="has no token of gpunodes"):
        cluster.token(Place("notebook"))


def test_the_pod_is_restricted() -> None:
    spec = objects(Place("x"), Request("x", gpus=2, storage="s"), TOKEN)[-1]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert "--ip=127.0.0.1" in container["args"], "nothing in the cluster's network reaches it"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys() & container["resources"]["limits"].keys()
    assert "gpunodes.dev/sharing" in json.dumps(spec["affinity"]), "several GPUs are whole ones"
    assert "affinity" not in objects(Place("x"), Request("x"), TOKEN)[-1]["spec"]["template"]["spec"]
    home = next(each for each in container["volumeMounts"] if each["name"] == "home")
    assert home["subPath"] == "jupyter-x.default"
    assert TOKEN not in json.dumps(spec)
