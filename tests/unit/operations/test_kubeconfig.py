"""The administrator's kubeconfig: which parts of a control plane's file reach the user, and where it is stored."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from gpunodes.ansible.module_utils import sent
from gpunodes.cli import common, reset, terminal
from gpunodes.engine import control_planes, journal
from gpunodes.engine.remote import shell
from gpunodes.errors import ExitCode, GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.kubeconfig import from_control_plane, reduced
from gpunodes.operations import kubeconfig, kubectl

from tests import sshd
from tests.hostile import ATTACKS, is_plain

PEM = base64.b64encode(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").decode()
OTHER_PEM = base64.b64encode(b"-----BEGIN CERTIFICATE-----\nBBBB\n-----END CERTIFICATE-----\n").decode()
CLUSTER = {"server": "https://10.0.0.1:6443", "certificate-authority-data": PEM}
USER = {"client-certificate-data": PEM, "client-key-data": PEM}


def admin(cluster: Any = CLUSTER, user: Any = USER, **more: Any) -> dict[str, Any]:
    """A control plane's admin.conf, as kubeadm writes it."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kubernetes", "cluster": cluster}],
        "users": [{"name": "kubernetes-admin", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "kubernetes", "user": "kubernetes-admin"}}],
        **more,
    }


def kubeconfig_of(name: str, server: str) -> dict[str, Any]:
    return reduced(admin({**CLUSTER, "server": server}), name)


def test_kubeadm_s_fields_are_taken_unchanged() -> None:
    found = reduced(admin(), "control-1")
    assert found["clusters"] == [{"name": "gpunodes-control-1", "cluster": CLUSTER}]
    assert found["users"] == [{"name": "gpunodes-control-1", "user": USER}]


@pytest.mark.parametrize(
    "document",
    [
        admin(user={**USER, "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/tmp/x"}}),
        admin(user={**USER, "auth-provider": {"name": "oidc"}}),
        admin(user={"client-certificate": "/etc/passwd", "client-key": "/etc/shadow"}),
        admin(user={**USER, "token": "x"}),
        admin(user={**USER, "as": "system:admin"}),
        admin(cluster={**CLUSTER, "insecure-skip-tls-verify": True}),
        admin(cluster={**CLUSTER, "proxy-url": "http://10.9.9.9/"}),
        admin(cluster={**CLUSTER, "server": "http://10.0.0.1"}),
        admin(cluster={**CLUSTER, "server": "https://10.0.0.1\x1b[2J"}),
        admin(cluster={**CLUSTER, "certificate-authority-data": "bm9uZQ=="}),
        admin(user={**USER, "client-key-data": ["x"]}),
        admin(user={"client-key-data": PEM}),
        admin(users=[{"name": name, "user": USER} for name in "ab"]),
        admin(users="x"),
        admin(clusters=[None]),
        admin(user={1: 2}),
        [],
        "x",
        None,
    ],
)
def test_a_kubeconfig_with_anything_else_is_refused(document: Any) -> None:
    """An attacker on a control-plane machine could otherwise let the user's kubectl run programs and read files."""
    with pytest.raises(GpunodesError, match="only the fields that kubeadm writes") as error:
        reduced(document, "control-1")
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "a: 2024-99-99\n",
        "[" * 40000,
        "a: !!int x\n",
        "? {a: 1}\n: 2\n",
        "a: !!float ''\n",
        "x: !!timestamp 'zz'\n",
    ],
)
def test_invalid_yaml_is_refused_with_a_message(text: str, tmp_path: Path) -> None:
    """PyYAML does not only raise its own errors."""
    with pytest.raises(GpunodesError, match="is not valid YAML"):
        from_control_plane(text, "control-1")
    (tmp_path / "config").write_text(text)
    with pytest.raises(WrongInput, match="is not valid YAML"):
        kubeconfig.write(tmp_path / "config", kubeconfig_of("a", "https://a"), merge=True)


def test_merging_keeps_other_entries_and_replaces_its_own() -> None:
    first = kubeconfig.merged(kubeconfig_of("work", "https://w"), kubeconfig_of("lab", "https://old"))
    second = kubeconfig.merged(first, kubeconfig_of("lab", "https://new"))
    assert {entry["name"]: entry["cluster"]["server"] for entry in second["clusters"]} == {
        "gpunodes-work": "https://w",
        "gpunodes-lab": "https://new",
    }
    assert second["current-context"] == "gpunodes-lab"


def test_a_kubeconfig_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        target = tmp_path / "kube" / "config"
        kubeconfig.write(target, kubeconfig_of("a", "https://a"), merge=True)
        kubeconfig.write(target, kubeconfig_of("b", "https://b"), merge=True)
    finally:
        os.umask(before)
    assert target.stat().st_mode & 0o777 == 0o600
    assert len(yaml.safe_load(target.read_text())["contexts"]) == 2
    assert [path.name for path in target.parent.iterdir()] == ["config"]


def test_a_linked_file_stays_a_link(tmp_path: Path) -> None:
    """Dotfiles in a repository: what was linked gets the entries, and loses them."""
    (tmp_path / "dotfiles").mkdir()
    target, link = tmp_path / "dotfiles/config", tmp_path / "config"
    link.symlink_to("dotfiles/config")
    kubeconfig.write(link, kubeconfig_of("a", "https://a"), merge=True)
    kubeconfig.write(link, kubeconfig_of("b", "https://b"), merge=True)
    assert len(yaml.safe_load(target.read_text())["contexts"]) == 2
    merged = kubeconfig.merged_for(yaml.safe_load(link.read_text()), PEM)
    kubeconfig.forget(replace(merged, path=link))
    assert yaml.safe_load(target.read_text())["contexts"] == []
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    # A file of its own never follows a link that somebody else may have made.
    kubeconfig.write(link, kubeconfig_of("a", "https://a"), merge=False)
    assert not link.is_symlink()


def test_a_kubeconfig_that_is_not_a_mapping_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "config"
    target.write_text("- a\n")
    with pytest.raises(WrongInput, match="not a mapping"):
        kubeconfig.write(target, kubeconfig_of("a", "https://a"), merge=True)


def test_a_user_s_own_programs_are_kept(tmp_path: Path) -> None:
    """Entries for other clusters in the user's file are not changed."""
    target = tmp_path / "config"
    existing = {"users": [{"name": "corp", "user": {"exec": {"command": "corp-login"}}}]}
    target.write_text(yaml.safe_dump(existing))
    kubeconfig.write(target, kubeconfig_of("a", "https://a"), merge=True)
    assert yaml.safe_load(target.read_text())["users"][0] == existing["users"][0]


def test_only_what_was_merged_for_the_cluster_is_forgotten(tmp_path: Path) -> None:
    """Another cluster at the same address, and contexts of the user for this one, stay with what they need."""
    target, ours = tmp_path / "config", kubeconfig_of("lab", "https://10.0.0.1:6443")
    later = reduced(admin({**CLUSTER, "certificate-authority-data": OTHER_PEM}), "later")
    # The user's own entries for this cluster, and what was merged before `endpoint set`.
    mine = yaml.safe_load(yaml.safe_dump(kubeconfig_of("mine", "https://m")).replace("gpunodes-mine", "mine"))
    for each in (mine, later, kubeconfig_of("lab-alice", "https://vip:6443"), ours):
        kubeconfig.write(target, each, merge=True)
    merged = kubeconfig.merged_for(yaml.safe_load(target.read_text()), PEM)
    assert set(merged.contexts) == {"gpunodes-lab", "gpunodes-lab-alice"}
    kubeconfig.forget(replace(merged, path=target))
    left = yaml.safe_load(target.read_text())
    for kind in ("clusters", "contexts", "users"):
        assert [each["name"] for each in left[kind]] == ["mine", "gpunodes-later"]
    assert left["current-context"] == ""
    assert target.stat().st_mode & 0o777 == 0o600

    document = kubeconfig.merged({"current-context": "mine"}, ours)
    document["contexts"].append({"name": "mine", "context": {"cluster": "gpunodes-lab", "user": "gpunodes-lab"}})
    merged = kubeconfig.merged_for(document, PEM)
    assert (set(merged.contexts), set(merged.clusters), set(merged.users)) == ({"gpunodes-lab"}, set(), set())


@pytest.mark.parametrize("document", [{}, {"clusters": 5}, {"clusters": [5, {"name": "gpunodes-x"}], "contexts": [{}]}])
def test_nothing_is_found_in_another_file(document: Any) -> None:
    assert not kubeconfig.merged_for(document, PEM).contexts


@pytest.mark.parametrize(
    ("output", "server", "message"),
    [
        ('{"clientVersion": {"gitVersion": "v1.36.3"}}', "v1.36.1", ""),
        ('{"clientVersion": {"gitVersion": "v1.35.0"}}', "v1.36.1+rke2r1", ""),
        (
            '{"clientVersion": {"gitVersion": "v1.34.9"}}',
            "v1.36.1",
            "has the version 1.34; wanted: kubectl 1.35 to 1.37",
        ),
        ('{"clientVersion": {"gitVersion": "v1.38.0"}}', "v1.36.1", "has the version 1.38"),
        ("{", "v1.36.1", "no kubectl that works is on the PATH; wanted: kubectl 1.35 to 1.37"),
        (None, "v1.36.1", "no kubectl that works is on the PATH"),
        (None, "v1.36.1\x1b[2J", ""),
        (None, 5, ""),
    ],
)
def test_a_kubectl_that_is_absent_or_skewed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str | None, server: Any, message: str
) -> None:
    """What a cluster reports as its version is checked, and the program is the user's own."""
    if output is not None:
        (tmp_path / "kubectl").write_text(f"#!/bin/sh\nprintf '%s' '{output}'\n")
        (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    api = SimpleNamespace(call_once=lambda *_: SimpleNamespace(body={"gitVersion": server}))
    monkeypatch.setattr(control_planes, "connected", lambda *_: contextlib.nullcontext(api))
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {c1: }}\n")
    found = kubectl.problem(Inventory(path))
    assert (message in str(found)) if message else found is None


# --- where it is stored ----------------------------------------------------------------------------------------------

needs_sshd = pytest.mark.skipif(
    sshd.SSHD is None or os.geteuid() != 0, reason="needs sshd (package openssh-server), and root to run it"
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inventory]:
    """An inventory whose control plane is this machine, with its admin.conf in another folder."""
    monkeypatch.setattr(kubeconfig, "_READ", kubeconfig._READ.replace("/etc/kubernetes", str(tmp_path)))
    port = sshd.free_ports(1)[0]
    with sshd.serving(tmp_path, [{("127.0.0.1", port): ""}]) as servers:
        host = {"ansible_host": "127.0.0.1", "ansible_port": port, "ansible_user": "root"}
        host["ansible_ssh_private_key_file"] = str(servers.login)
        path = tmp_path / "hosts.yml"
        path.write_text(yaml.safe_dump({"control_plane": {"hosts": {"control-1": host}}}))
        yield Inventory(path)


@needs_sshd
def test_it_is_fetched_and_stored_in_no_file(inventory: Inventory, tmp_path: Path, state: Path) -> None:
    (tmp_path / "admin.conf").write_text(yaml.safe_dump(admin()))
    assert kubeconfig.fetch(inventory) == reduced(admin(), "control-1")
    assert [path for path in state.rglob("*") if path.is_file() and PEM in path.read_text()] == []


@needs_sshd
def test_what_was_merged_is_found_by_the_control_plane_s_ca(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without entries of gpunodes in the user's file the control plane is not asked."""
    target = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(target))
    assert kubeconfig.find_merged(inventory) is None
    target.write_text(yaml.safe_dump(kubeconfig_of("control-1", CLUSTER["server"])))
    with pytest.raises(GpunodesError, match="not a control plane"):
        kubeconfig.find_merged(inventory)
    (tmp_path / "admin.conf").write_text(yaml.safe_dump(admin({**CLUSTER, "certificate-authority-data": OTHER_PEM})))
    assert kubeconfig.find_merged(inventory) is None
    (tmp_path / "admin.conf").write_text(yaml.safe_dump(admin()))
    found = kubeconfig.find_merged(inventory)
    assert found is not None
    assert (found.path, set(found.contexts)) == (target, {"gpunodes-control-1"})


@needs_sshd
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "admin.conf does not exist: not a control plane"),
        ("{", "is not valid YAML"),
        ("!!python/none x", "is not valid YAML"),
    ],
)
def test_without_a_valid_one_the_reason_is_reported(
    inventory: Inventory, tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "admin.conf").write_text(text)
    with pytest.raises(GpunodesError, match=message):
        kubeconfig.fetch(inventory)


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_what_a_control_plane_says_instead_is_shown_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], attack: str
) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {c1: , c2: }}\n")
    found = Inventory(path)
    choice = control_planes.Choice(found.control_planes()[1], [("c1", attack)])
    monkeypatch.setattr(control_planes, "choose", lambda _: choice)
    for out, err in (("", attack), (attack, ""), (yaml.safe_dump(admin(user={**USER, attack: attack})), "")):
        answer = shell.RemoteResult(shell.Reached.ENDED, int(bool(err)), f"\n{sent.MARK}\n{out}".encode(), err)
        monkeypatch.setattr(shell, "run", lambda *_, answer=answer, **__: answer)
        with pytest.raises(GpunodesError) as refused:
            kubeconfig.fetch(found, terminal.progress)
        terminal.error(refused.value)
        shown = capsys.readouterr().err
        assert "c1 does not respond as a control plane" in shown
        assert is_plain(shown)


def test_leftovers_of_a_killed_command_are_deleted_at_the_next_start() -> None:
    """Older versions of gpunodes stored it in a run's folder."""
    leftovers = [
        journal.open_run("kubeconfig") / "admin.conf",
        journal.open_run("join") / "play/artifacts/ansible/command",
        journal.open_run("rollout-upgrade") / "00001-gpu-1-work/upgrade/artifacts/ansible/command",
    ]
    for path in leftovers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret")
    journal.open_run("health")
    assert [path for path in leftovers if path.exists()] == []


TWO = "control_plane: {hosts: {c1: , c2: }}\nworkers: {hosts: {w1: }}\n"
"""A cluster of two control planes: after a restore of etcd, one of them is reset, to join again."""


@pytest.mark.parametrize(
    ("hosts", "words", "is_forgotten"),
    [
        ("control_plane: {hosts: {c1: }}\n", ("c1",), True),
        ("control_plane: {hosts: {c1: }}\n", ("c1", "--dry-run"), False),
        ("control_plane: {hosts: {c1: }}\n", ("c1", "--skip-phase", "reset"), False),
        ("control_plane: {hosts: {c1: }}\n", ("c1", "--from-phase", "reset"), True),
        (TWO, ("c1",), False),
        (TWO, ("w1", "c1"), False),
        (TWO, ("c1", "c2"), True),
    ],
)
def test_a_reset_that_removes_no_cluster_keeps_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, words: tuple[str, ...], is_forgotten: bool
) -> None:
    path, forgotten = tmp_path / "hosts.yml", list[kubeconfig.Merged]()
    path.write_text(hosts)
    merged = kubeconfig.Merged(tmp_path / "config", {"gpunodes-c1"}, {"gpunodes-c1"}, {"gpunodes-c1"})
    monkeypatch.setattr(common, "execute_confirmed", lambda *_, **__: ExitCode.DONE)
    monkeypatch.setattr(kubeconfig, "find_merged", lambda _: merged)
    monkeypatch.setattr(kubeconfig, "forget", forgotten.append)
    reset.command.main([*words, "--yes", "-i", str(path)], standalone_mode=False)
    assert forgotten == ([merged] if is_forgotten else [])


def test_a_context_that_cannot_be_removed_fails_no_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {c1: }}\n")
    merged = kubeconfig.Merged(tmp_path / "gone", {"gpunodes-c1"}, {"gpunodes-c1"}, {"gpunodes-c1"})
    monkeypatch.setattr(common, "execute_confirmed", lambda *_, **__: ExitCode.DONE)
    monkeypatch.setattr(kubeconfig, "find_merged", lambda _: merged)
    assert reset.command.main(["c1", "--yes", "-i", str(path)], standalone_mode=False) == ExitCode.DONE
    assert "keeps the context gpunodes-c1 of this cluster" in capsys.readouterr().err


@pytest.mark.parametrize("contexts", [[5, {"context": {}}, "x"], {"a": "b"}])
def test_a_kubeconfig_of_the_user_may_have_anything(tmp_path: Path, contexts: Any) -> None:
    target = tmp_path / "config"
    target.write_text(yaml.safe_dump({"contexts": contexts}))
    ours = kubeconfig_of("lab", "https://10.0.0.1:6443")
    if isinstance(contexts, dict):
        with pytest.raises(WrongInput, match="contexts of the kubeconfig is no list"):
            kubeconfig.write(target, ours, merge=True)
        return
    kubeconfig.write(target, ours, merge=True)
    left = yaml.safe_load(target.read_text())
    assert left["contexts"][:3] == contexts
    kubeconfig.forget(replace(kubeconfig.merged_for(left, PEM), path=target))
    assert yaml.safe_load(target.read_text())["contexts"] == contexts
