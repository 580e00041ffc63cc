"""The packages of one replacement, kept on the machine: the new ones, and the old ones with which it is undone.

They are a folder with a list of them, which appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from .. import disk, packages, tree
from ..causes import Program
from ..driver_upgrade.kept import ROOT, file_of
from ..problem import MachineProblem
from ..process import CommandResult

ARCHIVES = "/var/cache/apt/archives"
FOLDER = f"{ROOT}/runtime"
REPLACE = ("--allow-downgrades", "--allow-change-held-packages")
_LIST = "set.json"
apt = packages.Apt.get


@dataclass(frozen=True)
class Kept:
    """Versions by package."""

    new: Mapping[str, str]
    """All that are installed, dependencies included."""
    old: Mapping[str, str]
    """Those that are replaced."""

    def files(self, versions: Mapping[str, str]) -> list[str]:
        """The files of these packages."""
        return [file_of(FOLDER, name, version) for name, version in versions.items()]


def load() -> Kept | None:
    """The kept packages; None if they are not kept whole."""
    try:
        document = json.loads(disk.read(f"{FOLDER}/{_LIST}") or "null")
        found = Kept(dict(document["new"]), dict(document["old"]))
    except (ValueError, KeyError, TypeError):
        return None
    # A file may have been deleted since.
    return found if all([*found.files(found.new), *found.files(found.old)]) else None


def download(wanted: Kept) -> None:
    """Download all packages, in the place of those that were kept; raises MachineProblem if one cannot be had.

    An old package comes from apt's archives if they still have it.
    """
    folder = f"{FOLDER}.partial"
    os.makedirs(f"{folder}/partial", mode=0o755, exist_ok=True)
    for name, version in wanted.old.items():
        if (path := file_of(ARCHIVES, name, version)) and not file_of(folder, name, version):
            disk.copy(path, folder)
    if again := [f"{name}={each}" for name, each in wanted.old.items() if not file_of(folder, name, each)]:
        # A version that no source has any more is an error of apt, too: below all that are missing are named.
        _fetch(folder, "--reinstall", *again)
    result = _fetch(folder, *(f"{name}={version}" for name, version in wanted.new.items()))
    if not result.ok:
        raise packages.failure(Program.APT, f"downloading {', '.join(wanted.new)}", result)
    versions = [*wanted.new.items(), *wanted.old.items()]
    if missing := [f"{name} {version}" for name, version in versions if not file_of(folder, name, version)]:
        raise MachineProblem(
            f"{', '.join(missing)} cannot be downloaded",
            "the new packages, and the installed ones: without these gpunodes could not go back",
            f"check the package source, which must keep the installed versions, or put these packages into {ARCHIVES}",
        )
    for name, version in versions:
        disk.flush(file_of(folder, name, version))
    tree.remove(f"{folder}/partial")
    disk.remove(f"{folder}/lock")
    disk.write(f"{folder}/{_LIST}", json.dumps(asdict(wanted), indent=1, sort_keys=True) + "\n", 0o644)
    forget()
    os.rename(folder, FOLDER)


def forget() -> None:
    """Delete the kept packages."""
    if os.path.isdir(FOLDER):
        tree.remove(FOLDER)


def _fetch(folder: str, *arguments: str) -> CommandResult:
    return apt(*REPLACE, "install", "--download-only", f"-oDir::Cache::Archives={folder}/", *arguments)
