"""A port that is forwarded over SSH: a real sshd and an HTTP server on loopback addresses."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gpunodes import settings
from gpunodes.engine.remote import forward
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import Machine, Role

from tests import sshd

pytestmark = pytest.mark.skipif(
    sshd.SSHD is None or os.geteuid() != 0, reason="needs sshd (package openssh-server), and root to run it"
)


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"dashboard")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return sshd.free_ports(3)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, ports: list[int]) -> Iterator[sshd.Servers]:
    closed = "AllowTcpForwarding no\n"
    with contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("sshd")
        running = stack.enter_context(sshd.serving(folder, [{("127.0.0.1", ports[0]): ""}]))
        other = tmp_path_factory.mktemp("closed")
        made = sshd.serving(other, [{("127.0.0.1", ports[1]): ""}], lambda _: closed)
        stack.enter_context(made)
        (folder / "closed").symlink_to(other / "login")
        yield running


@pytest.fixture(scope="module")
def page() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / "state/gpunodes").mkdir(parents=True)
    return tmp_path


def variables(port: int, key: Path, *more: str) -> dict[str, Any]:
    return {
        "ansible_port": port,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": " ".join(more),
    }


MACHINE = Machine("cp-1", "127.0.0.1", Role.CONTROL_PLANE)


def fetched(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        return connection.getresponse().read()


def free() -> int:
    return sshd.free_ports(1)[0]


def test_a_port_leads_to_the_address_and_is_closed_at_the_end(
    servers: sshd.Servers, ports: list[int], page: int
) -> None:
    local = free()
    with forward.opened(MACHINE, variables(ports[0], servers.login), "127.0.0.1", page, local):
        assert [fetched(local) for _ in range(5)] == [b"dashboard"] * 5
        listening = subprocess.run(["ss", "-Hltn", f"sport = :{local}"], capture_output=True, text=True, check=True)
        assert [line.split()[3] for line in listening.stdout.splitlines()] == [f"127.0.0.1:{local}"]
    with pytest.raises(ConnectionError):
        fetched(local)


def test_forwards_of_the_user_are_not_made(servers: sshd.Servers, ports: list[int], page: int) -> None:
    """A RemoteForward would lead from the machine to this computer."""
    local, here, there = free(), free(), free()
    more = ("-o", f"LocalForward=127.0.0.1:{here} 127.0.0.1:{page}", "-R", f"127.0.0.1:{there}:127.0.0.1:{page}")
    with forward.opened(MACHINE, variables(ports[0], servers.login, *_quoted(more)), "127.0.0.1", page, local):
        assert fetched(local) == b"dashboard"
        for closed in (here, there):
            with pytest.raises(ConnectionError):
                fetched(closed)


def _quoted(words: tuple[str, ...]) -> list[str]:
    return [f"'{word}'" for word in words]


def test_an_unknown_host_key_is_refused_where_ssh_refuses_it(
    servers: sshd.Servers, ports: list[int], page: int
) -> None:
    strict = variables(ports[0], servers.login, "-o", "StrictHostKeyChecking=yes")
    with pytest.raises(GpunodesError, match=r"cp-1: .*key"), forward.opened(MACHINE, strict, "127.0.0.1", page, free()):
        pass
    assert not settings.known_hosts().exists()


def test_a_changed_host_key_is_refused(servers: sshd.Servers, ports: list[int], page: int, tmp_path: Path) -> None:
    other = sshd.new_key(tmp_path / "other").with_suffix(".pub").read_text()
    settings.known_hosts().write_text(f"[127.0.0.1]:{ports[0]} {other}")
    given = variables(ports[0], servers.login)
    with pytest.raises(GpunodesError, match=r"cp-1: .*key"), forward.opened(MACHINE, given, "127.0.0.1", page, free()):
        pass


def test_a_machine_that_forwards_nothing_is_named(servers: sshd.Servers, ports: list[int], page: int) -> None:
    local = free()
    with forward.opened(MACHINE, variables(ports[1], servers.folder / "closed"), "127.0.0.1", page, local) as opened:
        with pytest.raises((OSError, http.client.HTTPException)):
            fetched(local)
        assert "administratively prohibited" in str(opened.lost("")) or "AllowTcpForwarding" in str(opened.lost(""))


@pytest.mark.parametrize("address", ["None", "", "localhost", "10.0.0.1:80:x", "-oProxyCommand=x", "::1"])
def test_what_is_no_address_is_refused(servers: sshd.Servers, ports: list[int], address: str) -> None:
    given = variables(ports[0], servers.login)
    with (
        pytest.raises(GpunodesError, match="is not an IPv4 address"),
        forward.opened(MACHINE, given, address, 80, free()),
    ):
        pass


def test_a_port_in_use_is_refused(servers: sshd.Servers, ports: list[int], page: int) -> None:
    given = variables(ports[0], servers.login)
    with (
        pytest.raises(WrongInput, match=f"port {page} of this computer cannot be used"),
        forward.opened(MACHINE, given, "127.0.0.1", page, page),
    ):
        pass


_HOLDS = """
import sys
from pathlib import Path
from gpunodes.engine.remote import forward
from gpunodes.model import Machine, Role
given = {"ansible_port": int(sys.argv[1]), "ansible_user": "root", "ansible_ssh_private_key_file": sys.argv[2]}
machine = Machine("cp-1", "127.0.0.1", Role.CONTROL_PLANE)
with forward.opened(machine, given, "127.0.0.1", int(sys.argv[3]), int(sys.argv[4])) as opened:
    print("open", flush=True)
    opened.follow()
"""


def test_a_killed_command_leaves_no_open_port(servers: sshd.Servers, ports: list[int], page: int) -> None:
    local = free()
    words = [sys.executable, "-c", _HOLDS, *map(str, (ports[0], servers.login, page, local))]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"open\n"
        assert fetched(local) == b"dashboard"
        process.kill()
    deadline = time.monotonic() + 30
    while True:
        try:
            fetched(local)
        except ConnectionError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
