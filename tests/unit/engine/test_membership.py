"""Whether a machine's kubelet has joined a cluster: the program is run here, with the machine's files in a folder."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils.sent import MARK
from gpunodes.engine import machine_control
from gpunodes.engine.machine_control import MachineControl, Membership
from gpunodes.engine.remote import shell
from gpunodes.engine.remote.commands import RemoteCommand
from gpunodes.engine.remote.shell import Reached

from tests import node_certificates

CONTROL = MachineControl("gpu-1", "addr", {"ansible_python_interpreter": sys.executable, "ansible_become": False}, 0.0)
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files; it is a member."""

    def run(_address: str, _variables: object, command: RemoteCommand, **options: Any) -> shell.RemoteResult:
        return shell.local(["sh", "-c", f"echo Welcome; {command.line}"], stdin=command.stdin, **options)

    text = machine_control._MEMBERSHIP
    for path in ("/etc/kubernetes/kubelet.conf", "/var/lib/kubelet/config.yaml"):
        file = tmp_path / path[1:]
        file.parent.mkdir(parents=True)
        file.write_text("x\n")
        text = text.replace(path, str(file))
    pem = "/var/lib/kubelet/pki/kubelet-client-current.pem"
    monkeypatch.setattr(machine_control, "_MEMBERSHIP", text.replace(pem, str(tmp_path / pem[1:])))
    monkeypatch.setattr(shell, "run", run)
    return tmp_path


def certify(machine: Path, days: int) -> None:
    """Give it a certificate that ends in so many days."""
    path = machine / "var/lib/kubelet/pki/kubelet-client-current.pem"
    path.parent.mkdir()
    path.write_text(node_certificates.pem("gpu-1", days))


def test_a_machine_that_never_joined(machine: Path) -> None:
    (machine / "etc/kubernetes/kubelet.conf").write_text("")
    assert CONTROL.membership() is Membership.NONE
    (machine / "etc/kubernetes/kubelet.conf").unlink()
    assert CONTROL.membership() is Membership.NONE


@pytest.mark.usefixtures("machine")
def test_a_member() -> None:
    assert CONTROL.membership() is Membership.MEMBER


@needs_openssl
def test_a_member_with_a_certificate_that_lasts(machine: Path) -> None:
    certify(machine, 1)
    assert CONTROL.membership() is Membership.MEMBER


@needs_openssl
def test_a_member_whose_certificate_has_ended(machine: Path) -> None:
    certify(machine, -1)
    assert CONTROL.membership() is Membership.ENDED


@pytest.mark.parametrize("output", ["", "yes", "member ended", "\x1b[2J"])
def test_another_output_says_nothing(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shell.RemoteResult(Reached.ENDED, 0, f"\n{MARK}\n{output}\n".encode())
    monkeypatch.setattr(shell, "run", lambda *_, **__: made)
    assert CONTROL.membership() is Membership.UNKNOWN
