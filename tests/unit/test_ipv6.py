"""Machines that are reached over IPv6: a real sshd at ::1, and every way in which gpunodes uses SSH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpunodes.engine import locks
from gpunodes.engine.cluster.connection import over_ssh
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.remote import probing, targets
from gpunodes.engine.remote.reach import Reach
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory, edit
from gpunodes.inventory.names import check_machine, machine_name
from gpunodes.model import Role

from tests import sshd

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        sshd.SSHD is None or os.geteuid() != 0 or not Path("/proc/sys/net/ipv6").exists(),
        reason="needs sshd (package openssh-server), root to run it, and IPv6",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, sshd.Servers]]:
    (port,) = sshd.free_ports(1, "::1")
    with sshd.serving(tmp_path_factory.mktemp("ipv6"), [{("::1", port): ""}]) as servers:
        yield port, servers


@pytest.fixture
def machine(server: tuple[int, sshd.Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables of a machine at ::1."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    port, servers = server
    return {
        "ansible_host": "::1",
        "ansible_port": port,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(servers.login),
        "ansible_python_interpreter": sys.executable,
    }


def test_ssh(machine: dict[str, Any], tmp_path: Path) -> None:
    with locks.hold("::1", machine, "join"):
        session = Session(over_ssh("::1", machine, str(tmp_path / "none")))
        try:
            assert f"{tmp_path}/none does not exist" in session.request("GET", "/version").error
        finally:
            session.close()


@pytest.mark.parametrize("jump", [False, True])
def test_a_scan(machine: dict[str, Any], jump: bool) -> None:
    port = machine["ansible_port"]
    variables = {**machine, **({"ansible_ssh_common_args": f"-J root@[::1]:{port}"} if jump else {})}
    found = targets.target("gpu-1", variables, lambda *_: {})
    (answer,) = probing.probe([found], probing.ProbeSettings(), deadline_s=60)
    assert (answer.reach, answer.message) == (Reach.ANSWERED, "")
    # The same entry as ssh's own: a key that one of them learned is checked by the other.
    assert found.host_key_name == f"[::1]:{port}"


def test_ansible(machine: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(json.dumps({"control_plane": {"hosts": {"control-1": machine}}}))
    argv = [sys.executable, "-c", "from gpunodes.cli import main; main()", "status", "-i", str(path), "--json"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    # No cluster runs here; that is what the machine itself reports.
    assert "/etc/kubernetes/admin.conf does not exist" in done.stdout + done.stderr


def test_a_machine_that_is_added_by_its_address(tmp_path: Path) -> None:
    """An IPv6 address cannot be a machine's name, because names become names of files and of Kubernetes objects."""
    path = tmp_path / "hosts.yml"
    assert edit.add(path, Role.CONTROL_PLANE, ["2001:db8::1"], {}) == ["2001-0db8-0000-0000-0000-0000-0000-0001"]
    assert edit.add(path, Role.WORKER, ["2001:DB8::2", "10.0.0.2"], {})[1] == "10.0.0.2"
    inventory = Inventory(path)
    assert inventory.control_plane().address == "2001:db8::1"
    # The same address in another spelling is the same machine.
    assert inventory.unknown(["2001:0db8:0::1", "2001:db8::2", "2001:db8::3"]) == ["2001:db8::3"]
    (found,) = inventory.select(["2001:db8:0:0::2"])
    assert found.address == "2001:DB8::2"


@pytest.mark.parametrize("address", ["::1", "::", "2001:db8::", "fe80::1%eth0", "::ffff:10.0.0.1"])
def test_every_address_makes_a_valid_name(address: str) -> None:
    check_machine("hosts.yml", machine_name(address))


def test_names_of_addresses_are_unique() -> None:
    assert len({machine_name(each) for each in ("::1", "1::", "::", "::1:0", "1.0.0.0", "0:1::")}) == 6


def test_an_address_in_brackets_is_refused(tmp_path: Path) -> None:
    """ssh, and Ansible, take it for a host name."""
    path = tmp_path / "hosts.yml"
    path.write_text("workers: {hosts: {gpu-1: {ansible_host: '[2001:db8::1]'}}}\n")
    with pytest.raises(WrongInput, match=r"ansible_host of gpu-1 is '\[2001:db8::1\]'; wanted: an IP address without"):
        Inventory(path).machines()
