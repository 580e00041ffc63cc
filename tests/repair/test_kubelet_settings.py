"""Settings of kubelets through a real API server; the kubelets are TLS servers of the test.

The API server proxies to no loopback address: they listen at an address of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import kubeconfig, process
from gpunodes.ansible.module_utils.cluster import kubelet_settings, nodes
from gpunodes.ansible.module_utils.kube_api import Limits
from gpunodes.ansible.module_utils.kubeadm import expected
from gpunodes.planner import reports
from gpunodes.planner.kubelet_layers import FIELDS

from tests.hostile import ATTACKS

from . import apiserver, kwok
from .apiserver import ApiServer

NODES = "/api/v1/nodes"
CONFIG_MAPS = "/api/v1/namespaces/kube-system/configmaps"
MANY = 1000
HANGS_S = 60
LIMIT_S = 20
"""Seconds for the whole: 8 for the kubelets, and the list of nodes on a machine with other work."""


def configuration(gates: Any) -> bytes:
    """As the kubelet writes it, in part."""
    shown = {"syncFrequency": "1m0s", "staticPodPath": "/etc/kubernetes/manifests", "podPidsLimit": 9, "maxPods": 110}
    return json.dumps({"kubeletconfig": {**shown, **({} if gates is None else {"featureGates": gates})}}).encode()


ANSWERS = {
    "none": configuration(None),
    "set": configuration({"ContainerCheckpoint": False, "AllBeta": True}),
    "attack": configuration(dict.fromkeys(ATTACKS, True)),
    "words": configuration({"ContainerCheckpoint": ATTACKS[0]}),
    "many": configuration({f"Gate{number}": True for number in range(501)}),
    "list": b"[]",
    "garbage": ATTACKS[6].encode(),
    "deep": b"[" * 100_000,
    "large": b'{"kubeletconfig": {"x": "' + b"x" * (1 << 20) + b'"}}',
}
"""What a kubelet sends, by the name of its node."""


class Kubelet(BaseHTTPRequestHandler):
    """The kubelet whose name is in the class; the API server keeps connections."""

    protocol_version = "HTTP/1.1"
    name = ""
    port = 0
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        if self.path != "/configz":
            self.send_error(404)
            return
        if self.name == "hangs":
            time.sleep(HANGS_S)
        body = ANSWERS.get(self.name, ANSWERS["none"])
        self.send_response(500 if self.name == "list" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            if self.name != "drips":
                self.wfile.write(body)
                return
            for byte in body:
                self.wfile.write(bytes([byte]))
                time.sleep(0.5)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def own_address() -> str:
    """An address of this machine that is not of its loopback interface; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(asking.getsockname()[0])


@contextlib.contextmanager
def kubelet(server: ApiServer, name: str) -> Iterator[type[Kubelet]]:
    """A kubelet; ``asked`` of its class counts requests, ``port`` is where it listens."""
    kind: Any = type(f"Kubelet-{name}", (Kubelet,), {"name": name})
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(server.folder / "server.crt", server.folder / "server.key")

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def get_request(self) -> tuple[Any, Any]:
            accepted, address = super().get_request()
            # The handshake is for the thread of the connection.
            return context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False), address

        def handle_error(self, *_: object) -> None:
            """The API server has left."""

    listening = Quiet((own_address(), 0), kind)
    kind.port = listening.server_port
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield kind
    listening.shutdown()
    listening.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with apiserver.running(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(autouse=True)
def place(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the control plane, in a cluster without nodes."""
    server.call("DELETE", NODES)
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))
    monkeypatch.setattr(process, "PATH", f"{apiserver.programs()[0].parent}:{process.PATH}")
    monkeypatch.setattr(expected, "FOLDER", str(tmp_path))


def add(server: ApiServer, name: str, port: int, *, ready: bool = True, own: bool = True) -> None:
    """A node whose kubelet listens at a port; ``own``: gpunodes has verified it."""
    made = kwok.node(name, {})
    if own:
        made["metadata"]["annotations"] = {nodes.READY_BOOT: f"{name}-boot-1"}
    made["status"] |= {
        "addresses": [{"type": "InternalIP", "address": own_address()}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
    }
    server.call("POST", NODES, made)


GATES = {"ContainerCheckpoint": False, "AllBeta": True}


def fields(found: dict[str, str]) -> dict[str, Any]:
    """The fields of a kubelet, out of their JSON."""
    return {name: json.loads(text) for name, text in found.items()}


def test_settings_of_ready_nodes_that_gpunodes_made(server: ApiServer) -> None:
    with kubelet(server, "set") as gated, kubelet(server, "none") as plain:
        add(server, "set", gated.port)
        add(server, "none", plain.port)
        add(server, "foreign", plain.port, own=False)
        add(server, "not-ready", plain.port, ready=False)
        found = kubelet_settings.report([*FIELDS, "maxPods"])
    assert (found["problem"], found["cluster"], found["silent"]) == ("", {}, {})
    assert {name: fields(each) for name, each in found["nodes"].items()} == {
        "set": {"featureGates": GATES, "podPidsLimit": 9, "maxPods": 110},
        "none": {"podPidsLimit": 9, "maxPods": 110},
    }
    assert (gated.asked, plain.asked) == (1, 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("apiVersion: v1\nkind: KubeletConfiguration\n", {}),
        (
            "apiVersion: v1\nkind: KubeletConfiguration\nsyncFrequency: 0s\nfeatureGates:\n  AllBeta: true\n",
            {"featureGates": {"AllBeta": True}},
        ),
        ("{apiVersion: v1, kind: KubeletConfiguration, cgroupDriver: 'systemd'}", {"cgroupDriver": "systemd"}),
        ("apiVersion: v1\nkind: [\nfeatureGates:\n", "cannot be read"),
    ],
)
def test_settings_of_the_cluster(server: ApiServer, text: str, found: object) -> None:
    server.call("POST", CONFIG_MAPS, {"metadata": {"name": "kubelet-config"}, "data": {"kubelet": text}})
    with kubelet(server, "none") as plain:
        add(server, "none", plain.port)
        report = kubelet_settings.report(FIELDS)
    server.call("DELETE", f"{CONFIG_MAPS}/kubelet-config")
    if isinstance(found, dict):
        assert (fields(report["cluster"]), report["problem"]) == (found, "")
    else:
        assert str(found) in report["problem"]
    assert reports.kubelet_settings_problem(report) == ""


def test_kubelets_that_do_not_respond_or_lie_are_named_in_seconds(server: ApiServer) -> None:
    with contextlib.ExitStack() as running:
        for name in (*ANSWERS, "hangs", "drips"):
            add(server, name, running.enter_context(kubelet(server, name)).port)
        add(server, "closed", apiserver.free_port())
        report, seconds = timed()
    assert set(report["nodes"]) == {"set", "none", "attack", "words", "many"}, "the controller judges the fields"
    assert reports.kubelet_settings_problem(report) == ""
    silent = report["silent"]
    for name in ("garbage", "deep"):
        assert silent[name].startswith("its answer has no configuration"), name
    for name in ("large", "hangs", "drips"):
        assert silent[name] == "no complete answer within 4 s", name
    assert "connection refused" in silent["closed"]
    assert "Internal Server Error" in silent["list"]
    assert seconds < LIMIT_S, "kubelets that hang are not waited for"


def test_an_api_that_does_not_respond_is_a_problem(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = server.folder / "dead.conf"
    dead.write_text(server.kubeconfig.read_text().replace(f":{server.port}", f":{apiserver.free_port()}"))
    monkeypatch.setattr(kubeconfig, "ADMIN", str(dead))
    monkeypatch.setattr(kubelet_settings, "_PATIENCE_S", 0)
    assert "does not respond" in kubelet_settings.report(FIELDS)["problem"]
    monkeypatch.setattr(kubeconfig, "ADMIN", str(server.folder / "none.conf"))
    assert kubelet_settings.report(FIELDS) == {"problem": "", "cluster": {}, "nodes": {}, "silent": {}}


# The last test: it leaves its nodes.
def test_a_thousand_kubelets_need_seconds(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One list, and one request for each; two hundred that hang cost the limit of the whole at most."""
    with kubelet(server, "set") as gated, kubelet(server, "hangs") as hanging:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: add(server, f"n{number}", gated.port), range(MANY)))
        with monkeypatch.context() as patient:
            # All of them, also on a machine with other work.
            patient.setattr(kubelet_settings, "_KUBELET", Limits(call_s=60, whole_s=60))
            patient.setattr(kubelet_settings, "_WHOLE_S", 300.0)
            before = processor_s(server)
            report, seconds = timed()
        own, of_server = (after - earlier for after, earlier in zip(processor_s(server), before, strict=True))
        print(f"{MANY} kubelets: {seconds:.1f} s, {len(json.dumps(report)) >> 10} KiB")
        print(f"of a processor: {of_server:.1f} s the API server, {own:.1f} s the module and all kubelets")
        assert (len(report["nodes"]), report["silent"], gated.asked) == (MANY, {}, MANY)
        for number in range(200):
            add(server, f"hangs{number}", hanging.port)
        report, seconds = timed()
    print(f"with 200 that hang: {seconds:.1f} s, {len(report['nodes'])} known, {len(report['silent'])} unknown")
    assert {f"hangs{number}" for number in range(200)} <= set(report["silent"])
    assert report["nodes"], "those that hang do not use up the time of all"
    assert len(report["nodes"]) + len(report["silent"]) == MANY + 200
    assert seconds < LIMIT_S


def processor_s(server: ApiServer) -> tuple[float, float]:
    """The processor time of this process, which has the kubelets too, and of the API server."""
    fields = Path(f"/proc/{server.processes[1].pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed() -> tuple[dict[str, Any], float]:
    began = time.monotonic()
    report = kubelet_settings.report(FIELDS)
    return report, time.monotonic() - began
