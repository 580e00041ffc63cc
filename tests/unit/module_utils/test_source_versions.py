"""The versions in a package source, served by a web server of the test."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import lzma
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import facts, image_query, packages, source_versions, upgrade_facts
from gpunodes.ansible.module_utils.host import keys
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult

# As in developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/, shortened.
PACKAGES = """\
Package: nvidia-open
Version: 580.65.06-1
Architecture: amd64
Description: NVIDIA driver metapackage
 Version: 1.2.3 in a text

Package: nvidia-open
Version: 580.105.08-1
Architecture: amd64

Package: nvidia-open
Version: 580.95.05-1
Architecture: amd64

Package: cudnn9-cuda-13
Version: 9.14.0.64-1

Package: cuda-toolkit-13-0
Version: 13.0.2\x1b[2J
"""
RELEASE = "Origin: NVIDIA\nMD5Sum:\n d41d8 0 Other\nSHA256:\n 9a0 {size} {name}\n"
PRIMARY = """\
<metadata packages="2"><package type="rpm">
  <name>nvidia-open</name>
  <arch>noarch</arch>
  <version epoch="3" ver="580.95.05" rel="1.el9"/>
</package><package type="rpm"><name>nvidia-open</name><arch>noarch</arch>
  <version epoch="3" ver="590.44.01" rel="1.el9"/></package></metadata>
"""
NAMES = ("nvidia-open", "cudnn9-cuda-13", "cuda-toolkit-13-0", "absent")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path))  # type: ignore[arg-type]  # the server passes them on

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("Packages", PACKAGES.encode()),
        ("Packages.gz", gzip.compress(PACKAGES.encode())),
        ("Packages.xz", lzma.compress(PACKAGES.encode())),
    ],
)
def test_versions_of_a_debian_source_are_listed_newest_first(
    source: str, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / "InRelease").write_text(RELEASE.format(size=len(content), name=name))
    (tmp_path / name).write_bytes(content)
    assert source_versions.read(f"{source}/InRelease", NAMES) == {
        "cudnn9-cuda-13": ["9.14.0.64-1"],
        "nvidia-open": ["580.105.08-1", "580.95.05-1", "580.65.06-1"],
    }


def test_versions_of_an_rpm_source(source: str, tmp_path: Path) -> None:
    (tmp_path / "repodata").mkdir()
    location = '<data type="primary">\n<location href="repodata/p-primary.xml.gz"/></data>'
    (tmp_path / "repodata/repomd.xml").write_text(f"<repomd>{location}</repomd>")
    (tmp_path / "repodata/p-primary.xml.gz").write_bytes(gzip.compress(PRIMARY.encode()))
    found = source_versions.read(f"{source}/repodata/repomd.xml", NAMES)
    assert found == {"nvidia-open": ["590.44.01-1.el9", "580.95.05-1.el9"]}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("repodata/repomd.xml", b"<repomd/>"),
        ("repodata/repomd.xml", b'<data type="primary"><location href="../../../etc/passwd"/>'),
        ("repodata/repomd.xml", b'<data type="primary"><location href="p.xml.zst"/>'),
        ("InRelease", b" 0 1 Packages.gz\n"),
        ("none", b""),
    ],
)
def test_a_source_that_cannot_be_read(source: str, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "repodata").mkdir()
    (tmp_path / "Packages.gz").write_bytes(b"no archive")
    (tmp_path / "p.xml.zst").write_bytes(b"x")
    (tmp_path / name).write_bytes(content)
    url = f"{source}/{'InRelease' if name == 'none' else name}"
    if name == "none":
        (tmp_path / "InRelease").unlink(missing_ok=True)
    with pytest.raises(MachineProblem):
        source_versions.read(url, NAMES)


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"], ids=["head", "body"])
def test_a_source_that_answers_byte_by_byte_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    """A limit for each byte let a source, or who is in between, keep every command for days."""
    for each in (source_versions, upgrade_facts, image_query, keys, facts):
        monkeypatch.setattr(each, "_WHOLE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip(connected: socket.socket) -> None:
            with connected, contextlib.suppress(OSError):
                connected.sendall(begin)
                while True:
                    connected.sendall(b"H")
                    time.sleep(0.1)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=drip, args=server.accept()[:1], daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(MachineProblem, match="no complete response within"):
            source_versions.read(f"{url}/InRelease", ["x"])
        with pytest.raises(TimeoutError):
            upgrade_facts._fetched(f"{url}/Packages", None)
        with pytest.raises(MachineProblem, match="cannot be fetched: no complete response within"):
            keys.fetch(f"{url}/key")
        if not begin:
            began, check = time.monotonic(), facts.SourceCheck({"name": "x", "url": url, "key": f"{url}/key"})
            check.start()
            check.join()
            assert time.monotonic() - began < 5
            assert str(check.result["error"]).startswith("it does not respond: no complete response within")
            assert "no complete response" in image_query.missing(["x/a:1"], {"x": url}, None)[1]


@pytest.mark.parametrize("url", ["file:///etc/hosts", "ftp://127.0.0.1/x"])
def test_an_index_is_fetched_over_http_only(url: str) -> None:
    """An index names the address of the next one."""
    with pytest.raises(MachineProblem, match="http or https"):
        upgrade_facts._fetched(url, None)


DOCKER = "Package: containerd.io\nVersion: 2.1.4-1~debian.13~trixie\n"
RUNTIME = {"docker": ["containerd.io"], "system": ["containerd"]}


def served(source: str, name: str, folder: str = "") -> dict[str, str]:
    return {"name": name, "url": f"{source}/InRelease", "index": folder}


def test_the_index_of_a_source_with_components(source: str, tmp_path: Path) -> None:
    """As Docker's: dists/trixie/InRelease, and beside it stable/binary-amd64/Packages.gz."""
    folder = "stable/binary-amd64/"
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "InRelease").write_text(RELEASE.format(size=9, name=f"{folder}Packages.gz"))
    (tmp_path / folder / "Packages.gz").write_bytes(gzip.compress(DOCKER.encode()))
    expected = {"docker": {"containerd.io": ["2.1.4-1~debian.13~trixie"]}}
    assert source_versions.of_sources([served(source, "docker", folder)], RUNTIME, {}, None) == expected
    system = {"id": "debian", "version": "13", "codename": "trixie"}
    given = {"name": "docker", "url": source, "suite": "{codename}", "index": "stable/binary-{package_arch}/"}
    filled = facts.filled(given, system)
    assert filled["url"] == f"{source}/dists/trixie/InRelease"
    assert filled["index"] in {"stable/binary-amd64/", "stable/binary-arm64/"}


def test_only_what_is_not_installed_is_looked_for(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "InRelease").write_text("")
    (tmp_path / "Packages").write_text(PACKAGES)
    wanted = {"nvidia": ["nvidia-open"], "kubernetes": ["kubelet"]}
    sources = [served(source, "nvidia"), served(f"{source}/absent", "kubernetes")]
    found = source_versions.of_sources(sources, wanted, {"kubelet": None}, None)
    assert found == {"nvidia": {"nvidia-open": ["580.105.08-1", "580.95.05-1", "580.65.06-1"]}}
    monkeypatch.setattr(source_versions, "read", None)
    assert source_versions.of_sources(sources[1:], wanted, {"kubelet": "1.36.3-1.1"}, None) == {}


class Listing:
    """A machine whose apt lists containerd; ``warns`` as apt does of a source that it cannot reach."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, warns: str = "") -> None:
        self.calls: list[tuple[str, ...]] = []
        self._warns = warns
        monkeypatch.setattr(packages, "detect", packages.Apt)
        monkeypatch.setattr(source_versions, "run", lambda argv, *_: self.run(*argv))

    def run(self, *argv: str) -> CommandResult:
        self.calls.append(argv)
        listed = "containerd | 1.7.24~ds1-6+b4 | http://deb.debian.org/debian trixie/main amd64 Packages\n"
        return CommandResult(argv, 0, listed if "madison" in argv else "", self._warns)


def test_the_systems_own_sources_are_read_again_where_they_are_used(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine's lists of packages may be as old as its image; these are read into a folder of their own."""
    kubernetes, docker = served(source, "kubernetes"), served(source, "docker")
    machine = Listing(monkeypatch)
    expected = {"system": {"containerd": ["1.7.24~ds1-6+b4"]}}
    assert source_versions.of_sources([kubernetes], RUNTIME, {}, None) == expected
    lists = {word for call in machine.calls for word in call if "Dir::State::Lists" in word}
    assert len(machine.calls) == 2
    assert len(lists) == 1
    # Docker's source is used, containerd.io is installed, or no source is checked (--skip-phase preflight).
    monkeypatch.setattr(source_versions, "read", lambda *_: {})
    assert source_versions.of_sources([kubernetes, docker], RUNTIME, {}, None) == {"docker": {}}
    assert source_versions.of_sources([kubernetes], RUNTIME, {"containerd.io": "2.1.4-1"}, None) == {}
    assert source_versions.of_sources([], RUNTIME, {}, None) == {}
    Listing(monkeypatch, "W: Failed to fetch http://deb.debian.org/debian/dists/trixie/InRelease")
    assert source_versions.of_sources([kubernetes], RUNTIME, {}, None) == {}, "what is not known refuses nothing"
