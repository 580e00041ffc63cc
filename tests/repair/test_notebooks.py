"""Notebooks on a real API server, with the controllers that make their pods; scheduler and kubelets are the test."""

from __future__ import annotations

import base64
import json
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gpunodes.engine.cluster import connection
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.jupyter.objects import Notebooks
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.operations import notebooks
from gpunodes.planner import storage
from gpunodes.planner.notebooks import PATHS, Place, Request, objects

from tests.hostile import ATTACKS, unprintable

from . import apiserver
from .apiserver import ApiServer

IMAGE = "registry.example/notebook:1"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
NOT_FOUND = 404
MERGE = "application/merge-patch+json"
CONTROLLERS = "deployment-controller,replicaset-controller,garbage-collector-controller,resourcequota-controller"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made:
        apiserver.controllers(made, CONTROLLERS)
        for name in ("team", "quota", "foreign", "two"):
            made.call("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": RESTRICTED}})
        claim(made, "team", "training")
        for each in ("one", "other"):
            claim(made, "two", each)
        hard = {"requests.nvidia.com/gpu": "1", "limits.memory": "64Gi", "limits.cpu": "64", "pods": "5"}
        quota = {"metadata": {"name": "gpus"}, "spec": {"hard": hard}}
        made.call("POST", "/api/v1/namespaces/quota/resourcequotas", quota)
        yield made


@pytest.fixture
def cluster(server: ApiServer) -> Iterator[Notebooks]:
    session = Session(connection.here(sys.executable, server.kubeconfig))
    yield Notebooks(session)
    session.close()


def claim(server: ApiServer, namespace: str, name: str) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""}
    body = {"metadata": {"name": name, "labels": storage.LABELS}, "spec": spec}
    server.call("POST", f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", body)


def start(cluster: Notebooks, place: Place, lines: list[str] | None = None, **given: Any) -> notebooks.Started:
    scratch, dry = given.pop("scratch", False), given.pop("dry_run", False)
    said: list[str] = [] if lines is None else lines
    return notebooks.up(cluster, place, given, IMAGE, said.append, scratch=scratch, dry_run=dry)


def present(server: ApiServer, place: Place) -> dict[str, Any]:
    found = {}
    for kind in PATHS:
        try:
            found[kind] = server.call("GET", place.path(kind))
        except urllib.error.HTTPError as error:
            if error.code != NOT_FOUND:
                raise
    return found


def pods(server: ApiServer, place: Place) -> list[Any]:
    path = f"/api/v1/namespaces/{place.namespace}/pods?labelSelector=gpunodes.dev/notebook%3D{place.name}"
    items: list[Any] = server.call("GET", path)["items"]
    return items


def until(seen: Callable[[], Any], limit_s: float = 60) -> Any:
    began = time.monotonic()
    while not (found := seen()):
        assert time.monotonic() - began < limit_s
        time.sleep(0.2)
    return found


def report(server: ApiServer, place: Place, status: dict[str, Any], node: str = "") -> str:
    """Report the status of the notebook's pod, as scheduler and kubelet do."""
    (pod,) = until(lambda: pods(server, place))
    path = f"/api/v1/namespaces/{place.namespace}/pods/{pod['metadata']['name']}"
    if node:
        body = {"metadata": {"name": pod["metadata"]["name"]}, "target": {"kind": "Node", "name": node}}
        server.call("POST", f"{path}/binding", {"apiVersion": "v1", "kind": "Binding", **body})
    server.call("PATCH", f"{path}/status", {"status": status}, MERGE)
    return path


def ready(server: ApiServer, place: Place) -> None:
    conditions = [{"type": each, "status": "True"} for each in ("PodScheduled", "Ready", "ContainersReady")]
    report(server, place, {"phase": "Running", "conditions": conditions})


def test_a_notebook_from_its_start_to_its_end(server: ApiServer, cluster: Notebooks) -> None:
    """In a namespace with Pod Security "restricted": its controllers make the pod, so it conforms."""
    place, lines = Place("alice", "team"), list[str]()
    started = start(cluster, place, lines)
    assert started.made == ["NetworkPolicy", "Secret", "Deployment"]
    assert lines == [], "shared storage was found, so nothing is lost"
    assert started.request == Request(IMAGE, storage="training")
    before = present(server, place)
    assert base64.b64decode(before["Secret"]["data"]["token"]).decode() == started.token
    assert len(started.token) >= 43
    others = json.dumps([each for kind, each in before.items() if kind != "Secret"])
    assert started.token not in others
    assert before["Secret"]["data"]["token"] not in others
    (pod,) = until(lambda: pods(server, place))
    assert started.token not in json.dumps(pod)
    assert pod["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == "1"
    assert "kube-api-access" not in json.dumps(pod["spec"]["volumes"])
    ready(server, place)
    notebooks.wait(cluster, place, 60, lines.append)
    settled = {kind: each["metadata"]["resourceVersion"] for kind, each in present(server, place).items()}
    same: list[dict[str, Any]] = [{}, {"gpus": 1, "storage": "training", "image": IMAGE}]
    for given in same:
        again = start(cluster, place, **given)
        assert (again.made, again.token) == ([], "")
    assert {kind: each["metadata"]["resourceVersion"] for kind, each in present(server, place).items()} == settled
    assert cluster.token(place) == started.token
    with pytest.raises(WrongInput, match=r"team/alice exists with gpus 1, not 2; storage training, not none"):
        start(cluster, place, gpus=2, scratch=True)
    (seen,) = (each for each in notebooks.listed(cluster) if each.place == place)
    assert seen.is_ready
    assert seen.request == started.request
    asked: list[str] = []
    removed, request, _ = notebooks.down(cluster, place, asked.append)
    assert removed == list(before)
    home = "the folder jupyter-alice.team of the claim training"
    assert asked == [f"the notebook team/alice ends with its kernels; its home stays: {home}"]
    assert request == started.request
    assert present(server, place) == {}
    assert pods(server, place) == []
    claims = server.call("GET", "/api/v1/namespaces/team/persistentvolumeclaims")["items"]
    assert [each["metadata"]["name"] for each in claims] == ["training"]
    assert notebooks.down(cluster, place, asked.append)[:2] == ([], None)
    assert len(asked) == 1, "nothing to ask about"


def test_no_free_gpu(server: ApiServer, cluster: Notebooks) -> None:
    place, lines = Place("waits", "team"), list[str]()
    start(cluster, place, gpus=2)
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu." + "".join(ATTACKS)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    report(server, place, {"phase": "Pending", "conditions": [condition]})
    with pytest.raises(GpunodesError) as caught:
        notebooks.wait(cluster, place, 3, lines.append)
    text = str(caught.value)
    assert "the notebook team/waits is not ready after 3 s: pod jupyter-waits-" in text
    assert "0/3 nodes are available: 3 Insufficient nvidia.com/gpu." in text
    assert not unprintable(caught.value.problem.found)
    assert len(text) < 900
    assert len(lines) == 1, "a reason is reported once"
    ready(server, place)
    notebooks.wait(cluster, place, 30, lines.append)
    notebooks.down(cluster, place, lines.append)


def test_a_kubelet_that_cannot_mount_the_home(server: ApiServer, cluster: Notebooks) -> None:
    place = Place("mount", "team")
    start(cluster, place)
    path = report(server, place, {"phase": "Pending"}, node="gpu-1")
    pod = path.rpartition("/")[2]
    event = {
        "metadata": {"name": "one", "namespace": "team"},
        "involvedObject": {"kind": "Pod", "namespace": "team", "name": pod},
        "type": "Warning",
        "reason": "FailedMount",
        "message": "mount.nfs: Connection refused\x1b[2J",
        "lastTimestamp": "2026-11-26T00:00:00Z",
    }
    server.call("POST", "/api/v1/namespaces/team/events", event)
    with pytest.raises(GpunodesError, match=r"after 1 s: FailedMount: mount.nfs: Connection refused") as caught:
        notebooks.wait(cluster, place, 1, lambda _: None)
    assert not unprintable(caught.value.problem.found)
    # No kubelet ends the pod.
    server.call("DELETE", f"{path}?gracePeriodSeconds=0")
    notebooks.down(cluster, place, lambda _: None)


def test_a_quota_is_the_reason(server: ApiServer, cluster: Notebooks) -> None:
    place, lines = Place("much", "quota"), list[str]()
    start(cluster, place, lines, gpus=2, scratch=True)
    assert lines == ["warning: without shared storage the files of this notebook end with its pod"]
    with pytest.raises(GpunodesError, match=r"exceeded quota: gpus, requested: requests.nvidia.com/gpu=2"):
        notebooks.wait(cluster, place, 20, lines.append)
    notebooks.down(cluster, place, lines.append)
    assert lines[-1].endswith("its files end with it: it has no shared storage")
    start(cluster, Place("fits", "quota"), gpus=1, scratch=True)
    until(lambda: pods(server, Place("fits", "quota")))


def test_a_quota_that_refuses_one_object_refuses_all(server: ApiServer, cluster: Notebooks) -> None:
    quota = {"metadata": {"name": "ports"}, "spec": {"hard": {"services.nodeports": "0"}}}
    server.call("POST", "/api/v1/namespaces/quota/resourcequotas", quota)
    path = "/api/v1/namespaces/quota/resourcequotas/ports"
    until(lambda: server.call("GET", path).get("status", {}).get("hard"))
    place = Place("port", "quota")
    with pytest.raises(GpunodesError, match="exceeded quota: ports"):
        start(cluster, place, node_port=True, scratch=True)
    assert present(server, place) == {}


def test_no_gpu_is_possible(server: ApiServer, cluster: Notebooks) -> None:
    place = Place("none", "team")
    start(cluster, place, gpus=0)
    (pod,) = until(lambda: pods(server, place))
    assert "nvidia" not in json.dumps(pod["spec"])
    notebooks.down(cluster, place, lambda _: None)


def test_a_node_port(server: ApiServer, cluster: Notebooks) -> None:
    place, lines = Place("guide", "team"), list[str]()
    started = start(cluster, place, lines, node_port=True, pool="t4")
    assert started.made == ["NetworkPolicy", "Secret", "Service", "Deployment"]
    assert 30000 <= (started.node_port or 0) <= 32767
    assert "without encryption to everyone who reaches a node" in lines[0]
    found = present(server, place)
    assert found["NetworkPolicy"]["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8888}]}]
    assert found["Deployment"]["spec"]["template"]["spec"]["nodeSelector"] == {"gpunodes.dev/pool": "t4"}
    with pytest.raises(WrongInput, match="exists with pool t4, not h100"):
        start(cluster, place, pool="h100")
    assert start(cluster, place).node_port == started.node_port
    notebooks.down(cluster, place, lines.append)
    assert present(server, place) == {}


@pytest.mark.parametrize("kind", PATHS)
def test_objects_of_others_are_never_touched(server: ApiServer, cluster: Notebooks, kind: str) -> None:
    """Neither one without our labels, nor one of another part of gpunodes, nor that of another notebook."""
    place = Place(f"theirs-{kind.lower()}", "foreign")
    (body,) = (each for each in objects(place, Request(IMAGE, node_port=True), "x" * 43) if each["kind"] == kind)
    for labels in (
        {},
        {"app.kubernetes.io/managed-by": "gpunodes"},
        body["metadata"]["labels"] | {"gpunodes.dev/notebook": "x"},
    ):
        made = server.call(
            "POST", PATHS[kind].format("foreign"), body | {"metadata": body["metadata"] | {"labels": labels}}
        )
        for call in (lambda: start(cluster, place, scratch=True), lambda: notebooks.down(cluster, place, print)):
            with pytest.raises(WrongInput, match=f"has a {kind} {place.objects} that gpunodes did not make"):
                call()
        assert list(present(server, place)) == [kind], "nothing was made"
        assert server.call("GET", place.path(kind))["metadata"]["uid"] == made["metadata"]["uid"]
        assert place not in [each.place for each in notebooks.listed(cluster)]
        server.call("DELETE", place.path(kind))
        until(lambda: not present(server, place))


def test_a_dry_run_makes_nothing(server: ApiServer, cluster: Notebooks) -> None:
    place = Place("dry", "team")
    would = start(cluster, place, dry_run=True)
    assert would.made == ["NetworkPolicy", "Secret", "Deployment"]
    assert would.token == ""
    assert present(server, place) == {}


def test_what_an_interrupted_command_left_is_made_again(server: ApiServer, cluster: Notebooks) -> None:
    """Its token may have been read by nobody."""
    place = Place("half", "team")
    for each in objects(place, Request(IMAGE, node_port=True), "x" * 43)[:3]:
        cluster.make(place, each)
    started = start(cluster, place)
    assert started.token not in ("", "x" * 43)
    assert cluster.token(place) == started.token
    assert list(present(server, place)) == ["NetworkPolicy", "Secret", "Deployment"], "the node port was not requested"
    assert present(server, place)["NetworkPolicy"]["spec"].get("ingress", []) == []
    notebooks.down(cluster, place, lambda _: None)


def test_a_notebook_without_its_secret_gets_no_new_token(server: ApiServer, cluster: Notebooks) -> None:
    """Its server would not know it."""
    place = Place("lost", "team")
    start(cluster, place)
    server.call("DELETE", place.path("Secret"))
    with pytest.raises(GpunodesError, match=r"has no token of gpunodes.*`gpunodes jupyter down lost --namespace team`"):
        start(cluster, place)
    assert "Secret" not in present(server, place)
    notebooks.down(cluster, place, lambda _: None)


def test_a_repeated_request_is_no_conflict(cluster: Notebooks) -> None:
    place = Place("again", "team")
    secret = objects(place, Request(IMAGE), "x" * 43)[1]
    for _ in range(2):
        cluster.make(place, secret)
    with pytest.raises(GpunodesError, match="already exists"):
        cluster.make(place, objects(place, Request(IMAGE), "y" * 43)[1])
    notebooks.down(cluster, place, lambda _: None)


@pytest.mark.parametrize(
    ("namespace", "given", "message"),
    [
        ("nowhere", {}, "the cluster has no namespace nowhere"),
        ("foreign", {}, "the namespace foreign has no claim of shared storage"),
        ("two", {}, "the namespace two has the claims one, other"),
        ("team", {"storage": "missing"}, "the namespace team has no claim missing"),
    ],
)
def test_what_is_refused_changes_nothing(
    server: ApiServer, cluster: Notebooks, namespace: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(WrongInput, match=message):
        start(cluster, Place("bob", namespace), **given)
    assert namespace == "nowhere" or present(server, Place("bob", namespace)) == {}


def test_what_others_wrote_into_our_objects_is_data(server: ApiServer, cluster: Notebooks) -> None:
    place = Place("edited", "team")
    start(cluster, place)
    notes = {"gpunodes.dev/notebook-request": json.dumps({"image": "$(touch /tmp/x)", "gpus": "1"})}
    server.call("PATCH", place.path("Deployment"), {"metadata": {"annotations": notes}}, MERGE)
    with pytest.raises(GpunodesError, match=r"has no valid gpunodes.dev/notebook-request"):
        start(cluster, place)
    (seen,) = (each for each in notebooks.listed(cluster) if each.place == place)
    assert seen.request is None
    server.call("DELETE", place.path("Secret"))
    body = objects(place, Request(IMAGE), '"><script>alert(1)</script>' + "x" * 40)[1]
    server.call("POST", PATHS["Secret"].format("team"), body)
    with pytest.raises(GpunodesError, match="has no token of gpunodes"):
        cluster.token(place)
    removed, request, _ = notebooks.down(cluster, place, lambda _: None)
    assert len(removed) == 3
    assert request is None
