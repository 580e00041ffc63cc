"""Removing folders of a machine, and nothing that lies elsewhere: no mount is crossed and no link is followed.

Whoever removes a folder on a machine does it here. First ``unmount`` what our own services have mounted there, then
``see_bare``, which refuses while anything is mounted, then ``remove``.
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
from collections.abc import Iterable
from dataclasses import dataclass

from . import disk
from .problem import MachineProblem
from .process import run

_MOUNTS = "/proc/self/mountinfo"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_UNMOUNT_S = 30
_USERS = 5
"""How many users of a mount an error names."""
_RESCANS = 100
"""How often a folder that was emptied may turn out not to be empty, because something still writes to it."""
_LIMIT_S = 600
"""Seconds after which a folder that is still written to is given up."""
_PLAIN = frozenset(f"{string.ascii_letters}{string.digits}/._-+:@%=,".encode())
"""Bytes that stand for themselves in any quoting of a shell."""
_FILE_SYSTEMS_OWN = "lost+found"
"""Comes with a disk and stays on it."""


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo: where it is mounted, and what (proc_pid_mountinfo(5))."""

    point: str
    source: str


def below(folders: Iterable[str]) -> list[Mount]:
    """What is mounted below ``folders``, the last mounted first; their links are resolved."""
    roots = tuple(f"{os.path.realpath(folder).rstrip('/')}/" for folder in folders)
    return [mount for mount in _mounts() if mount.point.startswith(roots)]


def unmount(folders: Iterable[str]) -> None:
    """Unmount what is mounted below ``folders``, as far as nobody uses it.

    Never lazily: that hides a mount from us and leaves it to those who still write to it.
    """
    for mount in below(folders):
        run(["umount", "--no-canonicalize", mount.point], _UNMOUNT_S)


def see_bare(folders: Iterable[str], made: Iterable[str] = ()) -> None:
    """Raise MachineProblem while anything is mounted below ``folders``, or on one of those that we have ``made``.

    A folder that was there before us may be a disk of its own: ``remove`` empties it and leaves the mount.
    """
    own = {os.path.realpath(folder) for folder in made}
    for mount in [*below(folders), *(mount for mount in _mounts() if mount.point in own)]:
        who = users(mount.point)
        raise MachineProblem(
            f"{shown(mount.point)} ({shown(mount.source)}) is mounted{' and used by ' if who else ''}{', '.join(who)}",
            "nothing mounted in a folder that is to be removed",
            f"{'end what uses it, then ' if who else ''}`umount {_quoted(mount.point)}`; run the command again",
        )


def users(point: str) -> list[str]:
    """Processes that work in a mount or have files of it open: ``name (pid)``.

    Only links in /proc are read: they answer even when the file system itself does not. A process that has only mapped
    a file is not found, because /proc/PID/maps may hang with that process.
    """
    found = []
    for folder in sorted(glob.glob("/proc/[0-9]*"), key=lambda path: int(os.path.basename(path))):
        links = []
        for path in (f"{folder}/cwd", f"{folder}/root", f"{folder}/exe", *glob.glob(f"{folder}/fd/*")):
            with contextlib.suppress(OSError):  # it ended meanwhile
                links.append(os.readlink(path))
        if any(f"{link}/".startswith(f"{point}/") for link in links):
            name = "?"
            with contextlib.suppress(OSError):  # it ended meanwhile: ESRCH where its folder is open already
                name = (disk.read(f"{folder}/comm") or "?").strip()
            found.append(f"{shown(name)} ({os.path.basename(folder)})")
    return [*found[:_USERS], *([f"{len(found) - _USERS} more"] if len(found) > _USERS else [])]


def remove(folder: str, made: bool = False) -> None:
    """Remove a folder with all that is in it; one that is not there is no error.

    One that is a link or a mount of its own is emptied and stays: it was there before us. Where we have ``made`` it, a
    mount on it is somebody else's. Raises MachineProblem at that and at anything mounted below, even what ``mountinfo``
    did not list a moment ago, and at what cannot be removed.
    """
    place = os.path.realpath(folder)
    try:
        root = os.open(place, _FOLDER)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _stuck(folder, error) from error
    try:
        mounted = _is_mounted(root)
        if mounted and made:
            raise _mounted_on(place)
        stays = mounted or os.path.islink(folder)
        deadline = time.monotonic() + _LIMIT_S
        for rescan in range(_RESCANS):
            _empty(root, place, _FILE_SYSTEMS_OWN if stays else "", deadline)
            if stays or _gone(place, last=rescan == _RESCANS - 1):
                break
    except OSError as error:
        raise _stuck(folder, error) from error
    finally:
        os.close(root)


def holds_anything(folder: str) -> bool:
    """Whether ``remove`` would have anything to do in a folder that stays."""
    return os.path.isdir(folder) and any(name != _FILE_SYSTEMS_OWN for name in os.listdir(folder))


def shown(text: str) -> str:
    """A name as it may stand in a sentence: whoever made it may have put control characters in."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _mounts() -> list[Mount]:
    found = []
    with open(_MOUNTS, "rb") as file:
        # Of all that ends a line elsewhere the kernel escapes a line feed alone.
        lines = file.read().split(b"\n")
    for line in filter(None, lines):
        fields, _, rest = line.partition(b" - ")
        try:
            point, source = (_plain(word) for word in (fields.split(b" ")[4], rest.split(b" ")[1]))
        except (IndexError, ValueError):
            raise MachineProblem(f"{_MOUNTS} has a line of another form: {shown(os.fsdecode(line))}") from None
        # The kernel marks so a mount whose folder is gone: no path leads there.
        if not point.endswith("//deleted"):
            found.append(Mount(point, source))
    return found[::-1]


def _plain(word: bytes) -> str:
    """A name of mountinfo: spaces, tabs, line ends and backslashes are octal there."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal.group(1), 8) & 255]), word))


def _quoted(path: str) -> str:
    """A path as a shell takes it, without control characters (bash(1), QUOTING: ``$'...'``)."""
    if path.isprintable():
        return shlex.quote(path)
    escaped = (chr(byte) if byte in _PLAIN else f"\\{byte:03o}" for byte in os.fsencode(path))
    return f"$'{''.join(escaped)}'"


def _is_mounted(folder: int) -> bool:
    """Whether an open folder is one that something is mounted on."""
    next_step = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        return _mount_id(next_step) != _mount_id(folder)
    finally:
        os.close(next_step)


def _mounted_on(path: str) -> MachineProblem:
    return MachineProblem(
        f"something is mounted on {shown(path)}",
        "nothing mounted in a folder that is to be removed",
        "unmount it, then run the command again",
    )


def _gone(place: str, last: bool) -> bool:
    """Remove an emptied folder; False where something was written to it meanwhile and it is not the ``last`` try."""
    try:
        os.rmdir(place)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or last:
            raise
        return False
    return True


def _empty(root: int, path: str, kept: str, deadline: float) -> None:
    """Delete all below the open folder ``root`` but the entry ``kept``, until ``deadline`` (monotonic) at most.

    No path is walked twice, so that nobody can put a link into the way, and one folder is open at a time, so that no
    depth is too deep. A mount is known by its id: a bind mount has its folder's device number, and a subvolume of btrfs
    has another without being a mount.
    """
    mount = _mount_id(root)
    trail: list[tuple[str, tuple[int, int]]] = []
    rescans = 0
    here = os.dup(root)
    try:
        while True:
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, f"it is still written to after {_LIMIT_S} s")
            name = _clear_files(here, "" if trail else kept)
            if name:
                try:
                    down = os.open(name, _FOLDER, dir_fd=here)
                except FileNotFoundError:
                    continue  # somebody else removes it as well
                trail.append((name, _identity(here)))
                os.close(here)
                here = down
                if _mount_id(here) != mount:
                    raise _mounted_on("/".join([path, *(name for name, _ in trail)]))
            elif trail:
                name, next_step = trail.pop()
                up = os.open("..", _FOLDER, dir_fd=here)
                os.close(here)
                here = up
                if _identity(here) != next_step:
                    raise OSError(errno.EBUSY, "somebody moves folders there")
                try:
                    os.rmdir(name, dir_fd=here)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    rescans += 1
                    if error.errno != errno.ENOTEMPTY or rescans > _RESCANS:
                        raise
            else:
                return
    finally:
        os.close(here)


def _clear_files(folder: int, kept: str) -> str:
    """Unlink the entries of an open folder up to the first that is a folder; its name, "" when there is none."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == kept:
                continue
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.name, dir_fd=folder)
    return ""


def _mount_id(folder: int) -> str:
    found = re.search(r"^mnt_id:\s*(\d+)$", disk.read(f"/proc/self/fdinfo/{folder}") or "", re.MULTILINE)
    if not found:
        raise OSError(errno.ENOSYS, "the kernel does not tell where it is mounted (/proc/self/fdinfo)")
    return found.group(1)


def _identity(folder: int) -> tuple[int, int]:
    state = os.fstat(folder)
    return state.st_dev, state.st_ino


def _stuck(folder: str, error: OSError) -> MachineProblem:
    what = f"{folder}/.../{error.filename}" if error.filename and error.filename != folder else folder
    return MachineProblem(
        f"{shown(str(what))} cannot be removed: {error.strerror}",
        "a folder that can be emptied",
        f"see `ls -la {folder}` and `lsattr -a {folder}`, then run the command again",
    )
