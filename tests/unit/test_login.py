"""Login with a password: OpenSSH's client against a server that accepts only passwords."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from gpunodes.engine.remote import shell
from gpunodes.engine.remote.commands import RemoteCommand

PASSWORD = "pa ss\"w$x'"


class _Server(paramiko.ServerInterface):  # type: ignore[misc]  # paramiko has no types
    """Accepts the right password, and runs commands."""

    def __init__(self, tried: list[str]) -> None:
        self.tried = tried

    def get_allowed_auths(self, username: str) -> str:
        return "password"

    def check_auth_password(self, username: str, password: str) -> int:
        self.tried.append(password)
        return int(paramiko.AUTH_SUCCESSFUL if password == PASSWORD else paramiko.AUTH_FAILED)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.OPEN_SUCCEEDED)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        def run() -> None:
            done = subprocess.run(["sh", "-c", command.decode()], capture_output=True, check=False)
            channel.sendall(done.stdout)
            channel.send_exit_status(done.returncode)
            channel.close()

        threading.Thread(target=run, daemon=True).start()
        return True


@pytest.fixture
def tried() -> list[str]:
    """The passwords that the server received."""
    return []


@pytest.fixture
def port(tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of the server."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    key = paramiko.ECDSAKey.generate()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                transport = paramiko.Transport(connection)
                transport.add_server_key(key)
                transport.start_server(server=_Server(tried), event=threading.Event())

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("name", ["ansible_password", "ansible_ssh_pass"])
def test_the_password_of_the_inventory_is_used(port: int, name: str, tmp_path: Path) -> None:
    variables = {"ansible_port": port, "ansible_user": "admin", name: PASSWORD}
    result = shell.run("127.0.0.1", variables, RemoteCommand("echo here"), deadline_s=20)
    assert (result.ok, result.out) == (True, b"here\n"), result.err
    assert not [word for word in shell.command("127.0.0.1", variables) if PASSWORD in word]
    kept = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert [path.name for path in kept if PASSWORD in path.read_text()] == []


@pytest.mark.parametrize("password", [{"ansible_password": "wrong"}, {}])
def test_a_wrong_or_missing_password_is_refused(port: int, password: dict[str, str]) -> None:
    variables = {"ansible_port": port, "ansible_user": "admin", **password}
    result = shell.run("127.0.0.1", variables, RemoteCommand("echo here"), deadline_s=20)
    assert not result.ok
    assert "Permission denied" in result.err


@pytest.mark.parametrize(
    "way", ["-J root@127.0.0.1:{port}", "-o ProxyCommand='ssh {config} -p {port} -W %h:%p 127.0.0.1'"]
)
def test_a_jump_host_does_not_get_the_password(port: int, tried: list[str], tmp_path: Path, way: str) -> None:
    """The ssh for the jump host ran the same askpass program, and got it."""
    (tmp_path / "config").write_text(f"UserKnownHostsFile {tmp_path}/known\nStrictHostKeyChecking no\n")
    config = f"-F {tmp_path}/config"
    variables = {"ansible_user": "root", "ansible_password": PASSWORD}
    variables["ansible_ssh_common_args"] = f"{config} {way.format(port=port, config=config)}"
    result = shell.run("10.9.9.9", variables, RemoteCommand("echo here"), deadline_s=20)
    # Where nobody has one ssh tries the empty one.
    assert (result.ok, set(tried)) == (False, {""})
    assert "Permission denied" in result.err


def test_a_machine_with_another_name_gets_the_password(port: int, tmp_path: Path) -> None:
    """Host name and user may come from ssh_config."""
    (tmp_path / "config").write_text(f"Host GPU-1\n  HostName 127.0.0.1\n  Port {port}\n  User {'long' * 10}\n")
    variables = {"ansible_password": PASSWORD, "ansible_ssh_common_args": f"-F {tmp_path}/config"}
    assert shell.run("GPU-1", variables, RemoteCommand("echo here"), deadline_s=20).ok
    variables["ansible_ssh_common_args"] += " -o HostKeyAlias=Other"
    assert shell.run("GPU-1", variables, RemoteCommand("echo here"), deadline_s=20).ok
