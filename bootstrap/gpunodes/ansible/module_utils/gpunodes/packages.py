"""The machine's package manager: what is installed, what can be had, and how it gets there."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .problem import MachineProblem
from .process import CommandResult, run

INSTALL_LIMIT_S = 3600
"""A package may build a kernel module, on an emulated machine for half an hour."""
LOCK_LIMIT_S = 300


@dataclass(frozen=True)
class RequestedPackage:
    """A package: ``version`` is a pattern (``1.36.*``), "" for any; ``hold`` keeps upgrades from touching it."""

    name: str
    version: str = ""
    hold: bool = False
    same_as: str = ""
    """A package whose upstream version it must have exactly."""
    first: bool = False
    """Install it before the others are chosen: it decides which versions they have."""


@dataclass(frozen=True)
class PackageState:
    """A package that is there and whole."""

    version: str
    held: bool


@dataclass(frozen=True)
class Effects:
    """What an installation would do beside what was asked for."""

    installs: Sequence[str]
    removes: Sequence[str]
    upgrades: Sequence[str]


class Manager(Protocol):
    """A package manager."""

    def installed(self, names: Sequence[str]) -> Mapping[str, PackageState]:
        """Those of ``names`` that are installed."""

    def matching(self, patterns: Sequence[str]) -> Mapping[str, PackageState]:
        """The installed packages whose names match one of the shell patterns."""

    def mend(self) -> bool:
        """Finish what an interrupted run left half done; True when there was something."""

    def refresh(self, files: Sequence[str] = ()) -> None:
        """Read the sources anew; where it can be done, those of ``files`` alone."""

    def available(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """The versions that the sources have, best first."""

    def effects(self, packages: Mapping[str, str]) -> Effects:
        """What installing ``packages`` (name to version) would do."""

    def install(self, packages: Mapping[str, str]) -> None:
        """Install exactly these versions."""

    def hold(self, names: Sequence[str], held: bool) -> None:
        """Hold the packages, or let them go."""

    def purge(self, names: Sequence[str]) -> None:
        """Remove the packages with their configuration."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove the packages, and leave what only their purging would take away."""


def detect() -> Manager:
    """This machine's package manager; raises MachineProblem when it has none that we know."""
    if os.path.exists("/usr/bin/apt-get"):
        return Apt()
    if os.path.exists("/usr/bin/dnf"):
        return Dnf()
    raise MachineProblem("neither apt-get nor dnf is on this machine", "one of them", "use a supported system")


def choose(wanted: RequestedPackage, versions: Sequence[str]) -> str:
    """The best of ``versions`` that fits; raises MachineProblem when none does."""
    for version in versions:
        if fits(wanted, version):
            return version
    has = f"they have {', '.join(versions[:5])}" if versions else "they have none"
    raise MachineProblem(
        f"the package sources have no {wanted.name} {wanted.version}".rstrip() + f": {has}",
        f"{wanted.name} {wanted.version}".rstrip(),
        "choose another version, or see that the source holds it",
    )


def upstream(version: str) -> str:
    """A version without epoch and revision: ``580.65.06`` of ``1:580.65.06-1``."""
    return version.rpartition(":")[2].partition("-")[0]


def fits(wanted: RequestedPackage, version: str) -> bool:
    """Whether ``version`` is what ``wanted`` asks for. An rpm's epoch (``0:``) is no part of it."""
    return not wanted.version or fnmatch.fnmatchcase(version.rpartition(":")[2], wanted.version)


class Apt:
    """Debian and Ubuntu."""

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
        # dpkg-query fails when one name is unknown, and still lists the others.
        listing = run(["dpkg-query", "-W", "-f=${Package}\t${db:Status-Abbrev}\t${Version}\n", *names])
        return parse_dpkg(listing.out)

    def matching(self, patterns: Sequence[str]) -> Mapping[str, PackageState]:
        return self.installed(patterns)  # dpkg-query takes patterns

    def mend(self) -> bool:
        half = run(["dpkg", "--audit"]).out.strip()
        if not half:
            return False
        self._checked(
            run(
                ["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"],
                INSTALL_LIMIT_S,
                environment=self._ENVIRONMENT,
            ),
            "dpkg --configure -a",
        )
        self._checked(self._apt("install", "--fix-broken"), "apt-get install --fix-broken")
        return True

    def refresh(self, files: Sequence[str] = ()) -> None:
        alone: list[tuple[str, ...]] = [
            (f"-oDir::Etc::SourceList={file}", "-oDir::Etc::SourceParts=-", "-oAPT::Get::List-Cleanup=false")
            for file in files
        ]
        for options in alone or [()]:
            self._checked(self._apt("update", *options), "apt-get update")

    def available(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return parse_madison(run(["apt-cache", "madison", *names]).out)

    def effects(self, packages: Mapping[str, str]) -> Effects:
        done = self._apt("install", "--simulate", *(f"{name}={version}" for name, version in packages.items()))
        self._checked(done, "apt-get install")
        return parse_simulation(done.out)

    def install(self, packages: Mapping[str, str]) -> None:
        words = [f"{name}={version}" for name, version in packages.items()]
        self._checked(self._apt("install", *words), f"installing {', '.join(packages)}")

    def hold(self, names: Sequence[str], held: bool) -> None:
        if names:
            self._checked(run(["apt-mark", "hold" if held else "unhold", *names]), "apt-mark")

    def purge(self, names: Sequence[str]) -> None:
        self.remove(names, "purge")

    def remove(self, names: Sequence[str], how: str = "remove") -> None:
        if names:
            self._checked(self._apt(how, "--allow-change-held-packages", *names), f"removing {', '.join(names)}")
            for name in names:
                for archive in glob.glob(f"/var/cache/apt/archives/{glob.escape(name)}_*.deb"):
                    os.unlink(archive)

    def _apt(self, *words: str) -> CommandResult:
        return run([*self._COMMAND, *words], INSTALL_LIMIT_S, environment=self._ENVIRONMENT)

    @staticmethod
    def _checked(done: CommandResult, what: str) -> None:
        if not done.ok:
            raise MachineProblem(f"{what} failed: {apt_error(done.text)}")


def parse_dpkg(listing: str) -> dict[str, PackageState]:
    """``dpkg-query``'s lines of name, status and version; only packages that are installed and whole."""
    found = {}
    for line in listing.splitlines():
        name, status, version = line.split("\t")
        if status[1:2] == "i" and status[2:].strip() == "":
            found[name] = PackageState(version, held=status[0] == "h")
    return found


def parse_madison(listing: str) -> dict[str, list[str]]:
    """``apt-cache madison``: lines of ``name | version | source``, best version first."""
    found: dict[str, list[str]] = {}
    for line in listing.splitlines():
        name, version, source = (*(part.strip() for part in line.split("|")), "", "", "")[:3]
        if source.endswith("Packages") and version not in found.setdefault(name, []):
            found[name].append(version)
    return found


def parse_simulation(listing: str) -> Effects:
    """``apt-get --simulate``: ``Inst name [old] (new ...)`` and ``Remv name [old]``."""
    installs: list[str] = []
    removes: list[str] = []
    upgrades: list[str] = []
    for line in listing.splitlines():
        words = line.split()
        if words[:1] == ["Inst"]:
            (upgrades if words[2].startswith("[") else installs).append(words[1])
        elif words[:1] in (["Remv"], ["Purg"]):
            removes.append(words[1])
    return Effects(installs, removes, upgrades)


def apt_error(text: str) -> str:
    """apt's first error: its first line that begins with ``E:``, and what it names as missing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    unmet = [line for line in lines if " : Depends: " in line or " : Conflicts: " in line or " : Breaks: " in line]
    errors = [line for line in lines if line.startswith(("E:", "dpkg: error"))]
    return "; ".join((errors[:1] or lines[-1:]) + unmet[:1])


class Dnf:
    """RHEL and its family. Plain, and unlike apt's path not proven on machines."""

    _COMMAND = ("dnf", "--quiet", "--assumeyes", "--setopt=install_weak_deps=False", "--disableexcludes=all")

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

    def mend(self) -> bool:
        return False  # rpm's own transactions are whole or not there

    def refresh(self, files: Sequence[str] = ()) -> None:  # noqa: ARG002 - dnf fetches only what is new
        self._checked(self._dnf("makecache"), "dnf makecache")

    def available(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]:
        done = self._dnf("repoquery", "--latest-limit=100", "--qf", "%{name}\t%{version}-%{release}\n", *names)
        found: dict[str, list[str]] = {}
        for line in done.out.splitlines():
            name, tab, version = line.partition("\t")
            if tab:
                found.setdefault(name, []).insert(0, version)
        return found

    def effects(self, packages: Mapping[str, str]) -> Effects:
        done = self._dnf("install", "--assumeno", *(f"{name}-{version}" for name, version in packages.items()))
        return parse_dnf_transaction(done.out)

    def install(self, packages: Mapping[str, str]) -> None:
        words = [f"{name}-{version}" for name, version in packages.items()]
        self._checked(self._dnf("install", *words), f"installing {', '.join(packages)}")

    def hold(self, names: Sequence[str], held: bool) -> None:
        if names:
            self._checked(self._dnf("versionlock", "add" if held else "delete", *names), "dnf versionlock")

    def purge(self, names: Sequence[str]) -> None:
        if names:
            self._checked(self._dnf("remove", "--noautoremove", *names), f"removing {', '.join(names)}")

    # rpm has no configuration that only a purge takes away.
    remove = purge

    def _held(self) -> set[str]:
        lines = self._dnf("versionlock", "list").out.splitlines()
        return {line.rpartition(":")[0].rpartition("-")[0] if ":" in line else line for line in lines}

    def _dnf(self, *words: str) -> CommandResult:
        return run([*self._COMMAND, *words], INSTALL_LIMIT_S)

    @staticmethod
    def _checked(done: CommandResult, what: str) -> None:
        if not done.ok:
            errors = [line for line in done.text.splitlines() if line.startswith("Error")]
            raise MachineProblem(f"{what} failed: {(errors or done.text.splitlines()[-1:] or [''])[0]}")


def stream_file(module: str) -> str:
    """Where dnf keeps which stream of a module is enabled."""
    return f"/etc/dnf/modules.d/{module}.module"


def enabled_stream(text: str) -> str:
    """The enabled stream in such a file, an ini section with ``stream=`` and ``state=``; "" for none."""
    values = dict(line.split("=", 1) for line in text.replace(" ", "").splitlines() if "=" in line)
    return values.get("stream", "") if values.get("state") == "enabled" else ""


def parse_dnf_transaction(listing: str) -> Effects:
    """dnf's table of a transaction: headings that end with ``:``, then indented rows that begin with a name."""
    found: dict[str, list[str]] = {"install": [], "remove": [], "upgrade": []}
    current: list[str] = []
    for line in listing.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            word = line.split()[0].rstrip(":").lower()
            kinds = {"installing": "install", "removing": "remove", "upgrading": "upgrade", "downgrading": "upgrade"}
            current = found.get(kinds.get(word, ""), [])
        elif line.startswith(" ") and len(line.split()) >= 4:  # noqa: PLR2004 - name, architecture, version, repository
            current.append(line.split()[0])
    return Effects(found["install"], found["remove"], found["upgrade"])
