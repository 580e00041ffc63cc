"""Logins at registries: what is refused, and that no password is shown. tests/repair has a real API server."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gpunodes.cli import root
from gpunodes.engine.cluster.connection import Response
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.cluster.registries import Login, Registries, secret_name
from gpunodes.engine.cluster.session import Session
from gpunodes.errors import WrongInput
from gpunodes.operations import registries

from tests.hostile import ATTACKS, unprintable

PASSWORD = "hunter2-hunter2"


@pytest.mark.parametrize(
    "server",
    ["", "https://ghcr.io", "a b", "-x", "ghcr.io/Team", "x:port", "a\n", "\x1b[2J", "a" * 300],
)
def test_what_is_no_registry(server: str) -> None:
    with pytest.raises(WrongInput) as caught:
        registries.check(server)
    assert not unprintable(str(caught.value))


@pytest.mark.parametrize("server", ["docker.io", "ghcr.io/team", "registry.example:5000", "10.0.0.1:5000", "localhost"])
def test_registries(server: str) -> None:
    registries.check(server, ["team", "kube-system"])


def test_two_registries_have_two_secrets() -> None:
    names = {secret_name(each) for each in ("a.b:5000", "a-b-5000", "a.b-5000", "a.b/5000", "a" * 100, "a" * 101)}
    assert len(names) == 6
    assert all(len(each) < 70 for each in names)


@pytest.mark.parametrize(("user", "password"), [("a:b", "x"), ("", "x"), ("a", ""), ("a", "x\ny"), ("a", "x\x00")])
def test_credentials_that_no_registry_takes(user: str, password: str) -> None:
    with pytest.raises(WrongInput) as caught:
        registries.check_credentials(user, password)
    assert "x" not in caught.value.problem.found.replace("printable", "")


class Cluster(Registries):
    """A cluster with one namespace."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def has_namespace(self, name: str) -> bool:
        return name == "default"

    def login(self, namespace: str, server: str, user: str, password: str) -> None:
        self.given.append((namespace, server, user, password))

    def login_at(self, server: str, namespace: str) -> Login | None:
        return next((each for each in self.logins() if (each.server, each.namespace) == (server, namespace)), None)

    def logins(self) -> list[Login]:
        return [Login(each[0], secret_name(each[1]), each[1], each[2], True) for each in self.given]


def test_names_are_one_part_of_a_path() -> None:
    paths: list[str] = []

    class Recording(Registries):
        def __init__(self) -> None:
            """Without a session."""

        def _find(self, path: str, *, wait: bool = True) -> Any | None:
            paths.append(path)
            return None

        def _delete(self, path: str) -> None:
            paths.append(path)

    Recording().logout(Login("a?b", "c/d#e", "ghcr.io", "robot", True))
    assert paths == [
        "/api/v1/namespaces/a%3Fb/serviceaccounts/default",
        "/api/v1/namespaces/a%3Fb/secrets/c%2Fd%23e",
    ]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory/hosts.yml").write_text("control_plane: {hosts: {control-1: {}}}\n")
    made = Cluster()
    monkeypatch.setattr(registries, "_connected", lambda _: contextlib.nullcontext(made))
    return made


def run(words: Sequence[str], given: str = "") -> Result:
    return CliRunner().invoke(root, ["registry", *words], input=given, standalone_mode=False)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_password_of_standard_input_is_stored_and_not_shown(cluster: Cluster, end: str, tmp_path: Path) -> None:
    done = run(["login", "ghcr.io", "--user", "robot", "--password-stdin"], PASSWORD + end)
    assert done.exception is None
    assert cluster.given == [("default", "ghcr.io", "robot", PASSWORD)]
    assert "uses it" in done.stdout
    assert PASSWORD not in done.output
    assert not [each for each in tmp_path.rglob("*") if each.is_file() and PASSWORD in each.read_text(errors="replace")]


def test_a_password_that_is_no_text_is_refused_and_not_shown(cluster: Cluster) -> None:
    words = ["registry", "login", "ghcr.io", "--user", "robot", "--password-stdin"]
    done = CliRunner().invoke(root, words, input=b"hunter2\xff\n", standalone_mode=False)
    assert isinstance(done.exception, WrongInput)
    assert done.exception.__cause__ is None
    assert "hunter2" not in done.output + str(done.exception)
    assert not cluster.given


@pytest.mark.parametrize(("server", "warned"), [("docker.io", True), ("docker.io/team", True), ("ghcr.io", False)])
def test_a_mirror_that_may_get_the_password_is_named(
    cluster: Cluster, server: str, warned: bool, tmp_path: Path
) -> None:
    mirrors = "all: {vars: {own: {docker.io: https://mirror.example}, gpunodes_image_mirrors: '{{ own }}'}}\n"
    (tmp_path / "inventory/hosts.yml").write_text(f"control_plane: {{hosts: {{control-1: {{}}}}}}\n{mirrors}")
    done = run(["login", server, "--user", "robot", "--password-stdin"], PASSWORD)
    assert ("warning: gpunodes_image_mirrors has a mirror of docker.io" in done.stderr) == warned
    assert len(cluster.given) == 1


def test_without_a_terminal_nothing_is_asked(cluster: Cluster) -> None:
    done = run(["login", "ghcr.io", "--user", "robot"], PASSWORD)
    assert isinstance(done.exception, WrongInput)
    assert "--password-stdin" in done.exception.problem.remedy
    assert not cluster.given


def test_a_namespace_that_does_not_exist(cluster: Cluster) -> None:
    words = ["login", "ghcr.io", "--user", "r", "--password-stdin", "--namespace", "default", "--namespace", "nowhere"]
    done = run(words, PASSWORD)
    assert isinstance(done.exception, WrongInput)
    assert "no namespace nowhere" in str(done.exception)
    assert not cluster.given


def test_a_logout_of_nothing(cluster: Cluster) -> None:
    cluster.given.append(("default", "ghcr.io", "robot", ""))
    assert "no login at quay.io" in str(run(["logout", "quay.io"]).exception)
    assert "in kube-system" in str(run(["logout", "ghcr.io", "--namespace", "kube-system"]).exception)


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_a_hostile_login_is_shown_as_one_line(cluster: Cluster, attack: str) -> None:
    cluster.given.append((attack, attack, attack, ""))
    done = run(["list"])
    assert len(done.stdout.splitlines()) == 2
    assert not unprintable(done.stdout.replace("\n", ""))


def test_an_invalid_service_account_is_refused() -> None:
    class Answers(Session):
        def __init__(self) -> None:
            pass

        def request(self, *_: Any, **__: Any) -> Response:
            metadata = {"name": "default", "uid": "1", "resourceVersion": "1"}
            return Response(200, {"metadata": metadata, "imagePullSecrets": [{"name": 1}]}, "", 0.0)

    with pytest.raises(NoResponse, match="not valid"):
        Registries(Answers()).login("default", "ghcr.io", "a", "b")
