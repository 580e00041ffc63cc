"""The package managers' listings and simulations as data. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PackageState:
    """A completely installed package."""

    version: str
    held: bool


@dataclass(frozen=True)
class Effects:
    """The packages that an installation would install, remove and upgrade."""

    installs: Sequence[str]
    removes: Sequence[str]
    upgrades: Sequence[str]


def parse_dpkg(listing: str) -> dict[str, PackageState]:
    """Parse ``dpkg-query``'s lines of name, status and version; only completely installed packages."""
    found = {}
    for line in listing.splitlines():
        name, status, version = line.split("\t")
        if status[1:2] == "i" and status[2:].strip() == "":
            found[name] = PackageState(version, held=status[0] == "h")
    return found


def parse_madison(listing: str) -> dict[str, list[str]]:
    """Parse ``apt-cache madison``: lines of ``name | version | source``, best version first."""
    found: dict[str, list[str]] = {}
    for line in listing.splitlines():
        name, version, source = (*(part.strip() for part in line.split("|")), "", "", "")[:3]
        if source.endswith("Packages") and version not in found.setdefault(name, []):
            found[name].append(version)
    return found


def parse_simulation(listing: str) -> Effects:
    """Parse ``apt-get --simulate``: ``Inst name [old] (new ...)`` and ``Remv name [old]``."""
    installs: list[str] = []
    removes: list[str] = []
    upgrades: list[str] = []
    for line in listing.splitlines():
        fields = line.split()
        if fields[:1] == ["Inst"]:
            (upgrades if fields[2].startswith("[") else installs).append(fields[1])
        elif fields[:1] in (["Remv"], ["Purg"]):
            removes.append(fields[1])
    return Effects(installs, removes, upgrades)


def parse_dnf_transaction(listing: str) -> Effects:
    """Parse dnf's table of a transaction: headings that end with ``:``, then indented rows that begin with a name."""
    found: dict[str, list[str]] = {"install": [], "remove": [], "upgrade": []}
    current: list[str] = []
    for line in listing.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line.split()[0].rstrip(":").lower()
            kinds = {"installing": "install", "removing": "remove", "upgrading": "upgrade", "downgrading": "upgrade"}
            current = found.get(kinds.get(heading, ""), [])
        elif line.startswith(" ") and len(line.split()) >= 4:  # noqa: PLR2004 - name, architecture, version, repository
            current.append(line.split()[0])
    return Effects(found["install"], found["remove"], found["upgrade"])


def parse_rpm_test(listing: str) -> list[str]:
    """Parse the failed dependencies of ``rpm -e --test``: ``x is needed by (installed) name-version-release.arch``."""
    needing = re.findall(r" is needed by \(installed\) (\S+)-[^-\s]+-[^-\s]+$", listing, re.MULTILINE)
    return list(dict.fromkeys(needing))
