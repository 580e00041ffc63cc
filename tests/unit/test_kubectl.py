"""kubectl of the image: where it is from, its checksum, and what happens without its publisher."""

from __future__ import annotations

import functools
import hashlib
import http.server
import re
import runpy
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.lab.mirror import oci
from gpunodes.lab.mirror.tree import TreeEntry

ROOT = Path(__file__).parents[2]
IMAGE: dict[str, Any] = runpy.run_path(str(ROOT / "bootstrap" / "image.py"))
PROGRAM = b"#!/bin/sh\necho Client Version: v0.0.0\n"
DIGEST = hashlib.sha256(PROGRAM).hexdigest()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[str]:
    """The URL of a server on loopback that has a program."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "kubectl").write_bytes(PROGRAM)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the class that it replaces
            """Print nothing."""

    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def obtain(target: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the script, whose only reachable server is on loopback."""
    environment = {"PYTHONPATH": str(ROOT / "bootstrap"), "PATH": "/usr/bin:/bin", "no_proxy": "127.0.0.1"}
    environment["https_proxy"] = "http://127.0.0.1:9"
    argv = [sys.executable, str(ROOT / "bootstrap" / "kubectl.py"), str(target), *options]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


def test_the_pinned_version_is_of_the_default_minor() -> None:
    pin = tomllib.loads((ROOT / "bootstrap" / "kubectl.toml").read_text())
    defaults = yaml.safe_load((ROOT / "roles/settings/defaults/main.yml").read_text())
    assert pin["version"].rpartition(".")[0] == defaults["gpunodes_kubernetes_version"]
    assert set(pin["sha256"]) == {"amd64", "arm64"}
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in pin["sha256"].values())
    assert pin["url"].startswith("https://dl.k8s.io/")


def test_a_program_of_the_right_checksum_is_on_path(mirror: str, tmp_path: Path) -> None:
    target = tmp_path / "kubectl"
    done = obtain(target, "--from", f"{mirror}/kubectl", "--sha256", DIGEST.upper())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    tree = list(IMAGE["with_program"](target, tmp_path / "layer"))
    [entry] = [entry for entry in tree if entry.path.endswith("kubectl")]
    assert (entry.path, entry.mode) == ("/usr/local/bin/kubectl", 0o755)
    assert isinstance(entry, TreeEntry)
    assert (tmp_path / "layer/usr/local/bin/kubectl").read_bytes() == PROGRAM
    assert "/usr/local/bin:" in oci.config(oci.OciImage("some", (), ()), "amd64").decode()


@pytest.mark.parametrize("digest", ["0" * 64, ""], ids=["another", "the-pinned-one"])
def test_a_program_of_a_wrong_checksum_is_refused(mirror: str, tmp_path: Path, digest: str) -> None:
    """In one sentence, and nothing is written; without a checksum it must be the pinned program."""
    options = ("--sha256", digest) if digest else ()
    done = obtain(tmp_path / "kubectl", "--from", f"{mirror}/kubectl", *options)
    assert done.returncode == 2
    assert re.fullmatch(rf"{mirror}/kubectl has the SHA-256 {DIGEST}; wanted: [0-9a-f]{{64}}.*\n", done.stderr)
    assert not (tmp_path / "kubectl").exists()


@pytest.mark.long
def test_a_file_serves_as_well_and_stays_as_it_is(tmp_path: Path) -> None:
    """The second run does not touch the file: make would build the image again."""
    options = ("--from", str(tmp_path / "own"), "--sha256", DIGEST)
    (tmp_path / "own").write_bytes(PROGRAM)
    assert obtain(tmp_path / "kubectl", *options).returncode == 0
    before = (tmp_path / "kubectl").stat()
    assert before.st_mode & 0o777 == 0o755
    assert obtain(tmp_path / "kubectl", *options).returncode == 0
    assert (tmp_path / "kubectl").stat().st_mtime_ns == before.st_mtime_ns


def test_without_the_publisher_the_image_has_none(tmp_path: Path) -> None:
    """The build goes on: it says so, and the file is empty."""
    done = obtain(tmp_path / "kubectl")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"kubectl 1\S+ is left out: https://dl\.k8s\.io/\S+ cannot be read: .*\n", done.stdout)
    assert (tmp_path / "kubectl").read_bytes() == b""


@pytest.mark.long
def test_a_source_that_is_named_must_have_it(mirror: str, tmp_path: Path) -> None:
    for source in (f"{mirror}/absent", str(tmp_path / "absent")):
        done = obtain(tmp_path / "kubectl", "--from", source)
        assert done.returncode == 1
        assert done.stderr.startswith(f"{source} cannot be read: ")
        assert not (tmp_path / "kubectl").exists()


def test_none_leaves_it_out(tmp_path: Path) -> None:
    (tmp_path / "kubectl").write_bytes(PROGRAM)
    assert obtain(tmp_path / "kubectl", "--from", "none").returncode == 0
    assert (tmp_path / "kubectl").read_bytes() == b""
    assert obtain(tmp_path / "kubectl", "--sha256", DIGEST).returncode == 2
