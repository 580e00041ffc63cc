"""A newer kernel than that of the machines' image, as Debian's security archive offers one.

It is the kernel of the release's backports: they always have a newer one, while the release and its security archive
may have the same. It is a tree of its own, for labs whose machines boot their own kernel, with what that kernel's
packages need and those of the release's kernel do not: the mirror lacks it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from gpunodes.errors import GpunodesError
from gpunodes.lab.mirror import aptrepo, construct, debian, programs, store

ABOUT = "updates.json"
"""A file at the tree's top: the suite and the release of the kernel."""
_PACKAGES = ("linux-image-cloud-amd64", "linux-headers-cloud-amd64")
_BACKPORT = "~bpo"
"""In the version of every backport."""
_IMAGE = re.compile(r"linux-image-(\d\S*-cloud-amd64)_")


def build(cache: Path, *, suite: str, progress: Callable[[str], None]) -> Path:
    """The tree for machines with this Debian suite, built unless ``cache`` has it.

    Raises:
        GpunodesError: a step failed, or the archive has no backports of this suite.
    """
    programs.require()
    home = cache / "mirror"
    with store.locked(home, progress):
        key = aptrepo.signing_key(home)
        inputs = hashlib.sha256(json.dumps([suite, key.fingerprint]).encode() + Path(__file__).read_bytes()).hexdigest()

        def fill(tree: Path) -> None:
            release = source(suite)
            archives = debian.download(suite, [f"{name}/{release}" for name in _PACKAGES], home, progress, (release,))
            newer = missing(archives, debian.download(suite, _PACKAGES, home, progress))
            root = tree / "debian-security"
            pool = root / "pool" / suite
            pool.mkdir(parents=True)
            for archive in newer:
                construct.link(archive, pool / archive.name.replace("%3a", "-"))
            codename = f"{suite}-security"
            architecture = debian.architecture()
            fields = {
                "Origin": "Debian",
                "Label": "Debian-Security",
                "Suite": "stable-security",
                "Codename": codename,
                "Architectures": architecture,
                "Components": "main",
            }
            index = aptrepo.packages_index(root, list(pool.iterdir())).encode()
            aptrepo.publish(root / "dists" / codename, fields, {f"main/binary-{architecture}/Packages": index}, key)
            (tree / ABOUT).write_text(json.dumps({"suite": suite, "kernel": kernel_of(newer)}, indent=2) + "\n")

        return store.keep(home / f"updates-{inputs[:16]}", fill)


def source(suite: str) -> str:
    """The suite of Debian's archive that the newer kernel is from."""
    return f"{suite}-backports"


def missing(archives: Iterable[Path], present: Iterable[Path]) -> list[Path]:
    """Those of ``archives`` that are backports, or packages that ``present`` does not have in any version."""
    names = {archive.name.partition("_")[0] for archive in present}
    return [each for each in archives if _BACKPORT in each.name or each.name.partition("_")[0] not in names]


def kernel_of(archives: Iterable[Path]) -> str:
    """The release (``uname -r``) of the one kernel among these packages.

    Raises:
        GpunodesError: there is none, or several.
    """
    found = [match[1] for archive in archives if (match := _IMAGE.match(archive.name))]
    if len(found) != 1:
        raise GpunodesError(f"Debian's backports have {len(found)} kernels for the lab", "one")
    return found[0]


def kernel(tree: Path) -> str:
    """The release of the kernel in the tree."""
    return str(json.loads((tree / ABOUT).read_text())["kernel"])
