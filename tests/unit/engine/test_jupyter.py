"""A cell that is run by a Jupyter server's API: the stand-in answers well and badly; tests/repair has the whole way."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import kubeconfig, port_forward
from gpunodes.ansible.module_utils.sent import MARK
from gpunodes.engine.jupyter import cell, tunnel
from gpunodes.engine.jupyter.tunnel import Tunnel
from gpunodes.engine.jupyter.websocket import WebSocket, WebSocketError
from gpunodes.engine.remote import forward
from gpunodes.engine.remote.stream import Stream, StreamLost
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import Machine, Role
from gpunodes.operations import notebooks
from gpunodes.planner.notebooks import Place, Request, objects

from tests import jupyter
from tests.hostile import ATTACKS, unprintable
from tests.jupyter import frame, message

TOKEN = "k" * 43


def run(answer: jupyter.Answer, code: str = "print(1)", limit_s: float = 20) -> str:
    with jupyter.standing_in(TOKEN, answer) as (port, kernels):
        try:
            return cell.run(port, TOKEN, code, limit_s)
        finally:
            assert not kernels, "the kernel is removed, whatever happens"


def test_the_output_of_a_cell() -> None:
    assert run(jupyter.ran, "print('a' * 300)") == "a" * 300 + "\n"


def test_a_cell_that_fails() -> None:
    with pytest.raises(GpunodesError, match="the cell failed: ZeroDivisionError: division by zero"):
        run(jupyter.ran, "1 / 0")


def test_messages_of_other_cells_are_left_out() -> None:
    def answer(_: str, header: dict[str, Any]) -> list[Any]:
        foreign = {**header, "msg_id": "another"}
        return [
            message("stream", foreign, name="stdout", text="not ours"),
            message("status", foreign, execution_state="idle"),
            message("stream", {}, name="stdout", text="not ours"),
            message("stream", header, name="stdout", text="ours"),
            message("status", header, execution_state="idle"),
        ]

    assert run(answer) == "ours"


def test_fragments_pings_and_binary_messages() -> None:
    def answer(_: str, header: dict[str, Any]) -> list[Any]:
        text = json.dumps(message("stream", header, name="stdout", text="y" * 1000)).encode()
        fragments = [frame(text[:10], 0x01), frame(b"ping", 0x89), frame(text[10:99], 0x00), frame(text[99:], 0x80)]
        binary = [frame(b"\x00", 0x02), frame(b"binary", 0x80), frame(b"", 0x8A)]
        return [*binary, *fragments, message("status", header, execution_state="idle")]

    assert run(answer) == "y" * 1000


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frame(b"[[[" * 1000), "its answer is invalid"),
        (frame(b"[" * 100_000), "its answer is invalid"),
        (frame(b'{"header": 1}'), "its answer is invalid"),
        (frame(b"", 0x88), "the server closed the connection"),
        (bytes([0x81, 0x80]) + b"1234", "breaks the protocol"),
        (struct.pack("!BBQ", 0x81, 127, 1 << 62), "breaks the protocol"),
        (b"", "no message arrived in time"),
    ],
)
def test_a_server_that_answers_badly(sent: bytes, reason: str) -> None:
    with pytest.raises(GpunodesError, match=f"no cell runs in the notebook: .*{reason}"):
        run(lambda *_: [sent] if sent else [], limit_s=2)


def test_endless_output_ends() -> None:
    with pytest.raises(GpunodesError, match="the cell prints too much"):
        run(lambda _, header: [message("stream", header, name="stdout", text="x" * 9000) for _ in range(100)])
    many = [frame(b"x" * 60_000, 0x01), *(frame(b"x" * 60_000, 0x00) for _ in range(200))]
    with pytest.raises(GpunodesError, match="a message is too long"):
        run(lambda *_: many)


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_an_error_is_shown_as_one_line(attack: str) -> None:
    with pytest.raises(GpunodesError) as caught:
        run(lambda _, header: [message("error", header, ename=attack, evalue=attack)])
    assert not unprintable(caught.value.problem.found)


def test_a_wrong_token_is_refused() -> None:
    with jupyter.standing_in(TOKEN) as (port, _), pytest.raises(GpunodesError, match="403 Forbidden") as caught:
        cell.run(port, "other", "1", 10)
    assert "other" not in str(caught.value).replace("another", "")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 100_000, b"HTTP/1.1 101 x\r\n\r\n"])
def test_what_is_no_websocket(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connected:
                connected.recv(4096)
                connected.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises((WebSocketError, ConnectionResetError)):
            WebSocket(server.getsockname()[1], "/", {}, 5)


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"], ids=["head", "body"])
def test_a_server_that_answers_byte_by_byte_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    """A limit for each byte let the pod of a user keep the command for days."""
    monkeypatch.setattr(cell, "_CALL_S", 0.5)
    monkeypatch.setattr(forward, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connected, _ = server.accept()
                    with connected, contextlib.suppress(OSError):
                        connected.sendall(begin)
                        while True:
                            connected.sendall(b"H" if begin else b"x")
                            time.sleep(0.1)

        threading.Thread(target=serve, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(GpunodesError, match="has no response"):
            cell.run(port, TOKEN, "1", 10)
        # A server that has begun its answer is one.
        assert bool(forward.unanswered(port, "/")) is not bool(begin)
        assert time.monotonic() - began < 5


def test_a_kernel_that_is_a_path() -> None:
    """What the server names never becomes a part of a URL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uuid.uuid4", lambda: "../../../etc")
        with jupyter.standing_in(TOKEN) as (port, _), pytest.raises(GpunodesError, match="names no kernel"):
            cell.run(port, TOKEN, "1", 10)


@pytest.mark.parametrize(
    ("output", "gpus", "problem"),
    [
        ('gpunodes {"cuda": 1, "code": 0, "lines": ["GPU 0: H100"]}', 1, ""),
        ('noise\ngpunodes {"cuda": 2, "code": 0, "lines": ["a", "b"]}\n', 2, ""),
        ('gpunodes {"cuda": 0, "code": -1, "lines": []}', 0, ""),
        ('gpunodes {"cuda": 0, "code": 100, "lines": ["GPU 0"]}', 1, "1 GPUs by nvidia-smi and 0 by CUDA"),
        ('gpunodes {"cuda": 1, "code": 0, "lines": ["GPU 0"]}', 2, "1 GPUs by nvidia-smi and 1 by CUDA"),
        ("", 0, "something else"),
        ('gpunodes {"cuda": true, "code": 0, "lines": []}', 0, "something else"),
        ('gpunodes {"cuda": 1, "code": 0, "lines": "GPU"}', 1, "something else"),
        ('gpunodes {"cuda": 1, "code": 0, "lines": [[]]}', 1, "something else"),
        ("gpunodes {" + "[" * 5000 + "}", 0, "something else"),
    ],
)
def test_what_a_cell_sees(output: str, gpus: int, problem: str) -> None:
    if not problem:
        assert notebooks.seen(output, Request("x", gpus=gpus)).cuda == gpus
        return
    with pytest.raises(GpunodesError, match=problem):
        notebooks.seen(output, Request("x", gpus=gpus))


def test_the_cell_of_verify_runs_without_gpus() -> None:
    output = subprocess.run(["python3", "-c", notebooks._CELL], capture_output=True, text=True, check=True).stdout
    assert notebooks.seen(output, Request("x", gpus=0)).cuda >= 0


def forwarding(monkeypatch: pytest.MonkeyPatch, *lines: str) -> Tunnel:
    """A tunnel whose program prints these lines, and ends."""
    text = "".join(f"{each}\n" for each in (f"\n{MARK}", *lines))
    argv = [sys.executable, "-c", f"import sys; sys.stdin.read(1); print({text!a}, end='')"]
    monkeypatch.setattr(tunnel, "_started", lambda *_: Stream("control-1", argv, b"x"))
    monkeypatch.setattr(forward, "request", lambda *_: "")
    machine = Machine("control-1", "192.0.2.1", Role.CONTROL_PLANE)
    with tunnel.opened(machine, {}, "default", "pod", 8888) as opened:
        opened.follow()
    return opened


@pytest.mark.parametrize("attack", ATTACKS, ids=ascii)
def test_a_control_plane_that_reports_attacks(monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    open_, ended = '{"state": "forwarding"}', json.dumps({"state": "ended", "reason": attack})
    for lines in ((ended,), (open_, ended), (open_, '{"state": "alive"}', ended), (attack,), (open_, attack), ("[]",)):
        with pytest.raises(StreamLost) as caught:
            forwarding(monkeypatch, *lines)
        assert not unprintable(caught.value.problem.found)


def test_ports_of_the_control_plane_that_are_all_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StreamLost, match="unable to listen on any of the requested ports"):
        forwarding(
            monkeypatch, json.dumps({"state": "ended", "reason": "unable to listen on any of the requested ports"})
        )


@pytest.mark.parametrize(
    ("has_kubectl", "reason"), [(False, "kubectl is not installed there"), (True, "does not exist")]
)
def test_a_control_plane_without_kubectl_or_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, has_kubectl: bool, reason: str
) -> None:
    config = None if has_kubectl else kubeconfig.Kubeconfig("https://192.0.2.1:6443", "", None, None)
    monkeypatch.setattr("shutil.which", lambda *_, **__: "/bin/false" if has_kubectl else None)
    monkeypatch.setattr(kubeconfig, "load", lambda _: config)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    port_forward.main({"kubeconfig": str(tmp_path / "admin.conf")})
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "ended"
    assert reason in found["reason"]


def test_a_port_that_opens_late_is_the_first_that_is_reported() -> None:
    """On a slow machine kubectl takes longer than the time between two signs of life."""
    program = (
        "import subprocess, sys; from gpunodes.ansible.module_utils import port_forward; port_forward.BEAT_S = 0.1;"
        "port_forward._follow(subprocess.Popen(['sh', '-c', sys.argv[1]], stdout=-1, stderr=-1))"
    )
    argv = [sys.executable, "-c", program, "sleep 0.6; echo Forwarding from x; sleep 1.2"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        states = [json.loads(line)["state"] for line in process.stdout]
    assert (states[0], states[-1]) == ("forwarding", "ended")
    assert set(states[1:-1]) == {"alive"}


def test_a_kubectl_that_survives_its_end_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\ntrap '' TERM\nsleep 20\n")
    kubectl.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda *_, **__: str(kubectl))
    monkeypatch.setattr(kubeconfig, "load", lambda _: kubeconfig.Kubeconfig("https://x:6443", "", None, None))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(port_forward, "_END_S", 0.5)
    # As when the program has reported its end.
    monkeypatch.setattr(port_forward, "_follow", lambda _: time.sleep(0.5))
    began = time.monotonic()
    port_forward.main({"kubeconfig": "x", "namespace": "x", "local": 1, "port": 1, "pod": "x"})
    assert time.monotonic() - began < 10


def test_the_api_server_of_the_machine_itself_is_preferred() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = f"https://127.0.0.1:{server.getsockname()[1]}"
        config = kubeconfig.Kubeconfig("https://192.0.2.1:6443", "", None, None, own=own)
        assert port_forward._own(config) == [f"--server={own}"]
    assert port_forward._own(config) == []
    assert port_forward._own(kubeconfig.Kubeconfig("https://192.0.2.1:6443", "", None, None)) == []


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WrongInput, match=f"port {port} of this computer cannot be used: Address already in use"):
            forward.free(port)
    assert forward.free(port) == port


@pytest.mark.skipif(not jupyter.REAL, reason="no jupyter-lab is installed, and GPUNODES_JUPYTER names none")
def test_the_real_server_runs_a_cell(tmp_path: Path) -> None:
    """By the arguments, the token file and the readiness probe of the container."""
    container = objects(Place("x"), Request("x"), TOKEN)[-1]["spec"]["template"]["spec"]["containers"][0]
    with jupyter.real(tmp_path, container["args"], container["readinessProbe"]["exec"]["command"], TOKEN) as port:
        assert cell.run(port, TOKEN, "print(6 * 7)", 60) == "42\n"
        assert notebooks.seen(cell.run(port, TOKEN, notebooks._CELL, 60), Request("x", gpus=0))
        assert cell.run(port, TOKEN, "import os; print(os.environ.get('JUPYTER_TOKEN'))", 60) == "None\n"
        with pytest.raises(GpunodesError, match="ZeroDivisionError"):
            cell.run(port, TOKEN, "1 / 0", 60)
        with pytest.raises(GpunodesError, match="403 Forbidden"):
            cell.run(port, "x" * 43, "1", 60)
        assert cell._call(port, "GET", "/api", {}) != {}
