"""Packages of gpunodes that an administrator has configured or uses by now: a removal would take that away.

A purge deletes /etc/nftables.conf and /etc/exports, also what others wrote there (conffiles of nftables, postrm of
nfs-kernel-server). Without the program, rpm's saved copy of them has no effect either.
"""

from __future__ import annotations

import glob
from collections.abc import Collection

from . import disk, nfs_mounts
from .host import services

EXPORTS = "/etc/exports"
OWN_EXPORTS = "/etc/exports.d/gpunodes.exports"
"""What planner/storage.py writes; that is pure, and imports nothing that reads a machine."""
_RULESET = "nftables"
"""A package, and its service, which Debian, Ubuntu and the RHEL family leave disabled. gpunodes never enables it."""
_SERVERS = ("nfs-kernel-server", "nfs-utils")
_CLIENTS = ("nfs-common", "nfs-utils")
FSTAB = "/etc/fstab"
"""gpunodes writes no mount of NFS there."""


def why(names: Collection[str]) -> dict[str, str]:
    """Those of the packages ``names`` that stay, with the reason."""
    found = {}
    if _RULESET in names and services.states([_RULESET]).get(_RULESET, {}).get("enabled"):
        found[_RULESET] = "its service is enabled, and loads a ruleset that gpunodes did not write"
    servers = [name for name in _SERVERS if name in names]
    for path in other_exports() if servers else ():
        found |= dict.fromkeys(servers, f"{path} has exports that gpunodes did not write")
    clients = [name for name in _CLIENTS if name in names]
    for reason in _other_mounts() if clients else ():
        found |= dict.fromkeys(clients, reason)
    return found


def other_exports() -> list[str]:
    """The first file with exports of others, which exportfs reads (exports(5)); [] without one."""
    paths = [EXPORTS, *sorted(glob.glob(f"{EXPORTS}.d/*.exports"))]
    return [path for path in paths if path != OWN_EXPORTS and _exports(disk.read(path) or "")][:1]


def _other_mounts() -> list[str]:
    """Why the NFS client stays for mounts of others: the first of them; [] without one."""
    return [
        f"{path} has an NFS mount on {point}, which gpunodes did not make"
        for path in (FSTAB, nfs_mounts.MOUNTS)
        for point in nfs_mounts.of_others(disk.read(path) or "")
    ][:1]


def _exports(text: str) -> bool:
    return any(line.partition("#")[0].strip() for line in text.splitlines())
