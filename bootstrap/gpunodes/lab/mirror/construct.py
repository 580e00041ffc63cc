"""Build the mirror's tree."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gpunodes.errors import WrongInput
from gpunodes.lab.mirror import aptrepo, debian, gobuild, images, packages, programs, store, wheels
from gpunodes.lab.mirror import deb as debfile
from gpunodes.lab.mirror.oci import Registry
from gpunodes.lab.mirror.pins import HERE, Component, ExtraImage, Minor, Pins, load
from gpunodes.lab.mirror.tree import TreeEntry

ABOUT = "mirror.json"
"""A file at the tree's top: the key's fingerprint and the tree's contents."""

_NOT_INPUTS = ("pin.py", "serve.py")
"""Files of this package that do not affect the tree."""

KUBERNETES_KEY = "Release.key"
REGISTRIES = ("docker.io", "ghcr.io", "quay.io", "registry.k8s.io")


def build(
    cache: Path,
    *,
    minors: Sequence[str],
    suites: Sequence[str],
    progress: Callable[[str], None],
    extras: Sequence[str] = (),
) -> Path:
    """The mirror's static tree for these Kubernetes minors and Debian suites, built unless ``cache`` has it.

    ``extras``: with these further images of the pins.

    The first build compiles Kubernetes and takes minutes; ``progress`` gets a line at each step. Raises GpunodesError
    when a program is missing or a step fails; no incomplete tree is left then.
    """
    pins = load()
    for requested, known in ((minors, pins.minors), (suites, pins.suites), (extras, pins.extras)):
        for name in requested:
            if name not in known:
                raise WrongInput(f"the lab's mirror has no {name}", f"known: {', '.join(known)}")
    programs.require()
    home = cache / "mirror"
    with store.locked(home, progress):
        key = aptrepo.signing_key(home)
        target = home / f"tree-{_fingerprint(minors, suites, extras, key.fingerprint)}"
        return store.keep(target, lambda tree: _fill(tree, home, pins, minors, suites, extras, key, progress))


def _fingerprint(minors: Sequence[str], suites: Sequence[str], extras: Sequence[str], key: str) -> str:
    """A hash of all inputs of the tree: pins, module files and the code that builds it."""
    inputs = hashlib.sha256(json.dumps([sorted(minors), sorted(suites), sorted(extras), key]).encode())
    for path in sorted(HERE.rglob("*")):
        if path.is_file() and path.suffix != ".pyc" and path.name not in _NOT_INPUTS:
            inputs.update(f"{path.relative_to(HERE)}\n".encode() + path.read_bytes())
    return inputs.hexdigest()[:16]


def _fill(
    tree: Path,
    home: Path,
    pins: Pins,
    minors: Sequence[str],
    suites: Sequence[str],
    extras: Sequence[str],
    key: aptrepo.SigningKey,
    progress: Callable[[str], None],
) -> None:
    requested = [pins.minors[minor] for minor in minors]
    further = [image for name in dict.fromkeys(extras) for image in pins.extras[name]]
    architecture = debian.architecture()
    go = gobuild.toolchain(home, pins, progress)
    binaries = gobuild.all_programs(_components(pins, requested, further), go, home, progress)

    archives = {}
    for suite in dict.fromkeys((pins.image_suite, *suites)):
        extra = [pins.busybox_package, *pins.image_packages] if suite == pins.image_suite else []
        archives[suite] = debian.download(suite, [*pins.node_packages, *extra], home, progress)

    progress("building the container images")
    registry = Registry(tree, architecture)
    with tempfile.TemporaryDirectory(dir=tree) as scratch:
        pause_tags = dict.fromkeys((*(minor.pause_tag for minor in requested), *pins.pause_tags))
        pause = images.pause(gobuild.source(requested[0].kubernetes, go), Path(scratch))
        iptables = images.common(
            registry, pins, archives[pins.image_suite], binaries, pause, tuple(pause_tags), Path(scratch)
        )
        [busybox] = images.wanted_archives(archives[pins.image_suite], [pins.busybox_package])
        root = images.busybox_tree(busybox, Path(scratch))
        for image in further:
            files = [*root, *_debian_files(image, pins.image_suite, home, progress)] if image.packages else []
            images.of_extra(registry, image, binaries[image.component.name] if image.component else None, files)
    for minor in requested:
        images.kubernetes(registry, minor, binaries, iptables)
        images.check_tags(minor, binaries[minor.kubernetes.name] / "kubeadm", tree, progress)

    progress("building the apt repositories")
    for minor in requested:
        _kubernetes_repository(tree, minor, pins, binaries, architecture, key)
    for suite in suites:
        _docker_repository(tree, (suite, pins.suites[suite]), pins, binaries, architecture, key)
        _debian_repository(tree, suite, archives[suite], architecture, key)
    (tree / ABOUT).write_text(
        json.dumps({"fingerprint": key.fingerprint, "minors": list(minors), "suites": list(suites)}, indent=2) + "\n"
    )


def _debian_files(image: ExtraImage, suite: str, home: Path, progress: Callable[[str], None]) -> list[TreeEntry]:
    """The files of an image that are of Debian's packages, and of a wheel."""
    archives = debian.download(suite, image.packages, home, progress)
    wheel = wheels.tree(wheels.download(image.wheel, home, progress)) if image.wheel else []
    return [*wheel, *images.libraries_tree(images.wanted_archives(archives, image.packages))]


def _components(pins: Pins, minors: Sequence[Minor], further: Sequence[ExtraImage]) -> list[Component]:
    """What is built. Kubernetes takes longest: it is first, and the others are built in parallel."""
    shared = ("flannel", "flannel-cni-plugin", "cni-plugins", "cri-tools", "containerd", "runc", "registry")
    found = [minor.kubernetes for minor in minors]
    found += [component for minor in minors for component in (*(etcd for etcd, _ in minor.etcds), minor.coredns)]
    found += [pins.components[name] for name in shared]
    return list(dict.fromkeys(found + [image.component for image in further if image.component]))


def _kubernetes_repository(
    tree: Path,
    minor: Minor,
    pins: Pins,
    binaries: dict[str, Path],
    architecture: str,
    key: aptrepo.SigningKey,
) -> None:
    root = tree / "kubernetes" / "core:" / "stable:" / f"v{minor.minor}" / "deb"
    pool = root / architecture
    pool.mkdir(parents=True)
    parts = packages.kubernetes(minor.kubernetes.version, architecture, binaries[minor.kubernetes.name])
    tools, plugins = pins.components["cri-tools"], pins.components["cni-plugins"]
    parts.append(packages.cri_tools(tools.version, architecture, binaries[tools.name]))
    parts.append(packages.kubernetes_cni(plugins.version, architecture, binaries[plugins.name]))
    for package, entries in parts:
        debfile.write(package, entries, pool / package.file_name)
    fields = {"Origin": f"obs://build.opensuse.org/isv:kubernetes:core:stable:v{minor.minor}/deb", "Suite": "/"}
    index = aptrepo.packages_index(root, list(pool.iterdir())).encode()
    aptrepo.publish(root, fields, {"Packages": index}, key)
    (root / KUBERNETES_KEY).write_text(key.armoured)


def _docker_repository(
    tree: Path,
    suite: tuple[str, int],
    pins: Pins,
    binaries: dict[str, Path],
    architecture: str,
    key: aptrepo.SigningKey,
) -> None:
    root = tree / "docker" / "linux" / "debian"
    folder = root / "dists" / suite[0]
    pool = folder / "pool" / "stable" / architecture
    pool.mkdir(parents=True)
    containerd, runc = pins.components["containerd"], pins.components["runc"]
    package, entries = packages.containerd_io(
        containerd.version, suite, architecture, binaries[containerd.name], binaries[runc.name]
    )
    debfile.write(package, entries, pool / package.file_name)
    _publish_suite(root, folder, ("Docker", "stable"), pool.iterdir(), architecture, key)
    (root / "gpg").write_text(key.armoured)


def _debian_repository(
    tree: Path, suite: str, archives: Sequence[Path], architecture: str, key: aptrepo.SigningKey
) -> None:
    root = tree / "debian"
    pool = root / "pool" / suite
    pool.mkdir(parents=True)
    for archive in archives:
        # The version's epoch is escaped in apt's file names.
        link(archive, pool / archive.name.replace("%3a", "-"))
    _publish_suite(root, root / "dists" / suite, ("Debian", "main"), pool.iterdir(), architecture, key)
    (root / "key.asc").write_text(key.armoured)


def _publish_suite(
    root: Path,
    folder: Path,
    origin_component: tuple[str, str],
    files: Iterable[Path],
    architecture: str,
    key: aptrepo.SigningKey,
) -> None:
    origin, component = origin_component
    fields = {
        "Origin": origin,
        "Label": f"{origin} (gpunodes lab)",
        "Suite": folder.name,
        "Codename": folder.name,
        "Architectures": architecture,
        "Components": component,
    }
    index = aptrepo.packages_index(root, list(files)).encode()
    aptrepo.publish(folder, fields, {f"{component}/binary-{architecture}/Packages": index}, key)


def link(source: Path, target: Path) -> None:
    """Link or copy a file."""
    try:
        os.link(source, target)
    except OSError:  # the cache is on two file systems
        shutil.copyfile(source, target)


def settings(base_url: str, tree: Path) -> dict[str, Any]:
    """The gpunodes_* variables that make a cluster use the mirror at ``base_url``."""
    about = json.loads((tree / ABOUT).read_text())
    key = (tree / "docker" / "linux" / "debian" / "gpg").read_text()
    base = base_url.rstrip("/")
    return {
        "gpunodes_kubernetes_packages_url": f"{base}/kubernetes/core:/stable:/v{{minor}}/{{format}}/",
        "gpunodes_kubernetes_packages_key": key,
        "gpunodes_kubernetes_packages_fingerprint": about["fingerprint"],
        "gpunodes_docker_packages_url": f"{base}/docker/linux/{{system}}",
        "gpunodes_docker_packages_key": key,
        "gpunodes_docker_packages_fingerprint": about["fingerprint"],
        "gpunodes_image_mirrors": dict.fromkeys(REGISTRIES, base),
    }
