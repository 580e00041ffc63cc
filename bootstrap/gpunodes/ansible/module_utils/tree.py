"""Removes folders of a machine without crossing a mount or following a link.

All code that removes a folder on a machine uses this module: first ``unmount`` for mounts of gpunodes' own services,
then ``check_unmounted``, which refuses while anything is mounted there, then ``remove``.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import shlex
import string
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from . import disk
from .problem import MachineProblem
from .process import run

_MOUNTS = "/proc/self/mountinfo"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_UNMOUNT_S = 30
_USERS = 5
"""How many processes that use a mount an error names."""
_RESCANS = 100
"""How often an emptied folder may contain new files or folders, because a process still writes to it."""
_LIMIT_S = 600
"""Seconds after which the removal of a folder fails in which more new folders appear than that."""
_SAFE_BYTES = frozenset(f"{string.ascii_letters}{string.digits}/._-+:@%=,".encode())
"""Bytes that need no escape in any quoting of a shell."""
_LOST_FOUND = "lost+found"
"""Belongs to the file system of a disk and is never removed."""


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo: mount point, source and file system (proc_pid_mountinfo(5))."""

    point: str
    source: str
    kind: str = ""


def below(folders: Iterable[str]) -> list[Mount]:
    """The mounts below ``folders``, the last mounted first; links in the folders' paths are resolved."""
    roots = tuple(f"{os.path.realpath(folder).rstrip('/')}/" for folder in folders)
    return [mount for mount in _mounts() if mount.point.startswith(roots)]


def mount_of(path: str) -> Mount:
    """The mount that contains ``path``, which need not exist; links in it are resolved."""
    real = f"{os.path.realpath(path).rstrip('/')}/"
    found = [mount for mount in _mounts() if real.startswith(f"{mount.point.rstrip('/')}/")]
    return max(found, key=lambda mount: len(mount.point), default=Mount("/", ""))


def unmount(folders: Iterable[str]) -> None:
    """Unmount everything below ``folders`` that no process uses.

    It never unmounts lazily: that would hide a mount from this module while processes still write to it.
    """
    for mount in below(folders):
        run(["umount", "--no-canonicalize", mount.point], _UNMOUNT_S)


def check_unmounted(folders: Iterable[str], created: Iterable[str] = ()) -> None:
    """Raise MachineProblem while anything is mounted below ``folders``, or on one of the folders ``created``.

    ``created`` are folders that gpunodes created. A folder that existed before may be a mounted disk: ``remove``
    empties it and keeps the mount.
    """
    own = {os.path.realpath(folder) for folder in created}
    for mount in [*below(folders), *(mount for mount in _mounts() if mount.point in own)]:
        used_by = users(mount.point)
        usage = f" and used by {', '.join(used_by)}" if used_by else ""
        raise MachineProblem(
            f"{shown(mount.point)} ({shown(mount.source)}) is mounted{usage}",
            "no mount in a folder that is to be removed",
            f"{'end these processes, then ' if used_by else ''}`umount {_quoted(mount.point)}`; run the command again",
        )


def users(point: str) -> list[str]:
    """Processes with their working directory or open files in a mount: ``name (pid)``.

    Only links in /proc are read: that works even when the file system itself hangs. A process that has only mapped
    a file is not found, because reading /proc/PID/maps may hang.
    """
    found = []
    for folder in sorted(glob.glob("/proc/[0-9]*"), key=lambda path: int(os.path.basename(path))):
        links = []
        for path in (f"{folder}/cwd", f"{folder}/root", f"{folder}/exe", *glob.glob(f"{folder}/fd/*")):
            with contextlib.suppress(OSError):  # the process has ended
                links.append(os.readlink(path))
        if any(f"{link}/".startswith(f"{point}/") for link in links):
            name = "?"
            with contextlib.suppress(OSError):  # the process has ended: ESRCH if the file is already open
                name = (disk.read(f"{folder}/comm") or "?").strip()
            found.append(f"{shown(name)} ({os.path.basename(folder)})")
    return [*found[:_USERS], *([f"{len(found) - _USERS} more"] if len(found) > _USERS else [])]


def remove(folder: str, created: bool = False, kept: Iterable[str] = ()) -> None:
    """Remove a folder with its contents, but not the paths ``kept`` below it; a missing folder is not an error.

    A folder that is a link or a mount point is emptied and kept: it existed before gpunodes. ``created``: gpunodes
    created the folder, so a mount on it belongs to another user. Raises MachineProblem in that case, at any mount below
    the folder, even one that is newer than the check with ``mountinfo``, and at files that cannot be removed.
    """
    below = {os.path.relpath(each, folder) for each in kept if os.path.lexists(each)}
    path = os.path.realpath(folder)
    try:
        root = os.open(path, _FOLDER)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _not_removed(folder, error) from error
    try:
        mounted = _is_mounted(root)
        if mounted and created:
            raise _mounted_on(path)
        stays = mounted or os.path.islink(folder)
        deadline = time.monotonic() + _LIMIT_S
        for rescan in range(_RESCANS):
            _empty(root, path, {*below, *([_LOST_FOUND] if stays else [])}, deadline)
            if stays or below or _remove_empty(path, last=rescan == _RESCANS - 1):
                break
    except OSError as error:
        raise _not_removed(folder, error) from error
    finally:
        os.close(root)


def has_content(folder: str) -> bool:
    """Whether a folder exists and contains anything that ``remove`` would delete."""
    return os.path.isdir(folder) and any(name != _LOST_FOUND for name in os.listdir(folder))


def shown(text: str) -> str:
    """A name that is safe in a message: control characters are replaced."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _mounts() -> list[Mount]:
    found = []
    with open(_MOUNTS, "rb") as file:
        # The kernel escapes only line feeds; other characters that end a line elsewhere may be part of a name.
        lines = file.read().split(b"\n")
    for line in filter(None, lines):
        fields, _, rest = line.partition(b" - ")
        try:
            point, source, kind = map(_decoded, (fields.split(b" ")[4], rest.split(b" ")[1], rest.split(b" ")[0]))
        except (IndexError, ValueError):
            raise MachineProblem(f"{_MOUNTS} has an invalid line: {shown(os.fsdecode(line))}") from None
        # The kernel marks a mount whose folder was deleted: it has no path.
        if not point.endswith("//deleted"):
            found.append(Mount(point, source, kind))
    return found[::-1]


def unescaped(name: str) -> str:
    """A name of /etc/fstab, which has the same octal escapes as mountinfo."""
    return _decoded(os.fsencode(name))


def _decoded(name: bytes) -> str:
    """A name of mountinfo without its octal escapes for spaces, tabs, line feeds and backslashes."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal.group(1), 8) & 255]), name))


def _quoted(path: str) -> str:
    """A path in shell quotes, without control characters (bash(1), QUOTING: ``$'...'``)."""
    if path.isprintable():
        return shlex.quote(path)
    escaped = (chr(byte) if byte in _SAFE_BYTES else f"\\{byte:03o}" for byte in os.fsencode(path))
    return f"$'{''.join(escaped)}'"


def _is_mounted(folder: int) -> bool:
    """Whether an open folder is a mount point."""
    parent = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        return _mount_id(parent) != _mount_id(folder)
    finally:
        os.close(parent)


def _mounted_on(path: str) -> MachineProblem:
    return MachineProblem(
        f"{shown(path)} is a mount point",
        "no mount in a folder that is to be removed",
        "unmount it, then run the command again",
    )


def _remove_empty(path: str, last: bool) -> bool:
    """Remove an emptied folder; False where it contains new files and this is not the ``last`` attempt."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or last:
            raise
        return False
    return True


def _empty(root: int, path: str, kept: Collection[str], deadline: float) -> None:
    """Delete everything below the open folder ``root`` except the paths ``kept`` in it.

    After ``deadline`` (monotonic) it fails if new folders appear; what was there may take any time to delete.

    It resolves no path twice, so that no process can insert a link, and it keeps only one folder open, so that any
    depth works. It detects mounts by their id: a bind mount has the same device number as its folder, and a btrfs
    subvolume has another one without being a mount.
    """
    mount = _mount_id(root)
    parents: list[tuple[str, tuple[int, int]]] = []
    stay = {*kept}
    rescans = new = 0
    left: list[int] = []
    current = os.dup(root)
    try:
        while True:
            within = "".join(f"{name}/" for name, _ in parents)
            ours = {each[len(within) :] for each in stay if each.startswith(within)}
            if len(left) == len(parents):
                left.append(_count_folders(current, ours))
            name = _clear_files(current, ours)
            if name:
                try:
                    child = os.open(name, _FOLDER, dir_fd=current)
                except FileNotFoundError:
                    continue  # another process has removed it
                left[-1] -= 1
                new += left[-1] < 0
                if new > _RESCANS and time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, f"it is still written to after {_LIMIT_S} s")
                parents.append((name, _identity(current)))
                os.close(current)
                current = child
                if _mount_id(current) != mount:
                    raise _mounted_on("/".join([path, *(name for name, _ in parents)]))
            elif parents:
                name, identity = parents.pop()
                left.pop()
                parent = os.open("..", _FOLDER, dir_fd=current)
                os.close(current)
                current = parent
                if _identity(current) != identity:
                    raise OSError(errno.EBUSY, "another process moves folders there")
                if any(each.startswith(within) for each in stay):
                    stay.add(within.rstrip("/"))
                    continue
                rescans += not _removed(name, current)
                if rescans > _RESCANS:
                    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), name)
            else:
                return
    finally:
        os.close(current)


def _removed(name: str, parent: int) -> bool:
    """Remove an emptied folder in the open folder ``parent``; False where it contains new files."""
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


def _count_folders(folder: int, kept: Collection[str]) -> int:
    """The number of subfolders of an open folder but those ``kept``."""
    with os.scandir(folder) as entries:
        return sum(entry.name not in kept and entry.is_dir(follow_symlinks=False) for entry in entries)


def _clear_files(folder: int, kept: Collection[str]) -> str:
    """Unlink the entries of an open folder but those ``kept`` until the first subfolder; its name, "" without one."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in kept:
                continue
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.name, dir_fd=folder)
    return ""


def _mount_id(folder: int) -> str:
    found = re.search(r"^mnt_id:\s*(\d+)$", disk.read(f"/proc/self/fdinfo/{folder}") or "", re.MULTILINE)
    if not found:
        raise OSError(errno.ENOSYS, "the kernel does not report its mount id (/proc/self/fdinfo)")
    return found.group(1)


def _identity(folder: int) -> tuple[int, int]:
    state = os.fstat(folder)
    return state.st_dev, state.st_ino


def _not_removed(folder: str, error: OSError) -> MachineProblem:
    path = f"{folder}/.../{error.filename}" if error.filename and error.filename != folder else folder
    return MachineProblem(
        f"{shown(str(path))} cannot be removed: {error.strerror}",
        "a folder that can be removed",
        f"see `ls -la {folder}` and `lsattr -a {folder}`, then run the command again",
    )
