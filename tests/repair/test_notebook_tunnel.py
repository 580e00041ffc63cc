"""The way to a notebook, with real programs: ssh and sshd, kubectl, an API server, and the streaming of a kubelet.

KWOK's kubelet uses Kubernetes' own code for it (k8s.io/cri-streaming, which containerd has, too), and leads to a
loopback port. There is a real Jupyter server where one is installed, else a stand-in (tests/jupyter.py).
"""

from __future__ import annotations

import contextlib
import glob
import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gpunodes.engine.cluster import connection
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.jupyter import cell, tunnel
from gpunodes.engine.jupyter.objects import Notebooks
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.operations import notebooks
from gpunodes.planner.notebooks import Place, Request, objects

from tests import jupyter, sshd

from . import apiserver, kwok
from .apiserver import ApiServer

PLACE = Place("alice", "team")
TOKEN = "t" * 43
pytestmark = pytest.mark.skipif(sshd.SSHD is None, reason="sshd is not installed")


@dataclass
class Way:
    """A cluster with a notebook that is ready, and a control plane that is reached by SSH."""

    server: ApiServer
    inventory: Inventory
    token: str
    backend: int
    """The loopback port of the Jupyter server."""
    folder: Path


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    folder = tmp_path_factory.mktemp("way")
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("XDG_STATE_HOME", str(folder / "state"))
        backend = stack.enter_context(served(folder))
        (folder / "cluster").mkdir()
        server = stack.enter_context(apiserver.running(folder / "cluster"))
        apiserver.controllers(server, "deployment-controller,replicaset-controller,garbage-collector-controller")
        stack.enter_context(kwok.running(server, {8888: backend}))
        server.call("POST", "/api/v1/namespaces", {"metadata": {"name": "team"}})
        server.call("POST", "/api/v1/nodes", kwok.node("gpu-1", {}))
        kwok.wait_ready(server, 1)
        (folder / "bin").mkdir()
        (folder / "bin/kubectl").symlink_to(apiserver.kubectl())
        login = folder / "login.sh"
        login.write_text(f'#!/bin/sh\nPATH="{folder}/bin:$PATH"; export PATH\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n')
        login.chmod(0o755)
        (port,) = sshd.free_ports(1)
        (folder / "ssh").mkdir()
        ssh = stack.enter_context(sshd.serving(folder / "ssh", [{("127.0.0.1", port): str(login)}]))
        variables = f"ansible_host: 127.0.0.1, ansible_port: {port}, ansible_user: root, "
        variables += f"ansible_ssh_private_key_file: {ssh.login}, ansible_python_interpreter: {sys.executable}"
        (folder / "hosts.yml").write_text(f"control_plane: {{hosts: {{control-1: {{{variables}}}}}}}\n")
        yield Way(server, Inventory(folder / "hosts.yml"), begun(server), backend, folder)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[int]:
    """A Jupyter server as the container has it; its port."""
    container = objects(PLACE, Request("x"), TOKEN)[-1]["spec"]["template"]["spec"]["containers"][0]
    probe = container["readinessProbe"]["exec"]["command"]
    if not jupyter.REAL:
        with jupyter.standing_in(TOKEN) as (port, _):
            argv = [each.replace("8888", str(port)) for each in probe]
            assert subprocess.run(argv, check=False, capture_output=True).returncode == 0
            yield port
        return
    (folder / "home").mkdir()
    with jupyter.real(folder / "home", container["args"], probe, TOKEN) as port:
        yield port


def begun(server: ApiServer) -> str:
    """Start the notebook, schedule its pod, and wait for it; its token."""
    session = Session(connection.here(sys.executable, server.kubeconfig))
    with contextlib.closing(session), pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.token_urlsafe", lambda _: TOKEN)
        started = notebooks.up(Notebooks(session), PLACE, {}, "x", print, scratch=True)
        pods = "/api/v1/namespaces/team/pods"
        until(lambda: server.call("GET", pods)["items"])
        name = server.call("GET", pods)["items"][0]["metadata"]["name"]
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"kind": "Node", "name": "gpu-1"},
        }
        server.call("POST", f"{pods}/{name}/binding", body)
        notebooks.wait(Notebooks(session), PLACE, 120, print)
    return started.token


@pytest.fixture(autouse=True)
def here(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(way.folder / "state"))
    monkeypatch.setattr(tunnel, "ADMIN", str(way.server.kubeconfig))

    def connected(_: Inventory) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(Notebooks(Session(connection.here(sys.executable, way.server.kubeconfig))))

    monkeypatch.setattr(notebooks, "connected", connected)


def until(seen: Callable[[], Any], limit_s: float = 60) -> None:
    began = time.monotonic()
    while not seen():
        assert time.monotonic() - began < limit_s
        time.sleep(0.2)


def processes(way: Way) -> dict[int, str]:
    """The processes of this cluster's tunnels, with their command lines."""
    found = {}
    for path in glob.glob("/proc/[0-9]*/cmdline"):  # noqa: PTH207 - processes end meanwhile
        with contextlib.suppress(OSError):
            line = Path(path).read_text(errors="replace").replace("\0", " ")
            if str(way.server.kubeconfig) in line and " port-forward " in line:
                found[int(path.split("/")[2])] = line
    return found


def reach(inventory: Inventory, place: Place = PLACE, port: int = 0) -> None:
    """Open a tunnel, and close it."""
    with notebooks.reached(inventory, place, port, print):
        pass


def get(port: int, path: str) -> tuple[int, bytes]:
    connected = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connected.request("GET", path)
    response = connected.getresponse()
    return response.status, response.read()


def test_a_cell_runs_through_it(way: Way) -> None:
    lines: list[str] = []
    with notebooks.reached(way.inventory, PLACE, 0, lines.append) as (opened, token, request):
        assert token == way.token
        assert request.gpus == 1
        assert cell.run(opened.port, token, "print(6 * 7)", 60).strip() == "42"
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: get(opened.port, "/api"), range(16)))
        assert {status for status, _ in answers} == {200}
        (running,) = processes(way).values()
        assert token not in running
        with pytest.raises(WrongInput, match=f"port {opened.port} of this computer cannot be used"):
            reach(way.inventory, port=opened.port)
    assert lines[0] == "connecting over control-1"
    until(lambda: not processes(way))
    until(lambda: not glob.glob("/tmp/gpunodes-forward-*"))  # noqa: PTH207 - where the program makes its folder


def test_forwards_of_the_user_are_not_made(way: Way, tmp_path: Path) -> None:
    """One in ssh_config would lead from the control plane to this computer, or open it to others."""
    here, there = sshd.free_ports(2)
    ours = f"-o LocalForward=127.0.0.1:{here}\\ 127.0.0.1:{way.backend} -R 127.0.0.1:{there}:127.0.0.1:{way.backend}"
    text = (way.folder / "hosts.yml").read_text().replace("}}}", f", ansible_ssh_common_args: '{ours}'}}}}}}")
    (tmp_path / "hosts.yml").write_text(text)
    with notebooks.reached(Inventory(tmp_path / "hosts.yml"), PLACE, 0, print) as (opened, _, _):
        assert get(opened.port, "/api")[0] == 200
        for closed in (here, there):
            with pytest.raises(ConnectionError):
                get(closed, "/api")


def test_verify_says_what_a_cell_sees(way: Way) -> None:
    """This machine has no GPU, and the notebook requests one."""
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has GPUs")
    with pytest.raises(GpunodesError, match=r"a cell sees 0 GPUs by nvidia-smi and 0 by CUDA \(cuInit: -1\)"):
        notebooks.verify(way.inventory, PLACE, print)


def test_a_port_of_the_control_plane_that_is_in_use(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """kubectl refuses it, and another one is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (free,) = sshd.free_ports(1)
        numbers = [taken.getsockname()[1] - tunnel._FIRST, free - tunnel._FIRST]
        monkeypatch.setattr("gpunodes.engine.jupyter.tunnel.secrets.randbelow", lambda _: numbers.pop(0))
        with notebooks.reached(way.inventory, PLACE, 0, print) as (opened, _, _):
            assert get(opened.port, "/api")[0] == 200
        assert numbers == []


def test_an_sshd_that_forwards_nothing(way: Way, tmp_path: Path) -> None:
    (port,) = sshd.free_ports(1)
    login = str(way.folder / "login.sh")
    with sshd.serving(tmp_path, [{("127.0.0.1", port): login}], lambda _: "AllowTcpForwarding no\n") as ssh:
        variables = f"ansible_host: 127.0.0.1, ansible_port: {port}, ansible_user: root, "
        variables += f"ansible_ssh_private_key_file: {ssh.login}, ansible_python_interpreter: {sys.executable}"
        (tmp_path / "hosts.yml").write_text(f"control_plane: {{hosts: {{control-1: {{{variables}}}}}}}\n")
        refused = r"nothing answers through the tunnel: .*prohibited.*AllowTcpForwarding"
        with pytest.raises(GpunodesError, match=refused):
            reach(Inventory(tmp_path / "hosts.yml"))
    until(lambda: not processes(way))


def test_another_host_key_is_refused(way: Way, tmp_path: Path) -> None:
    """The tunnel checks host keys as all connections do."""
    reach(way.inventory)
    known = way.folder / "state/gpunodes/known_hosts"
    text = known.read_text()
    other = sshd.new_key(tmp_path / "other").with_suffix(".pub").read_text().split()[1]
    try:
        known.write_text("".join(" ".join([*line.split()[:2], other]) + "\n" for line in text.splitlines()))
        with pytest.raises(GpunodesError, match=r"control-1: .*host key"):
            reach(way.inventory)
    finally:
        known.write_text(text)


def test_it_ends_with_kubectl(way: Way) -> None:
    with notebooks.reached(way.inventory, PLACE, 0, print) as (opened, _, _):
        (number,) = processes(way)
        os.kill(number, 15)
        with pytest.raises(
            GpunodesError, match="control-1: the connection to the notebook ended: kubectl ended with -15"
        ):
            opened.follow()


def test_a_notebook_that_is_not_there(way: Way) -> None:
    with pytest.raises(WrongInput, match="there is no notebook bob in the namespace team"):
        reach(way.inventory, Place("bob", "team"))
