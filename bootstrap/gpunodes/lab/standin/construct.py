"""Build the stand-in tree, which a lab with GPU machines serves in addition to the mirror's tree.

It is separate, so that a lab without GPU machines neither builds nor downloads it. Its files take precedence over those
of the mirror's tree at the same path (Debian's index, with more packages).
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpunodes.lab.host import Report
from gpunodes.lab.mirror import aptrepo, construct, debian, gobuild, images, oci, pins, programs, store
from gpunodes.lab.mirror import deb as debfile
from gpunodes.lab.mirror.tree import TreeEntry
from gpunodes.lab.standin import objects, packages
from gpunodes.lab.standin.pins import HERE, load

ABOUT = "standin.json"
"""A file at the tree's top: the key's fingerprint, and the suite and kernel of the tree."""
REGISTRY = "nvcr.io"
PLUGIN_IMAGE = "nvidia/k8s-device-plugin"
CUDA_IMAGE = "nvidia/cuda"
CUDA_TAG = "13.0.1-base-ubuntu24.04"
"""An image under NVIDIA's name: a C library and BusyBox, enough to run the programs that CDI adds to a container."""
_VARIABLES = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
"""What NVIDIA's images set: their containers ask for all GPUs, so those of the lab do, too.
Source: github.com/NVIDIA/k8s-device-plugin, deployments/container/Dockerfile."""

_NODE_PACKAGES = (
    "dkms", "docker.io", "docker-cli", "gcc", "libc6-dev", "linux-headers-cloud-amd64", "make", "mokutil", "pciutils",
)  # fmt: skip
"""Debian packages that a GPU node may install in addition to those of other nodes."""
_BASE_PACKAGES = ("libc6", "libgcc-s1")
"""Libraries in the images, which their programs are linked to."""
_NOT_INPUTS = ("faults.py", "faults.toml", "board.py")
"""Files of this package that do not affect the tree."""


def build(cache: Path, *, suite: str, kernel: str, report: Report) -> Path:
    """The stand-in tree for machines with this Debian suite and kernel, built unless ``cache`` has it.

    Raises:
        GpunodesError: a step failed; no incomplete tree is left then.
    """
    programs.require()
    home, mirror = cache / "standin", cache / "mirror"
    with store.locked(mirror, report):
        key = aptrepo.signing_key(mirror)
    with store.locked(home, report):
        target = home / f"tree-{_fingerprint(suite, kernel, key.fingerprint)}"
        return store.keep(target, lambda tree: _fill(tree, home, suite, kernel, key, report))


def _fingerprint(suite: str, kernel: str, key: str) -> str:
    inputs = hashlib.sha256(json.dumps([suite, kernel, key, pins.load().node_packages]).encode())
    for path in sorted(HERE.rglob("*")):
        if path.is_file() and path.suffix != ".pyc" and path.name not in _NOT_INPUTS:
            inputs.update(f"{path.relative_to(HERE)}\n".encode() + path.read_bytes())
    return inputs.hexdigest()[:16]


def compiled(
    cache: Path, *, suite: str, kernel: str, report: Report, archive_suites: Sequence[str] = ()
) -> objects.Objects:
    """Only the compiled files, which the machines' disks need.

    ``archive_suites``: suites besides ``suite`` that have the kernel's headers.

    Raises:
        GpunodesError: a step failed.
    """
    home = cache / "standin"
    with store.locked(home, report):
        go = gobuild.toolchain(home, pins.load(), report)
        return _objects(home, suite, kernel, go, report, archive_suites)


def _objects(
    home: Path, suite: str, kernel: str, go: Path, report: Report, archive_suites: Sequence[str] = ()
) -> objects.Objects:
    bindings = load()["nvidia-container-toolkit"]
    lists = (packages.DRIVERS, packages.STUBS)
    return objects.get(home, suite, kernel, *lists, bindings, go, report, archive_suites)


def _fill(tree: Path, home: Path, suite: str, kernel: str, key: aptrepo.SigningKey, report: Report) -> None:
    go = gobuild.toolchain(home, pins.load(), report)
    compiled_files = _objects(home, suite, kernel, go, report)
    components = load()
    binaries = gobuild.all_programs(components.values(), go, home, report)
    sources = {name: gobuild.source(component, go) for name, component in components.items()}
    common = pins.load()
    requested = [
        *common.node_packages,
        common.busybox_package,
        *_NODE_PACKAGES,
        *_BASE_PACKAGES,
        f"linux-headers-{kernel}",
    ]
    archives = debian.download(suite, list(dict.fromkeys(requested)), home, report)

    report("building the stand-in images")
    _images(tree, archives, binaries["k8s-device-plugin"], components["k8s-device-plugin"].version)
    report("building the stand-in repositories")
    number = common.suites[suite]
    cuda = [part for version in packages.DRIVERS for part in packages.driver(version, compiled_files)]
    cuda += [packages.cuda_toolkit(version, compiled_files) for version in packages.CUDA]
    cuda += packages.cudnn("13", compiled_files)
    _flat(tree / "cuda" / "repos" / f"debian{number}" / "x86_64", cuda, key, "3bf863cc.pub")
    toolkit = components["nvidia-container-toolkit"]
    _flat(
        tree / "libnvidia-container" / "stable" / "deb" / "amd64",
        packages.container_toolkit(toolkit.version, binaries[toolkit.name], sources[toolkit.name]),
        key,
    )
    (tree / "libnvidia-container" / "gpgkey").write_text(key.armoured)
    docker = components["cri-dockerd"]
    _flat(
        tree / "cri-dockerd",
        [packages.cri_dockerd(docker.version, suite, binaries[docker.name], sources[docker.name])],
        key,
        "gpgkey",
    )
    about = {"fingerprint": key.fingerprint, "suite": suite, "kernel": kernel}
    (tree / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    # The Debian repository of the mirror's tree, with more packages.
    construct._debian_repository(tree, suite, archives, "amd64", key)


def _flat(root: Path, parts: Sequence[packages.Parts], key: aptrepo.SigningKey, key_name: str | None = None) -> None:
    """Write a repository without suites and components, as NVIDIA's: `deb URL /`."""
    root.mkdir(parents=True)
    for package, entries in parts:
        debfile.write(package, entries, root / package.file_name)
    index = aptrepo.packages_index(root, list(root.glob("*.deb"))).encode()
    fields = {"Origin": "NVIDIA", "Label": "NVIDIA (gpunodes lab, stand-ins)", "Architecture": "amd64"}
    aptrepo.publish(root, fields, {"Packages": index}, key)
    if key_name:
        (root / key_name).write_text(key.armoured)


def _images(tree: Path, archives: Sequence[Path], plugin: Path, version: str) -> None:
    registry = oci.Registry(tree, "amd64")
    [busybox] = images.wanted_archives(archives, [pins.load().busybox_package])
    with tempfile.TemporaryDirectory(dir=tree) as scratch:
        files = {entry.path: entry for entry in images.busybox_tree(busybox, Path(scratch))}
    for archive in images.wanted_archives(archives, _BASE_PACKAGES):
        files |= {entry.path: entry for entry in images.unpack(archive)}
    base = registry.layer(list(files.values()))
    programs_layer = registry.layer(
        [TreeEntry(f"/usr/bin/{file.name}", file, 0o755) for file in sorted(plugin.iterdir())]
    )
    plugin_image = oci.OciImage(
        PLUGIN_IMAGE,
        (f"v{version}",),
        (base, programs_layer),
        ("nvidia-device-plugin",),
        environment=_VARIABLES,
    )
    registry.add(plugin_image)
    registry.add(oci.OciImage(CUDA_IMAGE, (CUDA_TAG,), (base,), environment=_VARIABLES))


def settings(base_url: str, tree: Path) -> dict[str, Any]:
    """The gpunodes_* variables that make GPU machines use the stand-in tree at ``base_url``."""
    key = (tree / "libnvidia-container" / "gpgkey").read_text()
    fingerprint = json.loads((tree / ABOUT).read_text())["fingerprint"]
    return {
        "gpunodes_nvidia_packages_url": f"{base_url}/cuda/repos/{{system}}{{release}}/{{cuda_arch}}/",
        "gpunodes_nvidia_packages_key": key,
        "gpunodes_nvidia_packages_fingerprint": fingerprint,
        "gpunodes_nvidia_toolkit_packages_url": f"{base_url}/libnvidia-container/stable/deb/{{package_arch}}/",
        "gpunodes_nvidia_toolkit_packages_key": key,
        "gpunodes_nvidia_toolkit_packages_fingerprint": fingerprint,
        "gpunodes_cri_dockerd_packages_url": f"{base_url}/cri-dockerd/",
        "gpunodes_cri_dockerd_packages_key": key,
        "gpunodes_cri_dockerd_packages_fingerprint": fingerprint,
    }
