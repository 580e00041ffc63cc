"""What apt would do to replace a driver, and the download of both drivers' packages. Installs nothing."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .. import disk, packages
from ..causes import Program
from ..problem import MachineProblem
from ..process import CommandResult
from . import kept

PREFERENCES = "/etc/apt/preferences.d"
ARCHIVES = "/var/cache/apt/archives"
apt = packages.Apt.get
# Purged: the file with which an old branch's package pins that branch would stay in force.
REPLACE = ("--allow-downgrades", "--allow-change-held-packages", "--purge")
_PINNING = "nvidia-driver-pinning-"


@dataclass(frozen=True)
class Transaction:
    """The packages that a replacement installs, and those of the driver that it removes, with their old versions."""

    installs: Mapping[str, str]
    removes: Sequence[str]
    old: Mapping[str, str]
    """The installed packages that change or go, by name."""


_INST = re.compile(r"^Inst (\S+) (?:\[([^\]]*)\] )?\((\S+) ")


def parse(listing: str) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """What ``apt-get --simulate`` installs, the old versions of what it replaces (both by name), and what it removes.

    Names have no architecture: apt adds one to packages of a foreign architecture only.
    """
    installs, replaced, removes = {}, {}, []
    for line in listing.splitlines():
        if found := _INST.match(line):
            installs[found[1]] = found[3]
            if found[2]:
                replaced[found[1]] = found[2]
        elif line.startswith(("Remv ", "Purg ")):
            removes.append(line.split()[1])
    return installs, replaced, removes


def plan(
    chosen: Mapping[str, str],
    installed: Mapping[str, packages.PackageState],
    available: Mapping[str, Sequence[str]],
    holds: Sequence[str],
    version: str,
) -> Transaction:
    """The replacement of the ``installed`` packages of a driver by ``chosen`` ones, of the driver ``version``.

    ``holds`` are the shell patterns of the driver's packages: nothing else may be removed. Raises MachineProblem
    otherwise.
    """
    wanted = dict(chosen)
    gone = obsolete(installed, wanted, version.partition(".")[0])
    for name in installed:
        # All packages of the old driver follow, also those that a user added.
        same = [each for each in available.get(name, ()) if packages.upstream(each) == version]
        if name not in wanted and name not in gone and same:
            wanted[name] = same[0]
    with preferences(holds, version) as option:
        result = simulate(option, wanted, gone)
    if not result.ok:
        raise packages.failure(Program.APT, "apt-get install", result)
    installs, replaced, removes = parse(result.out)
    if foreign := [name for name in removes if not belongs(name, holds) and name not in gone]:
        raise MachineProblem(
            f"replacing the driver would remove {', '.join(foreign)}",
            "a replacement that removes only packages of the driver",
            "remove them yourself if they are not needed, or request another driver",
        )
    old = {name: state.version for name, state in installed.items() if name in removes or name in replaced}
    return Transaction(installs, removes, old)


def obsolete(installed: Mapping[str, object], wanted: Mapping[str, object], branch: str) -> list[str]:
    """The installed packages whose names contain another branch than the new one."""
    return [
        name
        for name in installed
        if name not in wanted and (found := re.search(r"-(\d{3})(?=-|$)", name)) and found[1] != branch
    ]


def belongs(name: str, holds: Sequence[str]) -> bool:
    """Whether a package is one of the driver's."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in holds)


@contextlib.contextmanager
def preferences(holds: Sequence[str], version: str) -> Iterator[str]:
    """An option of apt: the machine's preferences, but the new driver's version instead of the old branch's pin."""
    with tempfile.TemporaryDirectory(prefix="gpunodes-") as folder:
        os.chmod(folder, 0o755)  # noqa: S103 - apt reads it as another user, and it has no secret
        for path in glob.glob(f"{PREFERENCES}/*"):
            if not os.path.basename(path).startswith(_PINNING):
                os.symlink(path, f"{folder}/{os.path.basename(path)}")
        names = " ".join(holds)
        text = f"Package: {names}\nPin: version /^([0-9]+:)?{re.escape(version)}(-|$)/\nPin-Priority: 1001\n"
        with open(f"{folder}/gpunodes-driver.pref", "w", encoding="ascii") as file:
            file.write(text)
        yield f"-oDir::Etc::PreferencesParts={folder}/"


def simulate(option: str, wanted: Mapping[str, str], gone: Sequence[str]) -> CommandResult:
    return apt(option, *REPLACE, "install", "--simulate", *arguments(wanted, gone))


def arguments(wanted: Mapping[str, str], gone: Sequence[str]) -> list[str]:
    """apt's arguments that install and remove packages."""
    return [*(f"{name}={version}" for name, version in wanted.items()), *(f"{name}-" for name in gone)]


def download(made: Transaction, holds: Sequence[str], version: str, before: str) -> None:
    """Download the packages of the new driver ``version`` and of the installed one, ``before``, as sets.

    An old package comes from apt's archives if they still have it. Raises MachineProblem if one cannot be had.
    """
    old = kept.partial(before)
    for name, each in made.old.items():
        if (path := kept.file_of(ARCHIVES, name, each)) and not kept.file_of(old, name, each):
            disk.copy(path, old)
    again = {name: each for name, each in made.old.items() if not kept.file_of(old, name, each)}
    if again and kept.load(before) is None:
        # A version that no source has any more is an error of apt, too: `complete` names all that are missing.
        apt(
            *REPLACE,
            "install",
            "--download-only",
            f"-oDir::Cache::Archives={old}/",
            "--reinstall",
            *arguments(again, []),
        )
    if kept.load(before) is None:
        kept.complete(kept.Kept(before, dict(made.old)))
    new = kept.partial(version)
    with preferences(holds, version) as option:
        _fetch([option, *arguments(made.installs, made.removes)], new)
    own = {name: each for name, each in made.installs.items() if belongs(name, holds)}
    kept.complete(kept.Kept(version, own, before))


def _fetch(what: Sequence[str], folder: str) -> None:
    """Download into ``folder``; raises MachineProblem if apt cannot."""
    result = apt(*REPLACE, "install", "--download-only", f"-oDir::Cache::Archives={folder}/", *what)
    if not result.ok:
        raise packages.failure(Program.APT, "downloading the driver", result)
