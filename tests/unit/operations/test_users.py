"""Kubeconfigs of people: which names are refused, what the command accepts, and what a hostile cluster can do.

tests/repair/test_users.py has a real API server.
"""

from __future__ import annotations

import base64
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from click.testing import CliRunner, Result
from gpunodes.cli import root
from gpunodes.engine.cluster.access import _WORKLOADS, END, OWN, RBAC, Access, Binding
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.cluster.session import Session
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.operations import remains, users
from gpunodes.operations.users import Request

from tests.hostile import ATTACKS, unprintable

META = {"name": "x", "uid": "1", "resourceVersion": "1"}
CLUSTER = {"server": "https://10.0.0.1:6443", "certificate-authority-data": "LS0t"}
ALICE = "gpunodes:user:alice"
OF = {"clusters": [{"name": "gpunodes-control-1", "cluster": CLUSTER}]}


@pytest.mark.parametrize(
    "name",
    [
        "system:masters",
        "system:node:gpu-1",
        "system:serviceaccount:kube-system:default",
        "kubeadm:cluster-admins",
        "oidc:alice",
        "kubernetes-admin",
        "Kubernetes-Admin",
        "kube-apiserver-kubelet-client",
        "",
        ".",
        "..",
        "a/b",
        "../x",
        "a~b",
        "alice\n",
        "al\x1b[2Jice",
        "alice,O=system:masters",
        "-o",
        "älice",
        "a" * 64,
    ],
)
def test_names_that_nobody_may_have(name: str) -> None:
    for request in (Request(name, "view"), Request("alice", "view", groups=(name,))):
        with pytest.raises(WrongInput, match="cannot be the name of a") as caught:
            users.check(request)
        assert not unprintable(str(caught.value))


@pytest.mark.parametrize("name", ["alice", "Alice.Smith", "alice@example.org", "a", "a-1_b.c"])
def test_names_of_people(name: str) -> None:
    users.check(Request(name, "view", "team", (name,)))


@pytest.mark.parametrize("request_", [Request("a", "view", "Team"), Request("a", "../x"), Request("a", "", "team")])
def test_other_names_that_are_refused(request_: Request) -> None:
    with pytest.raises(WrongInput):
        users.check(request_)


class Answers(Session):
    """A session whose cluster answers with ``bodies`` by path; other objects do not exist."""

    def __init__(self, bodies: dict[str, Any]) -> None:
        self.bodies = bodies
        self.changed: list[str] = []
        self.read: list[str] = []

    def request(self, method: str, path: str, *_: Any, **__: Any) -> Response:
        if method != "GET":
            self.changed.append(f"{method} {path}")
            if method == "DELETE":
                self._delete(*path.partition("?")[0].rpartition("/")[::2])
            return Response(200, {"metadata": META}, "", 0.0)
        self.read.append(path)
        for end, body in self.bodies.items():
            if path.partition("?")[0].endswith(end):
                return Response(200, body, "", 0.0)
        return Response(404, None, "not found", 0.0)

    def _delete(self, folder: str, name: str) -> None:
        """As an API server does: by the path without the query, and an object with a finalizer stays."""
        for end, body in self.bodies.items():
            if "items" in body and folder.endswith(end):
                body["items"] = [
                    each
                    for each in body["items"]
                    if each["metadata"]["name"] != unquote(name) or "finalizers" in each["metadata"]
                ]


def binding(**more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": ALICE, "labels": {OWN: "true"}, "annotations": {END: "1800000000"}},
        "roleRef": {"kind": "ClusterRole", "name": "view"},
        "subjects": [{"kind": "User", "name": "alice"}],
        **more,
    }


def cluster(*bindings: Any) -> Answers:
    return Answers({"/clusterrolebindings": {"items": list(bindings)}, "/rolebindings": {"items": []}})


def test_only_bindings_of_one_person_are_users() -> None:
    two = [{"kind": "User", "name": "bob"}, {"kind": "User", "name": "carol"}]
    foreign = binding(metadata={"name": "c"}, subjects=two[:1])
    found = users.of_people(Access(cluster(binding(), binding(subjects=two), foreign)).bindings())
    assert [(each.users, each.role, each.end) for each in found] == [(("alice",), "view", 1_800_000_000.0)]


def test_a_user_who_keeps_rights_is_not_reported_as_removed() -> None:
    """An admin of a namespace may bind the own name, or add a second name to our binding, which nobody lists then."""
    alice, other = {"kind": "User", "name": "alice"}, {"kind": "User", "name": "x"}
    own = binding(metadata={"name": "b; reboot", "namespace": "team"})
    for kept, deleted in ((own, 1), (binding(subjects=[alice, other]), 0)):
        session = cluster(*([binding()] if deleted else []), kept)
        with pytest.raises(GpunodesError, match="alice still has rights by bindings") as caught:
            users.removed(Access(session), "alice")
        assert len(session.changed) == deleted
    assert caught.value.problem.remedy.endswith(f"kubectl delete clusterrolebinding -- {ALICE}")
    assert Access(cluster(own)).bindings()[0].deletion == "kubectl -n team delete rolebinding -- 'b; reboot'"


@pytest.mark.parametrize("suffix", ["?x", "?", "#x", " x", "%3Fx", "~x", "x"])
def test_a_binding_with_another_name_than_that_of_its_user_is_of_others(suffix: str) -> None:
    """Its path led to the binding without the rest of the name: it stayed, and the user was said to have no rights."""
    forged = binding(metadata={"name": ALICE + suffix, "labels": {OWN: "true"}, "annotations": {END: "1"}})
    session = cluster(binding(), forged)
    access = Access(session)
    assert [each.name for each in users.of_people(access.bindings())] == [ALICE]
    with pytest.raises(GpunodesError, match="alice still has rights by bindings") as caught:
        users.removed(access, "alice")
    assert f"ClusterRoleBinding {ALICE}{suffix} (view)" in str(caught.value)
    assert session.changed == [f"DELETE {RBAC}/clusterrolebindings/{ALICE}"]
    with pytest.raises(WrongInput, match="alice is no user of this cluster"):
        users.made(access, OF, Request("alice"), lambda _: None, lambda _: None)


WRITES = {"verbs": ["get", "create"], "apiGroups": [""], "resources": ["pods"]}
READS = {"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods"]}


def held(*given: tuple[str, str]) -> Answers:
    """A cluster where alice has these roles, by namespace; other objects are in `team` only."""
    bindings = []
    for namespace, role in given:
        made = binding(roleRef={"kind": "ClusterRole", "name": role})
        made["metadata"] = {**made["metadata"], **({"namespace": namespace} if namespace else {})}
        bindings.append(made)
    others = [binding(metadata={"name": each, "namespace": "team"}, subjects=[]) for each in ("a", "b")]
    answers = Answers({
        "/clusterrolebindings": {"items": [each for each in bindings if "namespace" not in each["metadata"]]},
        "/rolebindings": {"items": [*(each for each in bindings if "namespace" in each["metadata"]), *others]},
        "/clusterroles/edit": {"metadata": META, "rules": [WRITES]},
        "/clusterroles/view": {"metadata": META, "rules": [READS]},
        "/clusterroles/secrets": {"metadata": META, "rules": [{**READS, "resources": ["secrets"]}]},
    })  # fmt: skip
    made_by = [{"kind": "ReplicaSet", "name": "x"}]
    for kind in (*_WORKLOADS["/api/v1"], *_WORKLOADS["/apis/apps/v1"], *_WORKLOADS["/apis/batch/v1"]):
        items = [{"metadata": {"name": "own"}}, {"metadata": {"name": "made", "ownerReferences": made_by}}]
        answers.bodies[f"/namespaces/team/{kind}"] = {"items": items}
        answers.bodies[f"v1/{kind}"] = {"items": items * 2}
    for where, number in (("/namespaces/team", 1), ("/api/v1", 3)):
        answers.bodies[f"{where}/secrets"] = {"items": [{"metadata": {"name": "token"}}] * number}
    return answers


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([("team", "edit")], [remains.Remains("team", 8, 1, 2)]),
        ([("team", "view")], []),
        ([("team", "secrets")], [remains.Remains("team", 8, 1, 2)]),
        # It has been deleted.
        ([("team", "unknown")], [remains.Remains("team", 8, 1, 2)]),
        ([("", "edit"), ("team", "edit")], [remains.Remains("", 16, 3, 2)]),
        ([("", "view"), ("team", "edit")], [remains.Remains("team", 8, 1, 2)]),
        # The cluster does not have the lists of this one.
        ([("gone", "edit")], [remains.Remains("gone")]),
    ],
)
def test_what_a_user_may_have_left_is_counted(given: list[tuple[str, str]], wanted: list[remains.Remains]) -> None:
    access = Access(held(*given))
    assert remains.of(access, users.removed(access, "alice")) == wanted


def test_a_removal_says_what_may_still_act(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "_connected", lambda _: contextlib.nullcontext(Access(held(("team", "edit")))))
    done = run(inventory, "--remove-user", "alice")
    assert done.exception is None
    assert (
        "in the namespace team are 8 workloads, 1 Secret of the type kubernetes.io/service-account-token and "
        "2 RoleBindings that gpunodes did not make: what alice made there stays and acts as before"
    ) in done.stdout
    assert "tokens that alice requested for service accounts there are valid until their end" in done.stdout
    monkeypatch.setattr(users, "_connected", lambda _: contextlib.nullcontext(Access(held(("gone", "edit")))))
    assert "the cluster did not say what is in the namespace gone" in run(inventory, "--remove-user", "alice").stdout
    monkeypatch.setattr(users, "_connected", lambda _: contextlib.nullcontext(Access(held(("team", "view")))))
    assert len(run(inventory, "--remove-user", "alice").stdout.splitlines()) == 1
    monkeypatch.setattr(users, "_connected", lambda _: contextlib.nullcontext(Access(held(("team", "edit")))))
    document = json.loads(run(inventory, "--remove-user", "alice", "--json").stdout)
    assert document["stays"] == [{"namespace": "team", "workloads": 8, "tokens": 1, "bindings": 2}]


def test_a_binding_that_a_finalizer_keeps_gives_rights() -> None:
    kept = {"name": ALICE, "labels": {OWN: "true"}, "finalizers": ["example.org/keep"]}
    session = cluster(binding(metadata=kept))
    with pytest.raises(GpunodesError, match="alice still has rights by bindings"):
        users.removed(Access(session), "alice")
    assert len(session.changed) == 1


def test_what_a_cluster_reports_cannot_change_a_path() -> None:
    made = Binding("a/b?", "c?d#e f%g/..", "view", True)
    assert made.path == f"{RBAC}/namespaces/a%2Fb%3F/rolebindings/c%3Fd%23e%20f%25g%2F.."
    assert Binding("team", "gpunodes:user:a~b.c", "view", True).path.endswith("/team/rolebindings/gpunodes:user:a~b.c")
    session = cluster()
    Access(session).cluster_role("a?b")
    Access(session).namespace_labels("a?b")
    assert session.read == [f"{RBAC}/clusterroles/a%3Fb", "/api/v1/namespaces/a%3Fb"]


@pytest.mark.parametrize("end", ["", "-1", "1e9", "9" * 12, "\u0661"])
def test_the_end_of_a_certificate_is_a_time_or_unknown(end: str) -> None:
    labelled = {"name": "b", "labels": {OWN: "true"}, "annotations": {END: end}}
    assert Access(cluster(binding(metadata=labelled))).bindings()[0].end is None


@pytest.mark.parametrize(
    "wrong",
    [
        binding(roleRef="view"),
        binding(roleRef={"kind": "ClusterRole", "name": 1}),
        binding(subjects=[{"kind": "User"}]),
        binding(subjects="alice"),
        binding(metadata={"name": "b", "labels": {OWN: 1}}),
        [],
    ],
)
def test_an_invalid_binding_is_refused(wrong: Any) -> None:
    with pytest.raises(NoResponse, match="not valid"):
        Access(cluster(wrong)).bindings()


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_a_hostile_name_in_the_cluster_is_shown_as_one_line(
    attack: str, inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = binding(
        metadata={"name": users._binding_name(attack), "labels": {OWN: "true"}},
        subjects=[{"kind": "User", "name": attack}],
        roleRef={"kind": "ClusterRole", "name": attack},
    )
    monkeypatch.setattr(users, "_connected", lambda _: contextlib.nullcontext(Access(cluster(hostile))))
    done = run(inventory, "--users")
    assert len(done.stdout.splitlines()) == 2
    assert not unprintable(done.stdout.replace("\n", ""))


def test_a_certificate_for_another_user_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control plane signs, but for an administrator, or for another key."""
    session = cluster()
    session.bodies |= {"/clusterroles/view": {"metadata": META, "rules": []}}
    access = Access(session)
    for signed in (b"no certificate", _self_signed("system:admin"), _self_signed("alice")):
        monkeypatch.setattr(access, "signed", lambda *_, found=signed: found)
        with pytest.raises(GpunodesError, match="the cluster signed"):
            users.made(access, OF, Request("alice", "view"), lambda _: None, lambda _: None)
    assert session.changed == []


def test_the_end_of_a_user_is_that_of_the_certificate_which_lasts_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """No certificate can be withdrawn: one of 365 days gives the rights after a renewal for 1 day, too."""
    session = cluster()
    bound: list[Binding] = []
    session.bodies |= {"/clusterroles/view": {"metadata": META, "rules": []}}
    access = Access(session)
    monkeypatch.setattr(access, "signed", lambda *_: b"pem")
    monkeypatch.setattr(access, "bindings", lambda: bound)
    for days, latest in ((365, 365), (1, 365), (366, 366)):
        monkeypatch.setattr(users, "_checked", lambda *_, days=days: 86_400.0 * days)
        made = users.made(access, OF, Request("alice", "view", days=days), lambda _: None, lambda _: None)
        assert made.end == 86_400.0 * days
        assert [each.end for each in made.bindings] == [86_400.0 * latest]
        bound[:] = [replace(each, is_own=True) for each in made.bindings]


@pytest.mark.parametrize(
    ("held_in", "kept"), [(["team"], "team"), ([""], None), (["team", "other"], None), (["", "team"], None)]
)
def test_a_renewal_keeps_the_namespace_of_a_user_of_one(
    monkeypatch: pytest.MonkeyPatch, held_in: list[str], kept: str | None
) -> None:
    """Else each of her commands asks in `default`, where she may do nothing."""
    access = Access(cluster())
    bound = [Binding(each, "gpunodes:alice", "edit", True, ("alice",)) for each in held_in]
    monkeypatch.setattr(access, "signed", lambda *_: b"pem")
    monkeypatch.setattr(access, "bindings", lambda: bound)
    monkeypatch.setattr(users, "_is_made_for", lambda *_: True)
    monkeypatch.setattr(users, "_checked", lambda *_: 86_400.0)
    made = users.made(access, OF, Request("alice"), lambda _: None, lambda _: None)
    assert made.document["contexts"][0]["context"].get("namespace") == kept


def _self_signed(name: str) -> bytes:
    import datetime as dt

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import NameOID

    key = users._new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    built = x509.CertificateBuilder(subject, subject, key.public_key(), 1, now, now + dt.timedelta(days=1))
    return built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


# The command


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {control-1: {}}}\nworkers: {hosts: {gpu-1: {}}}\n")
    return path


def run(inventory: Path, *words: str) -> Result:
    return CliRunner().invoke(root, ["kubeconfig", *words, "-i", str(inventory)], standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--user a --users", "several of"),
        ("--users --remove-user a", "several of"),
        ("--role view", "without --user"),
        ("--days 3", "without --user"),
        ("--users --merge", "write no file"),
        ("--remove-user a -o x", "write no file"),
        ("--merge -o x", "both --merge and --output x"),
        ("--user a --merge -o x", "both --merge and --output x"),
        ("--user system:admin --role view", "cannot be the name"),
        ("--remove-user system:admin", "cannot be the name"),
    ],
)
def test_options_that_contradict_each_other(inventory: Path, words: str, message: str) -> None:
    done = run(inventory, *words.split())
    assert isinstance(done.exception, WrongInput)
    assert message in str(done.exception) + done.exception.problem.remedy


def test_a_person_gets_a_private_file_and_the_administrator_s_stays(
    inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = cluster()
    session.bodies |= {"/clusterroles/view": {"metadata": META, "rules": []}}
    monkeypatch.setattr(users, "_connected", lambda _: contextlib.nullcontext(Access(session)))
    monkeypatch.setattr(users, "_cluster_of", lambda *_: OF)
    monkeypatch.setattr(Access, "signed", lambda *_: b"pem")
    monkeypatch.setattr(users, "_checked", lambda *_: 4_000_000_000.0)
    (inventory.parent / "kubeconfig").write_text("mine")
    done = run(inventory, "--user", "alice", "--role", "view", "--json")
    path = inventory.parent / "alice.kubeconfig"
    assert json.loads(done.stdout) == {
        "schema": "gpunodes.kubeconfig/1",
        "path": str(path),
        "context": "gpunodes-control-1-alice",
        "users": [{"user": "alice", "role": "view", "namespace": None, "end": 4_000_000_000.0}],
    }
    assert path.stat().st_mode & 0o777 == 0o600
    user = yaml.safe_load(path.read_text())["users"][0]["user"]
    assert base64.b64decode(user["client-key-data"]).startswith(b"-----BEGIN PRIVATE KEY-----")
    assert (inventory.parent / "kubeconfig").read_text() == "mine"
    assert session.changed == ["POST /apis/rbac.authorization.k8s.io/v1/clusterrolebindings"]


def test_an_administrator_s_role_needs_a_yes(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = cluster()
    session.bodies |= {"/clusterroles/cluster-admin": {"metadata": META}}
    monkeypatch.setattr(users, "_connected", lambda _: contextlib.nullcontext(Access(session)))
    monkeypatch.setattr(users, "_cluster_of", lambda *_: OF)
    done = run(inventory, "--user", "alice", "--role", "cluster-admin")
    assert isinstance(done.exception, WrongInput)
    assert "is not confirmed" in str(done.exception)
    assert session.changed == []
