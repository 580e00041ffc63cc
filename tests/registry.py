"""The real registry of `gpunodes registry up` on loopback, with its configuration and its Secret.

The lab's mirror builds it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpunodes.lab.layout import cache_dir
from gpunodes.lab.mirror import gobuild, pins, store
from gpunodes.planner import registry

from tests.programs import ending

_START_S = 120


@dataclass(frozen=True, slots=True)
class Running:
    """A registry that runs."""

    port: int
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


def program() -> Path:
    """The registry, built by the lab's mirror unless its cache has it."""
    known, cache = pins.load(), cache_dir() / "mirror"
    with store.locked(cache, print):
        go = gobuild.toolchain(cache, known, print)
        return gobuild.programs(known.components["registry"], go, cache, print) / "registry"


@contextlib.contextmanager
def running(folder: Path, secret: Mapping[str, str]) -> Iterator[Running]:
    """The registry with this content of its Secret, and the cluster's configuration but for paths and port."""
    for name in ("tls.crt", "tls.key", "htpasswd"):
        (folder / name).write_text(secret[name])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = registry.CONFIG
    for old, new in (
        (f"addr: :{registry.PORT}", f"addr: 127.0.0.1:{port}"),
        ("/run/secrets/gpunodes-registry", str(folder)),
        ("/var/lib/registry", str(folder / "data")),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "config.yml").write_text(text)
    found = Running(port, folder)
    [container] = registry.deployment(
        registry.Request("10.96.0.15:5000", "x", "x", "x", []), "", ""
    )["spec"]["template"]["spec"]["containers"]  # fmt: skip
    environment = {"PATH": os.environ["PATH"], **{each["name"]: each["value"] for each in container["env"]}}
    with (folder / "log").open("wb") as log:
        argv = [program(), *container["command"][1:-1], folder / "config.yml"]
        process = subprocess.Popen(ending(argv), env=environment, stdout=log, stderr=log)
    try:
        _wait(found, process)
        yield found
    finally:
        process.terminate()
        process.wait(30)


def _wait(found: Running, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", found.port), 1):
            return
        assert process.poll() is None, found.log
        assert time.monotonic() < deadline, found.log
        time.sleep(0.1)
