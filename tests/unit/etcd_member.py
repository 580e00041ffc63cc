"""A real etcd member with TLS on loopback, for tests; programs that the lab built, if its cache has them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils.process import CommandResult

from tests.programs import ending

_NEEDED = ("server", "etcdctl", "etcdutl")
_START_S = 30


def programs() -> Path | None:
    """The newest folder of the lab's cache with all programs of etcd; ``GPUNODES_ETCD`` names another folder."""
    named = os.environ.get("GPUNODES_ETCD")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpunodes" / "mirror"
    folders = [Path(named)] if named else sorted(cache.glob("etcd-*"), reverse=True)
    return next((each for each in folders if all((each / name).is_file() for name in _NEEDED)), None)


needs_etcd = pytest.mark.skipif(
    programs() is None,
    reason="the lab's cache has no etcd with etcdctl and etcdutl (built by `make lab`, or GPUNODES_ETCD)",
)


@dataclass
class Member:
    """A running member; ``execute`` has the signature of ``containers.execute``."""

    folder: Path
    port: int

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def execute(self, _: str, argv: Sequence[str], timeout_s: int) -> CommandResult:
        """Run a program of the container, which here is one of the controller."""
        found = programs()
        assert found
        words = [each.replace("https://127.0.0.1:2379", f"https://127.0.0.1:{self.port}") for each in argv]
        done = subprocess.run(
            [str(found / words[0]), *words[1:]],
            capture_output=True,
            timeout=timeout_s,
            check=False,
            text=True,
            errors="replace",
        )
        return CommandResult(words, done.returncode, done.stdout, done.stderr)

    def etcdctl(self, *arguments: str) -> str:
        pki = self.folder / "pki"
        argv = ["etcdctl", f"--endpoints=https://127.0.0.1:{self.port}", f"--cacert={pki}/ca.crt"]
        argv += [f"--cert={pki}/healthcheck-client.crt", f"--key={pki}/healthcheck-client.key", *arguments]
        done = self.execute("", argv, 30)
        assert done.ok, done.text
        return done.out


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def certificates(folder: Path, days: int = 30) -> None:
    """A CA and a pair for server and client, as kubeadm names them."""
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    openssl(
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
        "-subj",
        "/CN=etcd-ca",
    )
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n")
    openssl(
        "req",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-keyout",
        "server.key",
        "-out",
        "csr",
        "-subj",
        "/CN=localhost",
    )
    openssl(
        *("x509", "-req", "-in", "csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-days", str(days), "-extfile", "san", "-out", "server.crt"),
    )
    for name in ("crt", "key"):
        shutil.copy(folder / f"server.{name}", folder / f"healthcheck-client.{name}")


@contextmanager
def running(folder: Path) -> Iterator[Member]:
    """A member with data in ``folder``/data, started on free ports; ended with the block."""
    found = programs()
    assert found
    if not (folder / "pki").exists():
        certificates(folder / "pki")
    port, peer = free_port(), free_port()
    pki = folder / "pki"
    client, own = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    argv = [
        *(str(found / "server"), "--name=control-1", f"--data-dir={folder}/data"),
        *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
        *(f"--listen-peer-urls={own}", f"--initial-advertise-peer-urls={own}", f"--initial-cluster=control-1={own}"),
        *(f"--cert-file={pki}/server.crt", f"--key-file={pki}/server.key"),
        *(f"--trusted-ca-file={pki}/ca.crt", "--client-cert-auth", "--logger=zap", "--log-outputs=stderr"),
    ]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(ending(argv), stdout=log, stderr=log)
    member = Member(folder, port)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                member.etcdctl("endpoint", "health")
                break
            except AssertionError:
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                time.sleep(0.2)
        yield member
    finally:
        process.terminate()
        process.wait(20)
