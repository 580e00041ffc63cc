"""The versions in a package source, served by a web server of the test."""

from __future__ import annotations

import gzip
import http.server
import lzma
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import source_versions
from gpunodes.ansible.module_utils.problem import MachineProblem

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
