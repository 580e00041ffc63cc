"""The built image: its files, and whether its programs run, from its layers unpacked into a folder.

`make test-package` builds it. Running its programs needs root or user namespaces; podman, where it is
installed, runs it as well.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from gpunodes.lab.layout import cache_dir

ROOT = Path(__file__).parents[2]
ARCHIVES = sorted((ROOT / "build").glob("gpunodes-image-*.oci.tar"))
pytestmark = pytest.mark.skipif(not ARCHIVES, reason="needs the image; run `make image`")
UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
MACHINE = {"ansible_host": "127.0.0.1", "ansible_port": 9}
INVENTORY = json.dumps({"all": {"children": {"control_plane": {"hosts": {"control-1": MACHINE}}}}})


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


def config() -> dict[str, Any]:
    """The image's configuration: user, environment, labels."""
    with tarfile.open(ARCHIVES[0]) as tar:
        [document] = json.load(tar.extractfile("manifest.json") or io.BytesIO())
        loaded: dict[str, Any] = json.load(tar.extractfile(document["Config"]) or io.BytesIO())["config"]
    return loaded


def start(root: Path, *command: str, user: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the image in namespaces, with a read-only root and an empty /tmp, as in the cluster.

    ``user``: the number and group of a user in a second user namespace, by default that of the first. /home can be
    written, /cluster has an inventory, and cannot.
    """
    for name in ("dev", "home", "cluster"):
        (root / name).mkdir(exist_ok=True)
    script = (
        'root=$1 && shift && mount --bind "$root" "$root" && mount -o remount,bind,ro "$root" && cd "$root" && '
        "mount --rbind /dev dev && mount -t tmpfs -o mode=1777 none tmp && mount -t tmpfs -o mode=1777 none home && "
        'mount -t tmpfs none cluster && echo "$INVENTORY" >cluster/hosts.yml && mount -o remount,ro cluster && '
        'exec "$@"'
    )
    inner = ["chroot", "."]
    if user:
        number, _, group = user.partition(":")
        inner = ["unshare", "--user", f"--map-user={number}", f"--map-group={group}", "--root=."]
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
    } | variables
    return subprocess.run(
        [*UNSHARE, "sh", "-c", script, "sh", str(root), *inner, *command],
        env=environment | {"INVENTORY": INVENTORY},
        capture_output=True,
        text=True,
        check=False,
    )


def run(root: Path, *command: str, user: str = "", **variables: str) -> str:
    """The output of a program of the image that succeeds."""
    done = start(root, *command, user=user, **variables)
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


def test_kubectl_is_what_the_label_says(unpacked: Path) -> None:
    """Where its publisher was not reachable, the image has none."""
    label = config()["Labels"]["dev.gpunodes.kubectl"]
    assert (unpacked / "usr/local/bin/kubectl").exists() == (label != "none")
    if label != "none":
        version = run(unpacked, "kubectl", "version", "--client")
        assert f"v{label}" in version or label.startswith("sha256:")


def test_a_kubectl_that_is_named_runs_in_it(unpacked: Path, tmp_path: Path) -> None:
    """That of the lab, as `make image KUBECTL=FILE` adds it; its publisher is not reachable everywhere."""
    image = runpy.run_path(str(ROOT / "bootstrap/image.py"))
    minor = image["client"].pinned().version.rpartition(".")[0]
    built = sorted(cache_dir().glob(f"mirror/kubernetes-{minor}-*/kubectl"))
    if not built:
        pytest.skip(f"no lab has built kubectl {minor}")
    [entry] = [each for each in image["with_program"](built[-1], tmp_path) if each.content]
    place = unpacked / entry.path.lstrip("/")
    before = place.rename(tmp_path / "before") if place.exists() else None
    try:
        shutil.copy(entry.content, place)
        place.chmod(entry.mode)
        assert f"v{minor}." in run(unpacked, "kubectl", "version", "--client", user="12345:0")
    finally:
        place.unlink()
        if before:
            before.rename(place)


def test_anybody_controls_machines_from_it(unpacked: Path) -> None:
    """A number without an account, the group of OpenShift, and a home that is mounted: ssh reads that home."""
    anybody = {"user": "12345:0", "HOME": "/home"}
    assert "/home/.ssh/known_hosts" in run(unpacked, "as-user", "ssh", "-G", "machine", **anybody)
    assert run(unpacked, "as-user", "whoami", **anybody) == "user\n"
    assert '"ping": "pong"' in run(unpacked, "as-user", "ansible", "-m", "ping", "localhost", **anybody)
    assert "version" in run(unpacked, "as-user", "gpunodes", "--version", **anybody)
    graph = run(unpacked, "as-user", "ansible-inventory", "-i", "/cluster/hosts.yml", "--graph", **anybody)
    assert "control-1" in graph
    own = run(unpacked, "as-user", "sh", "-c", "ls -A /tmp; getent passwd 65532", user="65532:65532")
    assert own == "gpunodes:x:65532:65532::/tmp:/bin/sh\n", "its own user needs no second account"


def test_a_home_that_cannot_be_written_is_reported_with_a_remedy(unpacked: Path) -> None:
    """And the remedy works: the inventory is read, and the machine is tried, on a port without a server."""
    command = ("as-user", "gpunodes", "status", "-i", "/cluster/hosts.yml")
    done = start(unpacked, *command, user="12345:0", HOME="/cluster")
    assert done.returncode == 2, done.stderr
    assert "Ansible's folder /cluster/.ansible cannot be used: Read-only file system" in done.stderr
    assert "set HOME, or ANSIBLE_HOME, to one" in done.stderr
    elsewhere = {"HOME": "/cluster", "ANSIBLE_HOME": "/tmp/.ansible", "XDG_STATE_HOME": "/tmp/state"}
    done = start(unpacked, *command, user="12345:0", **elsewhere)
    assert done.returncode == 1, done.stderr
    assert "control-1: the SSH connection" in done.stderr


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """podman with this image in a storage of its own; rootless, unless root runs the tests."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    folder = tmp_path_factory.mktemp("podman")
    storage = [f"--root={folder}/root", f"--runroot={folder}/run", "--storage-driver=vfs", "--cgroup-manager=cgroupfs"]
    done = subprocess.run(["podman", *storage, "load", "-i", ARCHIVES[0]], capture_output=True, text=True, check=False)
    # In a container, which may not be allowed to unpack another one.
    if done.returncode and "not permitted" in done.stderr:
        pytest.skip(f"podman unpacks no image here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    options = [
        "--rm",
        "--network=none",
        "--cgroups=disabled",
        "--security-opt=label=disable",
        "--ulimit=nofile=1024:1024",
        "--ulimit=nproc=1024:1024",
    ]
    argv = ["podman", *storage, "run", *options, "--read-only", "--cap-drop=all", "--tmpfs=/tmp"]
    [image] = {line for line in done.stdout.split() if line.startswith("gpunodes.dev/")}
    started = subprocess.run([*argv, image, "--version"], capture_output=True, text=True, check=False)
    if started.returncode in {125, 126}:  # podman's own errors, and those of its runtime
        pytest.skip(f"podman starts no container here: {started.stderr.strip().splitlines()[-1]}")
    assert "version" in started.stdout, started.stderr
    return [*argv, "--entrypoint=as-user", image]


def test_an_engine_runs_it_as_anybody(engine: list[str]) -> None:
    """Without root, network, capabilities and a writable root, by a number that has no account."""
    programs = ("ssh -V", "ansible --version", "gpunodes --version", "whoami")
    *argv, image = engine
    for program in programs:
        done = subprocess.run(
            [*argv, "--user=12345:0", image, *program.split()], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


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
    programs = [path for path in (unpacked / "usr/local/bin").iterdir() if path.name != "kubectl"]
    scripts = [path.read_bytes().split(b"\n")[0] for path in programs]
    # The entry point of the controller reads no module of a user.
    assert set(scripts) == {b"#!/usr/bin/python3", b"#!/usr/bin/python3 -IS"}
