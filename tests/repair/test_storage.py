"""Volumes and claims of shared storage on a real API server, with the controllers that bind them."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from gpunodes.ansible.module_utils import kube_api, kubeconfig
from gpunodes.ansible.module_utils.cluster import objects as applied
from gpunodes.ansible.module_utils.cluster import storage as claims
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.cluster.session import Session
from gpunodes.errors import WrongInput
from gpunodes.operations.storage.objects import Objects
from gpunodes.planner import storage, storage_access

from tests.programs import ending

from . import apiserver
from .apiserver import ApiServer

NAMESPACES = "/api/v1/namespaces"
CLAIMS = f"{NAMESPACES}/default/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
SHARES: list[dict[str, Any]] = [
    {"name": "training", "server": "nas.example", "path": "/export/training", "size": "900Gi"},
    # The API server writes it as 1Ti.
    {"name": "scratch", "path": "/srv/scratch", "size": "1024Gi", "namespaces": ["default", "ml"]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made, controllers(made):
        with contextlib.suppress(OSError):  # the API server makes the namespace default itself
            made.call("POST", NAMESPACES, namespace("default"))
        made.call("POST", NAMESPACES, namespace("ml", **{"pod-security.kubernetes.io/enforce": "restricted"}))
        yield made


@contextlib.contextmanager
def controllers(made: ApiServer) -> Iterator[None]:
    """The controllers of volumes and claims, beside the API server."""
    program = apiserver.programs()[0].parent / "kube-controller-manager"
    kinds = ("persistentvolume-binder", "persistentvolume-protection", "persistentvolumeclaim-protection")
    wanted = ",".join(f"{kind}-controller" for kind in kinds)
    argv: list[str | Path] = [
        program,
        f"--kubeconfig={made.kubeconfig}",
        f"--controllers={wanted}",
        "--leader-elect=false",
        "--secure-port=0",
    ]
    with (
        (Path(made.folder) / "controllers.log").open("wb") as log,
        subprocess.Popen(ending(argv), stdout=log, stderr=log) as run,
    ):
        try:
            yield
        finally:
            run.terminate()
            run.wait(30)


def namespace(name: str, **labels: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


class Direct(Session):
    """The requests of a session, sent by the test itself."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server

    def request(self, method: str, path: str, body: Any = None, kind: str = "", *_: Any, **__: Any) -> Response:
        try:
            return Response(200, self.server.call(method, path, body, kind or "application/json"), "", time.time())
        except OSError as error:
            return Response(getattr(error, "code", 0), None, str(error), time.time())


@pytest.fixture
def admin(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))


def until(server: ApiServer, path: str, phase: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        found: dict[str, Any] = server.call("GET", path)
        if found["status"].get("phase") == phase:
            return found
        assert time.monotonic() < deadline, found["status"]
        time.sleep(0.5)


@pytest.mark.usefixtures("admin")
def test_claims_are_bound_to_their_volumes_and_applied_again_without_a_change(server: ApiServer) -> None:
    wanted = storage.objects(SHARES, "10.0.0.9")
    would, _ = applied.apply(wanted, check=True)
    changed, _ = applied.apply(wanted, check=False)
    assert len(changed) == len(would) == 6
    for share in storage.shares(SHARES):
        for name in share.namespaces:
            claim = until(server, f"{NAMESPACES}/{name}/persistentvolumeclaims/{share.name}", "Bound")
            assert claim["spec"]["volumeName"] == share.volume(name)
    assert claims.verify([("default", "training"), ("default", "scratch"), ("ml", "scratch")], "", 60) == [
        "3 claims are bound; not verified that pods on two nodes write and read: there is no image for them"
    ]
    # The controllers have added to both: applying again takes nothing away.
    assert applied.apply(wanted, check=False) == ([], [])
    assert not storage.conflicts(wanted, Objects(Direct(server)).present(wanted))


@pytest.mark.usefixtures("admin")
def test_no_other_claim_gets_a_volume(server: ApiServer) -> None:
    other = storage.objects([{**SHARES[0], "name": "other"}], "")[1]
    other["spec"]["volumeName"] = "gpunodes-training.default"
    server.call("POST", CLAIMS, other)
    time.sleep(3)
    assert server.call("GET", f"{CLAIMS}/other")["status"].get("phase") == "Pending"
    server.call("DELETE", f"{CLAIMS}/other")
    # A controller takes its finalizer away first.
    deadline = time.monotonic() + 60
    while any(each["metadata"]["name"] == "other" for each in server.call("GET", CLAIMS)["items"]):
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.usefixtures("admin")
def test_the_cluster_is_read_and_changes_that_it_refuses_are_known_before(server: ApiServer) -> None:
    found = Objects(Direct(server), patience_s=0)
    volumes, own = found.own()
    assert len(volumes) == len(own) == 3
    assert set(storage.sources(volumes)) == {"nas.example:/export/training", "10.0.0.9:/srv/scratch"}
    with pytest.raises(WrongInput, match="names the namespace nowhere"):
        found.check_namespaces(["ml", "nowhere"])
    moved = storage.objects([{**SHARES[0], "server": "new.example"}], "")
    [error] = storage.conflicts(moved, found.present(moved))
    assert "exists with nas.example:/export/training" in str(error)


@pytest.mark.usefixtures("admin")
def test_the_verifying_pod_meets_the_strictest_pod_security_and_its_claim_is_in_use(server: ApiServer) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    server.call("POST", f"{NAMESPACES}/ml/serviceaccounts", account)
    pod = claims.pod_on("w1", "probe", ("ml", "scratch"), "busybox", "true")
    server.call("POST", f"{NAMESPACES}/ml/pods?fieldValidation=Strict", pod)
    found = Objects(Direct(server), patience_s=0)
    assert found.users(found.own()[1]) == (["ml/probe"], [])
    # One that has ended keeps its claim, too.
    server.call("PATCH", f"{NAMESPACES}/ml/pods/probe/status", {"status": {"phase": "Succeeded"}}, kube_api.MERGE)
    assert found.users(found.own()[1]) == (["ml/probe"], [])
    server.call("DELETE", f"{NAMESPACES}/ml/pods/probe?gracePeriodSeconds=0")
    assert found.users(found.own()[1]) == ([], [])


@pytest.mark.usefixtures("admin")
def test_a_pod_mounts_no_share_but_by_a_claim(server: ApiServer) -> None:
    """Baseline, which the documentation recommends, allows volumes that name a server."""
    applied.apply([*storage_access.policy(storage.LABELS), *storage.objects(SHARES, "10.0.0.9")], check=False)
    assert applied.apply(storage_access.policy(storage.LABELS), check=False) == ([], [])
    for name, labels in (("team", {}), ("old", {storage_access.ALLOWED: "allowed"})):
        baseline = {"pod-security.kubernetes.io/enforce": "baseline"}
        server.call("POST", NAMESPACES, namespace(name, **baseline, **labels))
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        server.call("POST", f"{NAMESPACES}/{name}/serviceaccounts", account)
    named: dict[str, Any] = {"nfs": {"server": "evil.example", "path": "/srv/scratch"}}
    driver: dict[str, Any] = {
        "csi": {"driver": "nfs.csi.k8s.io", "volumeAttributes": {"server": "10.0.0.9", "share": "/srv/scratch"}}
    }
    deadline = time.monotonic() + 60
    # A new policy takes effect after a moment.
    while not (refusal := refused(server, "team", named)):
        assert time.monotonic() < deadline
        time.sleep(1)
    assert "ValidatingAdmissionPolicy 'gpunodes-storage'" in refusal
    assert "a volume of the kind nfs is not allowed here" in refusal
    assert "a volume of nfs.csi.k8s.io in a pod is not allowed here" in refused(
        server, "team", {"emptyDir": {}}, driver
    )
    assert refused(server, "team", {"emptyDir": {}}, {"persistentVolumeClaim": {"claimName": "scratch"}}) == ""
    other = {"csi": {"driver": "secrets-store.csi.k8s.io"}}
    assert refused(server, "team", other) == ""
    assert refused(server, "old", named, driver) == ""
    pod = claims.pod_on("w1", "probe", ("ml", "scratch"), "busybox", "true")
    server.call("POST", f"{NAMESPACES}/ml/pods?dryRun=All", pod)
    deleted, _ = applied.delete(storage_access.names(), "", check=False, keep=False, limit_s=60)
    assert len(deleted) == 2
    assert applied.delete(storage_access.names(), "", check=False, keep=False) == ([], [])


def refused(server: ApiServer, space: str, *volumes: dict[str, Any]) -> str:
    """Why the API server refuses a pod with these volumes, "" if it takes it."""
    spec = {
        "containers": [{"name": "main", "image": "busybox"}],
        "volumes": [{"name": f"v{number}", **volume} for number, volume in enumerate(volumes)],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    try:
        server.call("POST", f"{NAMESPACES}/{space}/pods?dryRun=All", pod)
    except HTTPError as error:
        return error.read().decode()
    return ""


@pytest.mark.usefixtures("admin")
def test_a_volume_whose_claim_was_deleted_is_made_again(server: ApiServer) -> None:
    server.call("DELETE", f"{CLAIMS}/training")
    until(server, f"{VOLUMES}/gpunodes-training.default", "Released")
    wanted = storage.objects(SHARES[:1], "")
    found = Objects(Direct(server), patience_s=0)
    assert found.delete_released(found.present(wanted)) == ["gpunodes-training.default"]
    applied.apply(wanted, check=False)
    until(server, f"{CLAIMS}/training", "Bound")


@pytest.mark.usefixtures("admin")
def test_all_is_deleted_claims_first(server: ApiServer) -> None:
    from gpunodes.operations.storage.commands import _removed

    found = Objects(Direct(server), patience_s=0)
    given = _removed(*found.own(), [])
    # Started after the command looked for pods: what the claim keeps, keeps the server.
    pod = claims.pod_on("w1", "late", ("ml", "scratch"), "busybox", "true")
    server.call("POST", f"{NAMESPACES}/ml/pods", pod)
    server.call("PATCH", f"{NAMESPACES}/ml/pods/late/status", {"status": {"phase": "Succeeded"}}, kube_api.MERGE)
    with pytest.raises(MachineProblem, match="PersistentVolumeClaim ml/scratch is being deleted"):
        applied.delete(given, "", check=False, keep=False, limit_s=5)
    volumes, left = found.own()
    assert [each["metadata"]["namespace"] for each in left] == ["ml"]
    assert len(given) == 2 * len(volumes), "a claim that stays keeps the volumes"
    server.call("DELETE", f"{NAMESPACES}/ml/pods/late?gracePeriodSeconds=0")
    # An interrupted verification leaves one that nothing else deletes.
    pod["metadata"]["name"] = "gpunodes-storage-write-0123abcd"
    server.call("POST", f"{NAMESPACES}/ml/pods", pod)
    assert found.users(left) == (["ml/gpunodes-storage-write-0123abcd"], []), "it may go on"
    path = f"{NAMESPACES}/ml/pods/gpunodes-storage-write-0123abcd/status"
    server.call("PATCH", path, {"status": {"phase": "Failed"}}, kube_api.MERGE)
    users, ended = found.users(left)
    assert (users, [each["metadata"]["name"] for each in ended]) == ([], ["gpunodes-storage-write-0123abcd"])
    # The next command has a list of its own.
    deleted, _ = applied.delete(_removed(*found.own(), ended), "", check=False, keep=False, limit_s=60)
    order = {"Pod": 0, "PersistentVolumeClaim": 1, "PersistentVolume": 2}
    kinds = [order[each.partition(" ")[0]] for each in deleted]
    assert kinds == sorted(kinds)
    assert found.own() == ([], [])
