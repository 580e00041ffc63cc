"""Sets of a driver's packages that are kept on the machine, so that the old driver can be installed without a network.

A set is a folder with the name of its driver's version: packages, and a list of them. It appears whole or not at all.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from .. import disk, packages, tree
from ..problem import MachineProblem

ROOT = "/var/cache/gpunodes"
FOLDER = f"{ROOT}/driver"
_LIST = "set.json"
_VERSION = re.compile(r"\d{3}(\.\d{1,4}){1,2}")


@dataclass(frozen=True)
class Kept:
    """A kept set."""

    version: str
    """The driver's version."""
    packages: Mapping[str, str]
    """The versions of its packages by name: all that belong to the driver."""
    replaces: str = ""
    """The version of the driver that it replaces, "" for none."""

    @property
    def folder(self) -> str:
        return f"{FOLDER}/{self.version}"

    def files(self) -> list[str]:
        """Its packages' files, those of dependencies included."""
        return sorted(glob.glob(f"{glob.escape(self.folder)}/*.deb"))


def load(version: str) -> Kept | None:
    """The set of a version; None if it is not kept whole."""
    try:
        document = json.loads(disk.read(f"{FOLDER}/{version}/{_LIST}") or "null")
        found = Kept(str(document["version"]), dict(document["packages"]), str(document["replaces"]))
    except (ValueError, KeyError, TypeError):
        return None
    # A file of the set may have been deleted since.
    complete = found.version == version and all(file_of(found.folder, *each) for each in found.packages.items())
    return found if complete and _VERSION.fullmatch(version) else None


def matching(requested: Sequence[packages.RequestedPackage]) -> Kept | None:
    """The newest kept set that has all ``requested`` packages that have a version."""
    wanted = [package for package in requested if package.version]
    for name in sorted(os.listdir(FOLDER) if os.path.isdir(FOLDER) else (), key=numbers, reverse=True):
        found = load(name)
        if found and wanted and all(packages.fits(each, found.packages.get(each.name, "")) for each in wanted):
            return found
    return None


def partial(version: str) -> str:
    """A new or interrupted set's folder, in which apt can download."""
    if not _VERSION.fullmatch(version):
        raise MachineProblem(f"{version!r} is not the version of a driver", "such as 580.95.05", "check its source")
    folder = f"{FOLDER}/.{version}"
    os.makedirs(f"{folder}/partial", mode=0o755, exist_ok=True)
    return folder


def complete(kept: Kept) -> None:
    """Make the downloaded packages a set; raises MachineProblem if one is missing."""
    folder = partial(kept.version)
    if missing := [name for name, version in kept.packages.items() if not file_of(folder, name, version)]:
        raise MachineProblem(
            f"{', '.join(f'{name} {kept.packages[name]}' for name in missing)} cannot be downloaded",
            f"all packages of driver {kept.version}: without them gpunodes could not go back to it",
            "check the package source; a mirror must keep the installed version, too",
        )
    for name, version in kept.packages.items():
        disk.flush(file_of(folder, name, version))
    tree.remove(f"{folder}/partial")
    disk.remove(f"{folder}/lock")
    disk.write(f"{folder}/{_LIST}", json.dumps(asdict(kept), indent=1, sort_keys=True) + "\n", 0o644)
    if os.path.isdir(kept.folder):
        tree.remove(kept.folder)
    os.rename(folder, kept.folder)


def forget_all_but(versions: Sequence[str]) -> None:
    """Delete the other sets, and interrupted ones."""
    for name in os.listdir(FOLDER) if os.path.isdir(FOLDER) else ():
        if name not in versions:
            tree.remove(f"{FOLDER}/{name}")


def file_of(folder: str, name: str, version: str) -> str:
    """The file of a package in a folder of apt's archives, "" if it is not there."""
    found = glob.glob(f"{glob.escape(folder)}/{glob.escape(name)}_{glob.escape(version.replace(':', '%3a'))}_*.deb")
    return found[0] if found else ""


def numbers(version: str) -> list[int]:
    """A version that can be compared."""
    return [int(number) for number in re.findall(r"\d+", version)]
