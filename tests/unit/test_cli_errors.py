"""Errors that a command must report in plain sentences, with a remedy that helps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpunodes import inventory as inventories
from gpunodes.model import Role

UNREACHABLE = """\
control_plane: {hosts: {c1: {ansible_host: 127.0.0.1, ansible_port: 1, ansible_user: nobody}}}
workers: {hosts: {gpu-1: {ansible_host: 127.0.0.1, ansible_port: 1}}}
"""


def gpunodes(
    folder: Path, *argv: str, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from gpunodes.cli import main; main()", *argv],
        cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=180,
    )


@pytest.fixture
def unreachable(tmp_path: Path) -> Path:
    """A folder with an inventory of machines that refuse SSH."""
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory" / "hosts.yml").write_text(UNREACHABLE)
    return tmp_path


@pytest.mark.parametrize("command", ["status", "kubeconfig", "join gpu-1", "remove gpu-1 --yes"])
def test_a_control_plane_that_refuses_ssh_leads_to_no_new_cluster(unreachable: Path, command: str) -> None:
    done = gpunodes(unreachable, *command.split())
    assert done.returncode == 1
    assert "SSH refuses the connection" in done.stderr
    assert "correct its address" in done.stderr or "correct the address" in done.stderr
    assert "init-" not in done.stderr
    assert "--without-cluster" not in done.stderr


def test_an_address_that_cannot_be_reached_is_not_left_in_the_inventory(tmp_path: Path) -> None:
    for address in ("127.0.0.1", "127.0.0.2"):
        done = gpunodes(tmp_path, "init-master", address, "--port", "1", "--user", "nobody")
        assert (done.returncode, f"{address}: reachable: " in done.stderr) == (1, True), done.stderr
        assert f"not reached, and not added to inventory/hosts.yml: {address}" in done.stderr
        assert not (tmp_path / "inventory").exists()


def test_an_address_that_cannot_be_joined_is_not_left_in_the_inventory(tmp_path: Path) -> None:
    path = tmp_path / "inventory" / "hosts.yml"
    connection = {"ansible_port": 1, "ansible_user": "nobody"}
    inventories.add(path, Role.CONTROL_PLANE, ["127.0.0.1"], connection)
    before = path.read_text()
    assert gpunodes(tmp_path, "join", "127.0.0.2").returncode == 1
    assert path.read_text() == before
