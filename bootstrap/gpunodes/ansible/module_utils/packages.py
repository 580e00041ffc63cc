"""The machine's package manager: lists installed and available packages, installs and removes them."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from . import causes, disk
from .causes import Program
from .package_listings import (
    Effects,
    PackageState,
    parse_dnf_transaction,
    parse_dpkg,
    parse_madison,
    parse_rpm_test,
    parse_simulation,
)
from .problem import MachineProblem
from .process import CommandResult, run

__all__ = ["Effects", "PackageState", "parse_dnf_transaction", "parse_dpkg", "parse_madison", "parse_simulation"]

DOCKER_SOURCE, SYSTEM_SOURCES = "docker", "system"
"""The names of Docker's package source, and of those that a machine has: containerd comes from one of both."""
INSTALL_LIMIT_S = 3600
"""A package may build a kernel module, which takes half an hour on an emulated machine."""
LOCK_LIMIT_S = 300
_ARCHIVES = "/var/cache/apt/archives"
"""Where apt keeps the packages that it downloads."""
_SCRIPTS = "/var/lib/dpkg/info"
WITHOUT_SOURCES = tuple(
    f"-oDir::{each}"
    for each in ("Etc::SourceList=/dev/null", "Etc::SourceParts=/dev/null", "Cache::pkgcache=", "Cache::srcpkgcache=")
)
"""apt's options without sources: of files of packages that a source has, too, it would fetch those."""


@dataclass(frozen=True)
class RequestedPackage:
    """A package: ``version`` is a pattern (``1.36.*``), "" for any; ``hold`` prevents upgrades."""

    name: str
    version: str = ""
    hold: bool = False
    same_as: str = ""
    """Another package; both must have the same upstream version."""
    first: bool = False
    """Install it before versions of the others are chosen, because it determines them."""
    replace: bool = False
    """Whether an installed version that does not match is replaced, by a newer or an older one, although it is held."""


class NotFetched(MachineProblem):
    """The package manager could not fetch a package: its lists of packages may be outdated."""


class Manager(Protocol):
    """A package manager."""

    unread: str
    """Why sources could not be read in the last ``refresh`` although it succeeded, "" if all were read."""

    def installed(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """The installed packages among ``names``."""

    def matching(self, patterns: Sequence[str]) -> Mapping[str, PackageState]:
        """The installed packages whose names match one of the shell patterns."""

    def finish_interrupted(self) -> bool:
        """Finish an interrupted installation; True if there was one."""

    def refresh(self, files: Sequence[str] = ()) -> None:
        """Read the sources again; if possible, only those in ``files``."""

    def available(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """The versions in the sources, best first."""

    def effects(self, packages: Mapping[str, str], *, replace: bool = False) -> Effects:
        """The effects of installing ``packages`` (name to version)."""

    def install(self, packages: Mapping[str, str], *, replace: bool = False) -> None:
        """Install exactly these versions; with ``replace`` also instead of held, newer or older ones."""

    def download(self, packages: Mapping[str, str]) -> None:
        """Download exactly these versions, with what they need, and install nothing."""

    def has_downloaded(self, packages: Mapping[str, str]) -> bool:
        """Whether these packages were downloaded; False if the package manager does not tell."""

    def hold(self, names: Sequence[str], held: bool) -> None:
        """Hold or unhold the packages."""

    def purge(self, names: Sequence[str]) -> None:
        """Remove the packages with their configuration."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove the packages, but keep the files that only purging deletes."""

    def removals(self, names: Sequence[str]) -> Sequence[str]:
        """All packages that would be gone with ``names``, because they depend on one of them; removes nothing."""

    def contents(self, names: Sequence[str]) -> tuple[Sequence[str], str]:
        """The files of these installed packages, and the text of the scripts that ran at their installation."""


def detect() -> Manager:
    """This machine's package manager; raises MachineProblem if it has no supported one."""
    if os.path.exists("/usr/bin/apt-get"):
        return Apt()
    if os.path.exists("/usr/bin/dnf"):
        return Dnf()
    raise MachineProblem("neither apt-get nor dnf is installed", "one of them", "use a supported system")


def choose(requested: RequestedPackage, versions: Sequence[str], unread: str = "") -> str:
    """The best matching version of ``versions``; raises MachineProblem if none matches.

    ``unread`` is why sources could not be read: the first cause if no version matches.
    """
    for version in versions:
        if fits(requested, version):
            return version
    available = f"available: {', '.join(versions[:5])}" if versions else "no version is available"
    if unread:
        available += f", because a source could not be read: {unread}"
    raise MachineProblem(
        f"the package sources have no {requested.name} {requested.version}".rstrip() + f"; {available}",
        f"{requested.name} {requested.version}".rstrip(),
        "choose another version, or check the package source",
    )


def upstream(version: str) -> str:
    """A version without epoch and revision: ``580.65.06`` for ``1:580.65.06-1``."""
    return version.rpartition(":")[2].partition("-")[0]


def fits(requested: RequestedPackage, version: str) -> bool:
    """Whether ``version`` matches ``requested``. The epoch of an rpm (``0:``) is ignored."""
    return not requested.version or fnmatch.fnmatchcase(version.rpartition(":")[2], requested.version)


class Apt:
    """Debian and Ubuntu."""

    unread = ""

    _COMMAND = (
        "apt-get",
        "--quiet",
        "--assume-yes",
        "--no-install-recommends",
        f"-oDPkg::Lock::Timeout={LOCK_LIMIT_S}",
        "-oDpkg::Options::=--force-confdef",
        "-oDpkg::Options::=--force-confold",
        "-oDpkg::Use-Pty=0",
        "-oAcquire::Retries=2",
        "-oAcquire::http::Timeout=30",
        "-oAcquire::https::Timeout=30",
    )
    _ENVIRONMENT: Mapping[str, str] = {
        "DEBIAN_FRONTEND": "noninteractive",
        "NEEDRESTART_MODE": "l",
        "UCF_FORCE_CONFFOLD": "1",
    }

    def installed(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        if not names:
            return {}
        # dpkg-query fails if a name is unknown, but still lists the others.
        listing = run(["dpkg-query", "-W", "-f=${Package}\t${db:Status-Abbrev}\t${Version}\n", *names])
        return parse_dpkg(listing.out)

    def matching(self, patterns: Sequence[str]) -> Mapping[str, PackageState]:
        return self.installed(patterns)  # dpkg-query accepts patterns

    def finish_interrupted(self) -> bool:
        half = run(["dpkg", "--audit"]).out.strip()
        if not half:
            return False
        # It fails for a package without one that it depends on (after a full disk), which apt installs, and for one
        # that fails again, such as a driver that does not build. What is still wrong, the next installation reports.
        run(
            ["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"],
            INSTALL_LIMIT_S,
            environment=self._ENVIRONMENT,
        )
        # Packages that were not unpacked any more.
        if not self.get("check").ok:
            self._checked(self.get("install", "--fix-broken"), "apt-get install --fix-broken")
        return True

    def refresh(self, files: Sequence[str] = ()) -> None:
        per_file: list[tuple[str, ...]] = [
            (f"-oDir::Etc::SourceList={file}", "-oDir::Etc::SourceParts=-", "-oAPT::Get::List-Cleanup=false")
            for file in files
        ]
        self.unread = ""
        for options in per_file or [()]:
            result = self.get("update", *options)
            self._checked(result, "apt-get update")
            # apt only warns about a source that it cannot reach, and keeps its old list.
            if "W: Failed to fetch" in result.text and (cause := causes.find(Program.APT, result.text)):
                self.unread = self.unread or str(cause)

    def available(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return parse_madison(run(["apt-cache", "madison", *names]).out)

    def effects(self, packages: Mapping[str, str], *, replace: bool = False) -> Effects:
        result = self.get("install", "--simulate", *self._versions(packages, replace))
        self._checked(result, "apt-get install")
        return parse_simulation(result.out)

    def install(self, packages: Mapping[str, str], *, replace: bool = False) -> None:
        self._checked(self.get("install", *self._versions(packages, replace)), f"installing {', '.join(packages)}")

    def download(self, packages: Mapping[str, str]) -> None:
        done = self.get("install", "--download-only", *self._versions(packages, replace=True))
        self._checked(done, f"downloading {', '.join(packages)}")

    def has_downloaded(self, packages: Mapping[str, str]) -> bool:
        files = [f"{name}_{version.replace(':', '%3a')}_" for name, version in packages.items()]
        return all(glob.glob(f"{_ARCHIVES}/{glob.escape(file)}*.deb") for file in files)

    @staticmethod
    def _versions(packages: Mapping[str, str], replace: bool) -> list[str]:
        options = ["--allow-change-held-packages", "--allow-downgrades"] if replace else []
        return [*options, *(f"{name}={version}" for name, version in packages.items())]

    def hold(self, names: Sequence[str], held: bool) -> None:
        if names:
            self._checked(run(["apt-mark", "hold" if held else "unhold", *names]), "apt-mark")

    def purge(self, names: Sequence[str]) -> None:
        self.remove(names, "purge")

    def remove(self, names: Sequence[str], verb: str = "remove") -> None:
        if names:
            self._checked(self.get(verb, "--allow-change-held-packages", *names), f"removing {', '.join(names)}")
            for name in names:
                for archive in glob.glob(f"{_ARCHIVES}/{glob.escape(name)}_*.deb"):
                    os.unlink(archive)

    def removals(self, names: Sequence[str]) -> Sequence[str]:
        # Without sources apt has no other package to install instead: all that one of these is needed by goes.
        simulated = self.get("purge", "--simulate", "--allow-change-held-packages", *WITHOUT_SOURCES, *names)
        self._checked(simulated, "simulating the removal of packages")
        return parse_simulation(simulated.out).removes

    def contents(self, names: Sequence[str]) -> tuple[Sequence[str], str]:
        scripts = [path for name in names for path in glob.glob(f"{_SCRIPTS}/{glob.escape(name)}[.:]*postinst")]
        return run(["dpkg-query", "-L", *names]).out.splitlines(), "".join(disk.read(path) or "" for path in scripts)

    @classmethod
    def get(cls, *arguments: str) -> CommandResult:
        """Run apt-get: it never asks, and keeps changed configuration files."""
        return run([*cls._COMMAND, *arguments], INSTALL_LIMIT_S, environment=cls._ENVIRONMENT)

    @staticmethod
    def _checked(result: CommandResult, title: str) -> None:
        if not result.ok:
            raise failure(Program.APT, title, result)


@contextlib.contextmanager
def other_lists() -> Iterator[Sequence[str]]:
    """apt's options for lists of packages in a folder that is deleted again: `update` reads them into it."""
    with tempfile.TemporaryDirectory(prefix="gpunodes-") as folder:
        os.chmod(folder, 0o755)  # noqa: S103 - apt reads it as another user, and it has no secret
        os.mkdir(f"{folder}/partial")
        yield f"-oDir::State::Lists={folder}/", "-oDir::Cache::pkgcache=", "-oDir::Cache::srcpkgcache="


def failure(program: Program, title: str, result: CommandResult) -> MachineProblem:
    """Why a package manager failed, by its first cause."""
    cause = causes.of(program, result.text)
    missing = re.search(r"Unable to fetch|Failed to fetch|404|Cannot download|No more mirrors", result.text)
    kind = NotFetched if missing else MachineProblem
    return kind(f"{title} failed: {cause.found}", "", cause.remedy, result.text)


class Dnf:
    """RHEL and its family. Unlike Apt, it is not tested on machines."""

    unread = ""

    _COMMAND = ("dnf", "--quiet", "--assumeyes", "--setopt=install_weak_deps=False", "--disableexcludes=all")

    def __init__(self) -> None:
        self.environment: Mapping[str, str] = {}
        """The variables of its proxies; a source's own options come first."""

    def installed(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        listing = run(["rpm", "-q", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n", *names]) if names else None
        held = self._held() if names else set()
        found = {}
        for line in listing.out.splitlines() if listing else ():
            name, tab, version = line.partition("\t")
            if tab:
                found[name] = PackageState(version, held=name in held)
        return found

    def matching(self, patterns: Sequence[str]) -> Mapping[str, PackageState]:
        listing = run(["rpm", "-qa", "--qf", "%{NAME}\n", *patterns]) if patterns else None
        return self.installed(sorted(set(listing.out.split()))) if listing else {}

    def finish_interrupted(self) -> bool:
        return False  # rpm's transactions are atomic

    def refresh(self, files: Sequence[str] = ()) -> None:  # noqa: ARG002 - dnf fetches only changed sources
        self._checked(self._dnf("makecache"), "dnf makecache")

    def available(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        result = self._dnf("repoquery", "--latest-limit=100", "--qf", "%{name}\t%{version}-%{release}\n", *names)
        found: dict[str, list[str]] = {}
        for line in result.out.splitlines():
            name, tab, version = line.partition("\t")
            if tab:
                found.setdefault(name, []).insert(0, version)
        return found

    def effects(self, packages: Mapping[str, str], *, replace: bool = False) -> Effects:
        return parse_dnf_transaction(self._dnf(*self._install(packages, replace), "--assumeno").out)

    def install(self, packages: Mapping[str, str], *, replace: bool = False) -> None:
        self._checked(self._dnf(*self._install(packages, replace)), f"installing {', '.join(packages)}")

    def download(self, packages: Mapping[str, str]) -> None:
        done = self._dnf(*self._install(packages, replace=True), "--downloadonly")
        self._checked(done, f"downloading {', '.join(packages)}")

    def has_downloaded(self, packages: Mapping[str, str]) -> bool:  # noqa: ARG002 - dnf does not tell
        return False

    @staticmethod
    def _install(packages: Mapping[str, str], replace: bool) -> list[str]:
        # A version lock hides all other versions. `install` of an exact older version is a downgrade (dnf(8)).
        options = ["--disableplugin=versionlock"] if replace else []
        return [*options, "install", *(f"{name}-{version}" for name, version in packages.items())]

    def hold(self, names: Sequence[str], held: bool) -> None:
        if names:
            self._checked(self._dnf("versionlock", "add" if held else "delete", *names), "dnf versionlock")

    def purge(self, names: Sequence[str]) -> None:
        if names:
            self._checked(self._dnf("remove", "--noautoremove", *names), f"removing {', '.join(names)}")

    # rpm does not distinguish removing from purging.
    remove = purge

    def removals(self, names: Sequence[str]) -> Sequence[str]:
        going = [*names]
        while True:
            asked = run(["rpm", "--erase", "--test", *going])
            more = [name for name in parse_rpm_test(asked.text) if name not in going]
            if not more:
                break
            going += more
        return going

    def contents(self, names: Sequence[str]) -> tuple[Sequence[str], str]:
        return run(["rpm", "-ql", *names]).out.splitlines(), run(["rpm", "-q", "--scripts", *names]).out

    def _held(self) -> set[str]:
        lines = self._dnf("versionlock", "list").out.splitlines()
        return {line.rpartition(":")[0].rpartition("-")[0] if ":" in line else line for line in lines}

    def _dnf(self, *arguments: str) -> CommandResult:
        return run([*self._COMMAND, *arguments], INSTALL_LIMIT_S, environment=self.environment)

    @staticmethod
    def _checked(result: CommandResult, title: str) -> None:
        if not result.ok:
            raise failure(Program.DNF, title, result)


def stream_file(module: str) -> str:
    """The file in which dnf stores the enabled stream of a module."""
    return f"/etc/dnf/modules.d/{module}.module"


def enabled_stream(text: str) -> str:
    """Parse such a file, an ini section with ``stream=`` and ``state=``; the enabled stream, "" for none."""
    values = dict(line.split("=", 1) for line in text.replace(" ", "").splitlines() if "=" in line)
    return values.get("stream", "") if values.get("state") == "enabled" else ""
