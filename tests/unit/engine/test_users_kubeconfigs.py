"""Kubeconfig files of the user: which are used, and what of them."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.engine.cluster.kubeconfig_file import selected
from gpunodes.errors import WrongInput

PEM = base64.b64encode(b"-----BEGIN CERTIFICATE-----\n").decode()


def document(**changes: Any) -> dict[str, Any]:
    """A kubeconfig with two contexts; ``cluster`` and ``user`` add fields to those of the current one."""
    cluster = {"server": "https://10.0.0.1:6443", "certificate-authority-data": PEM, **changes.get("cluster", {})}
    user = {"client-certificate-data": PEM, "client-key-data": PEM, **changes.get("user", {})}
    return {
        "clusters": [
            {"name": "lab", "cluster": cluster},
            {"name": "other", "cluster": {"server": "https://rancher.example/k8s/clusters/c-1"}},
        ],
        "users": [{"name": "me", "user": user}, {"name": "robot", "user": {"token": "t0ken"}}],
        "contexts": [
            {"name": "one", "context": {"cluster": "lab", "user": "me"}},
            {"name": "two", "context": {"cluster": "other", "user": "robot"}},
        ],
        "current-context": "one",
    }


def write(folder: Path, content: Any, mode: int = 0o600) -> Path:
    path = folder / "config"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    path.chmod(mode)
    return path


def test_only_one_context_is_taken(tmp_path: Path) -> None:
    """Nothing of the others: no program of another context can be run."""
    path = write(tmp_path, document())
    found = selected(path, "two")
    assert found.server == "https://rancher.example/k8s/clusters/c-1"
    assert [each["user"] for each in found.document["users"]] == [{"token": "t0ken"}]
    assert found.context == "two"
    assert "t0ken" not in repr(found)


def test_certificates_and_keys_are_in_memory_until_it_is_closed(tmp_path: Path) -> None:
    found = selected(write(tmp_path, document()))
    user = found.document["users"][0]["user"]
    assert set(user) == {"client-certificate", "client-key"}
    key = Path(user["client-key"])
    assert key.read_bytes() == key.read_bytes() == b"-----BEGIN CERTIFICATE-----\n"
    assert str(key.readlink()).startswith("/memfd:")
    found.close()
    assert not key.exists()


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    changes = {"certificate-authority": "pki/ca.crt", "certificate-authority-data": ""}
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "bin/login"}
    login = tmp_path / "bin/login"
    login.parent.mkdir()
    login.write_text(f"""#!/bin/sh\necho '{{"apiVersion": "{plugin["apiVersion"]}", "status": {{"token": "t"}}}}'\n""")
    login.chmod(0o755)
    none = {"client-certificate-data": "", "client-key-data": ""}
    found = selected(write(tmp_path, document(cluster=changes, user={**none, "exec": plugin})))
    assert found.document["clusters"][0]["cluster"]["certificate-authority"] == str(tmp_path / "pki/ca.crt")
    assert found.document["users"][0]["user"] == {"token": "t"}


def test_a_plugin_beside_credentials_is_not_run(tmp_path: Path) -> None:
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/false"}
    found = selected(write(tmp_path, document(user={"exec": plugin})))
    assert set(found.document["users"][0]["user"]) == {"client-certificate", "client-key"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": {"insecure-skip-tls-verify": True}}, "insecure-skip-tls-verify"),
        ({"cluster": {"server": "http://10.0.0.1:8080"}}, "names the server"),
        ({"cluster": {"server": "https://10.0.0.1@evil.example"}}, "names the server"),
        ({"cluster": {"server": "https://10.0.0.1/?x="}}, "names the server"),
        ({"cluster": {"server": 5}}, "server of the cluster 'lab'"),
        ({"user": {"as": "root"}}, "has as in its user"),
        ({"user": {"auth-provider": {"name": "gcp"}}}, "use an exec plugin"),
        ({"user": {"client-key-data": "***"}}, "is not in base64"),
        ({"user": {"client-key-data": ""}}, "has no credentials"),
        ({"user": {"exec": {"args": ["x"]}}}, "has no command"),
    ],
)
def test_what_would_be_ignored_or_is_not_safe_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        selected(write(tmp_path, document(**changes)))


@pytest.mark.parametrize(
    ("mode", "message"), [(0o644, "can read .* chmod 600"), (0o660, "can change"), (0o602, "can change")]
)
def test_other_users_may_neither_read_nor_change_it(tmp_path: Path, mode: int, message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        selected(write(tmp_path, document(), mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_it_belongs_to_the_user(tmp_path: Path) -> None:
    path = write(tmp_path, document())
    os.chown(path, 4242, 4242)
    with pytest.raises(WrongInput, match="belongs to another user"):
        selected(path)


@pytest.mark.parametrize("text", ["", "[]", "a: [", "!!python/object/apply:os.system [id]", "\x00", "x" * (5 << 20)])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(WrongInput, match="is not a kubeconfig"):
        selected(write(tmp_path, text))


def test_a_context_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="no context 'three'; wanted: one of its contexts: one, two"):
        selected(write(tmp_path, document()), "three")
    with pytest.raises(WrongInput, match="has no current context"):
        selected(write(tmp_path, {**document(), "current-context": ""}))
    with pytest.raises(WrongInput, match="cannot be read"):
        selected(tmp_path / "none")
    with pytest.raises(WrongInput, match=r"is not a file|cannot be read"):
        selected(tmp_path)
