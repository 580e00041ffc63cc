"""The built image: its files, and whether its programs run, from its layers unpacked into a folder.

`make test-package` builds it. Running its programs needs root or user namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHIVES = sorted((ROOT / "build").glob("gpunodes-image-*.oci.tar"))
pytestmark = pytest.mark.skipif(not ARCHIVES, reason="needs the image; run `make image`")
UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root file system of a container of the image."""
    folder = tmp_path_factory.mktemp("image")
    root = folder / "root"
    root.mkdir()
    with tarfile.open(ARCHIVES[0]) as tar:
        tar.extractall(folder, filter="data")
    [document] = json.loads((folder / "manifest.json").read_text())
    for layer in document["Layers"]:
        subprocess.run(["tar", "--zstd", "-xf", folder / layer, "-C", root, "--no-same-owner"], check=True)
    return root


def run(root: Path, *command: str, user: str = "", home: str = "/tmp") -> str:
    """The output of a program of the image, with a read-only root and an empty /tmp, as in the cluster.

    ``user`` is NUMBER:GROUP of chroot's --userspec.
    """
    for name in ("dev", "home"):
        (root / name).mkdir(exist_ok=True)
    script = (
        'root=$0 && mount --bind "$root" "$root" && mount -o remount,bind,ro "$root" && cd "$root" && '
        "mount --rbind /dev dev && mount -t tmpfs -o mode=1777 none tmp && mount -t tmpfs -o mode=1777 none home && "
        'exec chroot "$@"'
    )
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": home, "LANG": "C.UTF-8"}
    options = [f"--userspec={user}"] if user else []
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", script, str(root), *options, ".", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_programs_run(unpacked: Path) -> None:
    version = ARCHIVES[0].name.removeprefix("gpunodes-image-").removesuffix(".oci.tar")
    assert version in run(unpacked, "gpunodes", "--version")
    assert "OpenSSH" in run(unpacked, "ssh", "-V")
    assert "ipmitool" in run(unpacked, "ipmitool", "-V")
    modules = "grpc, google.protobuf, kubernetes, sushy, paramiko, cryptography.x509, yaml, ssl"
    code = f"import {modules}; print(len(ssl.create_default_context().get_ca_certs()))"
    assert int(run(unpacked, "python", "-c", code)) > 100


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run programs as two users")
def test_anybody_controls_machines_from_it(unpacked: Path) -> None:
    """A number without an account, the group of OpenShift, and a home that is mounted: ssh reads that home."""
    anybody = {"user": "12345:0", "home": "/home"}
    assert "/home/.ssh/known_hosts" in run(unpacked, "as-user", "ssh", "-G", "machine", **anybody)
    assert run(unpacked, "as-user", "whoami", **anybody) == "user\n"
    assert '"ping": "pong"' in run(unpacked, "as-user", "ansible", "-m", "ping", "localhost", **anybody)
    assert "version" in run(unpacked, "as-user", "gpunodes", "--version", **anybody)
    own = run(unpacked, "as-user", "sh", "-c", "ls -A /tmp; getent passwd 65532", user="65532:65532")
    assert own == "gpunodes:x:65532:65532::/tmp:/bin/sh\n", "its own user needs no second account"


def test_its_modules_are_compiled(unpacked: Path) -> None:
    """By the image's own Python: the root file system of a container is read-only."""
    names = {path.name.split(".")[1] for path in (unpacked / "usr/lib/python3").rglob("gpunodes/**/*.pyc")}
    assert names == {run(unpacked, "python", "-c", "import sys; print(sys.implementation.cache_tag)").strip()}


def test_no_file_gives_rights(unpacked: Path) -> None:
    modes = {path: path.stat().st_mode for path in unpacked.rglob("*") if not path.is_symlink()}
    wide = [str(path.relative_to(unpacked)) for path, mode in modes.items() if mode & 0o6022 and path.name != "dev"]
    assert wide == ["tmp"]


def test_no_file_has_a_path_of_the_machine_that_built_it(unpacked: Path) -> None:
    own = str(ROOT).encode()
    files = [path for path in unpacked.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in files if own in path.read_bytes()] == []
    scripts = [path.read_bytes().split(b"\n")[0] for path in (unpacked / "usr/local/bin").iterdir()]
    # The entry point of the controller reads no module of a user.
    assert set(scripts) == {b"#!/usr/bin/python3", b"#!/usr/bin/python3 -IS"}
