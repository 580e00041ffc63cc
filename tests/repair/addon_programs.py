"""The programs of add-ons for tests: those of the lab's mirror, with the arguments and rights of their manifests.

Compiling them takes long: tests run those that a lab has built (`lab up --images addons`), and build the others only
with GPUNODES_BUILD_PROGRAMS=1. No pods run here; what a kubelet would do, the tests do.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from gpunodes.ansible.module_utils.cluster import optional
from gpunodes.lab.layout import cache_dir
from gpunodes.lab.mirror import gobuild, pins, store
from gpunodes.lab.standin import pins as standin
from gpunodes.planner import addons

from tests.programs import ending
from tests.repair import apiserver
from tests.repair.apiserver import ApiServer
from tests.unit.test_addon_role import with_settings

BUILD = "GPUNODES_BUILD_PROGRAMS"
LIMIT_S = 180.0
NODE = "gpu-1"
MERGE = "application/merge-patch+json"


def program(component: str, name: str) -> Path:
    """A program of the lab's mirror, or of its stand-in GPUs."""
    known = pins.load()
    wanted = known.components.get(component) or standin.load()[component]
    home = apiserver.cache() if component in known.components else cache_dir() / "standin"
    folder = gobuild.place(wanted, home)
    if not folder.exists():
        if not os.environ.get(BUILD):
            pytest.skip(f"{component} was not built; {BUILD}=1 builds it")
        with store.locked(home, print):
            gobuild.programs(wanted, gobuild.toolchain(home, known, print), home, print)
    return folder / name


def container(objects: tuple[dict[str, Any], ...], name: str) -> dict[str, Any]:
    """A container of an add-on."""
    workloads = [each for each in objects if each["kind"] in {"Deployment", "DaemonSet"}]
    found = [one for each in workloads for one in each["spec"]["template"]["spec"]["containers"]]
    return next(one for one in found if one["name"] == name)


def until(what: str, seen: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := seen()):
        assert time.monotonic() < deadline, what
        time.sleep(0.5)
    return found


class Kubelet(http.server.BaseHTTPRequestHandler):
    """Serves the usage of a node, as a kubelet does: to who has a token."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        now = time.time()
        stamp = int(now * 1000)
        of = '{container="c",namespace="default",pod="p"}'
        usage = {
            "node_cpu_usage_seconds_total": now / 2,
            "node_memory_working_set_bytes": 1048576,
            f"container_cpu_usage_seconds_total{of}": now / 4,
            f"container_memory_working_set_bytes{of}": 524288,
            f"container_start_time_seconds{of}": now - 3600,
        }
        text = "".join(f"{name} {value:.3f} {stamp}\n" for name, value in usage.items())
        allowed = self.headers.get("Authorization", "").startswith("Bearer ey")
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        if allowed:
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[ApiServer]:
    """An API server that checks rights, and aggregates other servers."""
    more: dict[str, object] = {
        "authorization-mode": "RBAC",
        "requestheader-client-ca-file": folder / "ca.crt",
        "requestheader-allowed-names": "front-proxy-client",
    }
    with apiserver.running(folder, more) as made:
        yield made


@contextlib.contextmanager
def node(server: ApiServer) -> Iterator[None]:
    """A node whose kubelet has a certificate of the cluster."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.folder / "server.crt", server.folder / "server.key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Kubelet) as serving:
        serving.socket = context.wrap_socket(serving.socket, server_side=True)
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        server.call("POST", "/api/v1/nodes", {"metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}}})
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": serving.server_port}},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}],
        }
        server.call("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": status}, MERGE)
        yield
        serving.shutdown()


def installed(name: str, **settings: Any) -> tuple[dict[str, Any], ...]:
    """The objects of an add-on, applied."""
    objects = with_settings(name, **settings)
    optional.up(list(objects), name, addons.chosen(name).version, False)
    return objects


def token(server: ApiServer, space: str, account: str) -> str:
    made = server.call("POST", f"/api/v1/namespaces/{space}/serviceaccounts/{account}/token", {"spec": {}})
    return str(made["status"]["token"])


def kubeconfig_of(server: ApiServer, space: str, account: str) -> Path:
    """A kubeconfig with the rights of a pod's account."""
    document = yaml.safe_load(server.kubeconfig.read_text())
    document["users"][0]["user"] = {"token": token(server, space, account)}
    path = server.folder / f"{account}.conf"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document))
    return path


@contextlib.contextmanager
def running(server: ApiServer, name: str, argv: list[str], **environment: str) -> Iterator[Path]:
    """A program, ended afterwards; gives the file of its output."""
    path = server.folder / f"{name}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            ending(argv), env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            yield path
            assert process.poll() is None, path.read_text()[-3000:]
        finally:
            process.terminate()
            process.wait(60)


def get(address: str, bearer: str = "") -> str:
    """The response of an address on loopback, "" if it does not respond with one."""
    # metrics-server makes its certificate at its start, which nobody can verify.
    context = ssl._create_unverified_context()  # noqa: S323 - on loopback
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(address)  # noqa: S310 - on loopback
    if bearer:
        request.add_header("Authorization", f"Bearer {bearer}")
    try:
        with opener.open(request, timeout=30) as answer:
            return str(answer.read().decode())
    except (OSError, urllib.error.URLError):
        return ""


def replaced(words: list[str], changed: Mapping[str, object]) -> list[str]:
    """Arguments with other values: those of a pod's paths and ports."""
    found = dict(word.partition("=")[::2] for word in words)
    assert changed.keys() <= found.keys()
    return [f"{word}={value}" if value else word for word, value in (found | dict(changed)).items()]
