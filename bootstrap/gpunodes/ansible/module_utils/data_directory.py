"""The directory on another disk that holds the data of containerd, Docker and the kubelet.

Each of their folders below /var/lib becomes a bind mount of a folder in that directory. A flag such as the kubelet's
--root-dir would not do: the socket of device plugins stays in /var/lib/kubelet whatever the flag says
(kubernetes/website, pull request 55430), and CSI drivers mount volumes there.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping

from . import disk, ledger, tree
from .problem import MachineProblem

FILE_SYSTEMS = ("ext4", "xfs", "btrfs")
"""File systems for container images: not a temporary one, and none over a network, on which overlayfs cannot write.

Source: the kernel's Documentation/filesystems/overlayfs.rst; docs.docker.com, "OverlayFS storage driver".
"""
_UNITS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/run/systemd/generator",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_EMPTY = ("lost+found", ".kubelet-keep")
"""Entries of a folder without data: that of a disk, and that of the package kubelet."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check(directory: str, folders: Iterable[str], found: ledger.Ledger) -> None:
    """Raise MachineProblem unless the data of ``folders`` is, or can be, in ``directory``; "": where they are.

    ``found`` is the machine's ledger. Data is never moved.
    """
    present = data_directory(found)
    if present and present != directory:
        raise MachineProblem(
            f"its data is in {present}, and gpunodes_data_directory is {directory or 'empty'}",
            f"{present}: data is not moved",
            "set gpunodes_data_directory back; or reset the machine, then join it again",
        )
    if not directory:
        return
    _check_directory(directory, folders)
    for folder in folders:
        if folder not in found.mounts:
            _check_new(folder, source(directory, folder), found)


def is_path(directory: str) -> bool:
    """Whether a setting is a path that needs no escape in the file of a unit."""
    return re.fullmatch(r"(/[A-Za-z0-9._-]+)+", directory) is not None


def data_directory(found: ledger.Ledger) -> str:
    """The directory that the machine uses, "" for none."""
    return next((os.path.dirname(path) for path in found.mounts.values()), "")


def source(directory: str, folder: str) -> str:
    """Where the data of ``folder`` is."""
    return f"{directory}/{os.path.basename(folder)}"


def is_mounted(folder: str, path: str) -> bool:
    """Whether ``folder`` shows what ``path`` contains."""
    try:
        return folder != path and os.path.samefile(folder, path)
    except OSError:
        return False


def mounted(found: ledger.Ledger) -> dict[str, str]:
    """The mounts of gpunodes that are in place: folder and source."""
    return {folder: path for folder, path in found.mounts.items() if is_mounted(folder, path)}


def missing(found: ledger.Ledger) -> set[str]:
    """The sources whose disk is not mounted: a folder of such a name is not the one that gpunodes created."""
    return {path for path in found.mounts.values() if tree.mount_of(path).point != found.data_disk}


def unit(path: str) -> str:
    """The name of the systemd unit that mounts something at ``path`` (systemd.unit(5), "string escaping")."""
    name = path.strip("/")
    escaped = "".join(
        "-" if each == "/" else each if re.match(r"[A-Za-z0-9:_.]", each) and (index or each != ".") else _octets(each)
        for index, each in enumerate(name)
    )
    return f"{escaped}.mount"


def _octets(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def _check_directory(directory: str, folders: Iterable[str]) -> None:
    def refuse(fact: str, wanted: str, remedy: str) -> MachineProblem:
        return MachineProblem(f"gpunodes_data_directory {directory} {fact}", wanted, remedy)

    if not is_path(directory):
        raise refuse("is not a path", "a path of letters, digits and . _ -, such as /data", "choose another directory")
    try:
        state = os.lstat(directory)
    except OSError as error:
        raise refuse(
            f"cannot be used: {error.strerror}", "a directory on another disk", "mount the disk, create the directory"
        ) from error
    if os.path.realpath(directory) != directory or not stat.S_ISDIR(state.st_mode):
        raise refuse("is not a directory, or leads through a link", "a directory, by its own path", "name that path")
    for folder in folders:
        if f"{folder}/".startswith(f"{directory}/") or f"{directory}/".startswith(f"{folder}/"):
            raise refuse(f"contains {folder}, or is in it", "a directory beside it", "choose another directory")
    _check_owner(directory)
    mount = tree.mount_of(directory)
    disk_of = f"a directory on a disk of its own, with {', '.join(FILE_SYSTEMS)}"
    if mount.point == "/":
        raise refuse(
            "is on the root file system", disk_of, "mount the disk there; or, if there is none, remove this setting"
        )
    if mount.kind not in FILE_SYSTEMS:
        raise refuse(f"is on the file system {tree.shown(mount.kind)}", disk_of, "choose another directory")
    flags = os.statvfs(directory).f_flag
    if flags & (os.ST_RDONLY | os.ST_NOEXEC):
        option = "ro" if flags & os.ST_RDONLY else "noexec"
        raise refuse(f"is on {mount.point}, which is mounted with {option}", f"a mount without {option}", "remount it")
    if not _returns(mount.point):
        raise refuse(
            f"is on {mount.point}, which no boot mounts: it is neither in /etc/fstab nor a mount unit of systemd",
            "a mount that returns after a reboot",
            f"add {mount.point} to /etc/fstab",
        )


def _check_owner(directory: str) -> None:
    """Check that nobody but root can replace the directory or its parents."""
    path = directory
    while True:
        state = os.lstat(path)
        if state.st_uid != 0 or state.st_mode & _OTHERS_WRITE:
            raise MachineProblem(
                f"{path} of gpunodes_data_directory has the owner {state.st_uid} and the mode"
                f" {stat.S_IMODE(state.st_mode):04o}",
                "folders that belong to root and that others cannot write",
                f"`chown root: {path}`, `chmod go-w {path}`; or choose another directory",
            )
        if path == "/":
            return
        path = os.path.dirname(path)


def _check_new(folder: str, path: str, found: ledger.Ledger) -> None:
    """Check that a folder that is not moved yet has no data, and that nothing is in its new place."""
    if os.path.islink(folder) or (os.path.lexists(folder) and not os.path.isdir(folder)):
        raise MachineProblem(f"{folder} is a link or a file", "a folder, or nothing", "move it away")
    if tree.mount_of(folder).point == folder:
        raise MachineProblem(
            f"{folder} is a mount point already",
            "a folder that gpunodes mounts on gpunodes_data_directory",
            f"unmount it, or remove this setting: what uses {folder} is on that disk anyway",
        )
    if os.path.isdir(folder) and any(name not in _EMPTY for name in os.listdir(folder)):
        raise MachineProblem(
            f"{folder} contains data, and gpunodes_data_directory would hide it",
            "no data there: it is not moved",
            "reset the machine, then join it again; delete what other software left there; or remove this setting",
        )
    if os.path.lexists(path) and path not in found.directories:
        raise MachineProblem(
            f"{path} exists, and gpunodes did not create it",
            "a directory without it: it may be the data of other software, or of an earlier installation",
            "move it away, or choose another directory",
        )


def _returns(point: str) -> bool:
    """Whether systemd mounts something at ``point`` at every boot."""
    fields = (line.split() for line in (disk.read("/etc/fstab") or "").splitlines())
    points = {tree.unescaped(each[1]) for each in fields if len(each) > 1 and not each[0].startswith("#")}
    return point in points or any(os.path.exists(f"{folder}/{unit(point)}") for folder in _UNITS)


def free(paths: Iterable[str]) -> list[Mapping[str, object]]:
    """The file systems of ``paths``: each path with the device, the mount point, and the free space in MiB."""
    found: list[Mapping[str, object]] = []
    for path in dict.fromkeys(paths):
        existing = os.path.realpath(path)
        while not os.path.exists(existing):
            existing = os.path.dirname(existing)
        size = os.statvfs(existing)
        found.append(
            {
                "path": path,
                "device": os.stat(existing).st_dev,
                "mount": tree.shown(tree.mount_of(existing).point),
                "free_mib": size.f_bavail * size.f_frsize // (1 << 20),
            }
        )
    return found
