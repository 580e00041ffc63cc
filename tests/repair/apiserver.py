"""A real API server on loopback: etcd and kube-apiserver of the lab's mirror, without machines.

No other part of a control plane runs: no scheduler, no controllers. So nothing taints or evicts by itself; all changes
come from the tests, KWOK or gpunodes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpunodes.lab.layout import cache_dir
from gpunodes.lab.mirror import gobuild, pins, store

from tests.programs import ending

MINOR = "1.36"
_START_S = 180


@dataclass
class ApiServer:
    """A running API server, and the kubeconfig of its administrator."""

    folder: Path
    port: int
    kubeconfig: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """Send a request of the test itself; the response's JSON."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        context.load_cert_chain(self.folder / "admin.crt", self.folder / "admin.key")
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}", data, {"Content-Type": kind}, method=method
        )
        with opener.open(request, timeout=30) as answer:
            return json.loads(answer.read() or b"{}")


def cache() -> Path:
    """The lab's cache of built programs."""
    return cache_dir() / "mirror"


def programs() -> tuple[Path, Path]:
    """kube-apiserver and etcd, built by the lab's mirror unless its cache has them."""
    known = pins.load()
    minor = known.minors[MINOR]
    # A lab that starts at the same time builds the same programs in the same cache.
    with store.locked(cache(), print):
        go = gobuild.toolchain(cache(), known, print)
        kubernetes = gobuild.programs(minor.kubernetes, go, cache(), print)
        return kubernetes / "kube-apiserver", gobuild.programs(minor.etcd, go, cache(), print) / "server"


def kubectl() -> Path:
    """kubectl of the same build."""
    return programs()[0].with_name("kubectl")


@contextlib.contextmanager
def running(folder: Path, more: Mapping[str, object] | None = None) -> Iterator[ApiServer]:
    """Start both programs in ``folder``; they are stopped afterwards. ``more`` are flags of the API server."""
    apiserver, etcd = programs()
    _certificates(folder)
    client, peer, secure = (free_port() for _ in range(3))
    server = ApiServer(folder, secure, folder / "admin.conf")
    _kubeconfig(server)
    address, between = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    try:
        flags: dict[str, object] = {
            "data-dir": folder / "etcd",
            "listen-client-urls": address,
            "advertise-client-urls": address,
            "listen-peer-urls": between,
            "initial-advertise-peer-urls": between,
            "initial-cluster": f"default={between}",
            "unsafe-no-fsync": "true",
        }
        _start(server, "etcd", etcd, flags)
        flags = {
            "etcd-servers": address,
            "secure-port": secure,
            "bind-address": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "cert-dir": folder / "certs",
            "tls-cert-file": folder / "server.crt",
            "tls-private-key-file": folder / "server.key",
            "client-ca-file": folder / "ca.crt",
            "authorization-mode": "AlwaysAllow",
            "allow-privileged": "true",  # as kubeadm has it
            "service-account-issuer": "https://test",
            "service-account-key-file": folder / "server.pub",
            "service-account-signing-key-file": folder / "server.key",
            "service-cluster-ip-range": "10.96.0.0/16",
            # No controller would create service accounts, or remove the taint of new nodes.
            "disable-admission-plugins": "ServiceAccount,TaintNodesByCondition",
        }
        _start(server, "apiserver", apiserver, flags | dict(more or {}))
        _wait(server)
        yield server
    finally:
        for process in reversed(server.processes):
            process.terminate()
            process.wait(timeout=60)


def controllers(server: ApiServer, names: str) -> None:
    """Start kube-controller-manager with these controllers; it is stopped with the others."""
    flags = {
        "kubeconfig": server.kubeconfig,
        "controllers": names,
        "cluster-signing-cert-file": server.folder / "ca.crt",
        "cluster-signing-key-file": server.folder / "ca.key",
        "service-account-private-key-file": server.folder / "server.key",
        "root-ca-file": server.folder / "ca.crt",
        "leader-elect": "false",
        "bind-address": "127.0.0.1",
        "secure-port": free_port(),
        "cert-dir": server.folder / "controllers",
    }
    _start(server, "controllers", programs()[0].with_name("kube-controller-manager"), flags)


def _start(server: ApiServer, name: str, program: Path, flags: Mapping[str, object]) -> None:
    words = [str(program), *(f"--{flag}={value}" for flag, value in flags.items())]
    with (server.folder / f"{name}.log").open("wb") as log:
        server.processes.append(subprocess.Popen(ending(words), stdout=log, stderr=log, stdin=subprocess.DEVNULL))


def _wait(server: ApiServer) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            server.call("GET", "/readyz")
        except json.JSONDecodeError:
            return  # the response is "ok"
        except OSError:
            output = (server.folder / "apiserver.log").read_text()[-2000:]
            assert not [process for process in server.processes if process.poll() is not None], output
            assert time.monotonic() < deadline, output
            time.sleep(0.3)


def free_port() -> int:
    """A port of the loopback address without a listener."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _certificates(folder: Path) -> None:
    key = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    # As kubeadm's certificates have it; Python 3.13 wants it. For openssl all of these are authorities.
    key += ["-addext", "keyUsage=critical,digitalSignature,keyEncipherment,keyCertSign"]
    signing = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")]
    for name, subject, more in (
        ("ca", "/CN=ca", []),
        ("server", "/CN=server", [*signing, "-addext", "subjectAltName=IP:127.0.0.1"]),
        ("admin", "/O=system:masters/CN=admin", [*signing, "-addext", "extendedKeyUsage=clientAuth"]),
    ):
        files = ["-subj", subject, "-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
        subprocess.run([*key, "-days", "2", *more, *files], check=True, capture_output=True)
    public = ["openssl", "pkey", "-in", str(folder / "server.key"), "-pubout", "-out", str(folder / "server.pub")]
    subprocess.run(public, check=True)


def _kubeconfig(server: ApiServer) -> None:
    """As kubeadm writes them: everything inside."""

    def encoded(name: str) -> str:
        return base64.b64encode((server.folder / name).read_bytes()).decode()

    server.kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: test\n  cluster:\n"
        f"    certificate-authority-data: {encoded('ca.crt')}\n    server: https://127.0.0.1:{server.port}\n"
        "users:\n- name: admin\n  user:\n"
        f"    client-certificate-data: {encoded('admin.crt')}\n    client-key-data: {encoded('admin.key')}\n"
        "contexts:\n- name: test\n  context: {cluster: test, user: admin}\ncurrent-context: test\n"
    )
    server.kubeconfig.chmod(0o600)
