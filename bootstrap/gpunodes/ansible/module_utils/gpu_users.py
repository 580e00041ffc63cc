"""Which processes use the GPUs: those that have a device of NVIDIA's driver open.

Its name does not prove that: a pod may have a file of its own at /dev/nvidia0, another device of that name, or a
descriptor that opened nothing (O_PATH). So the device's number counts, too. Nothing here waits for a hung driver, or
for the server of a file.

Standard library only, Python 3.6 and newer: ``escalate.py`` is sent with it.
"""

import errno
import os
import re
import stat
import struct
from typing import Iterator, List, NamedTuple, Optional, Pattern, Set

_TYPE, _DEVICE_MAJOR = 28, 128
"""Offsets in struct statx (include/uapi/linux/stat.h)."""
_AT_FDCWD, _DONT_SYNC, _NO_AUTOMOUNT = -100, 0x4000, 0x800
_GONE = (errno.ENOENT, errno.ESRCH, errno.EACCES)


class GpuUser(NamedTuple):
    """A process that uses a GPU. Its name is its own choice: one printable line, possibly empty."""

    pid: int
    name: str
    cgroup: str


def find(names: str, proc: str = "/proc") -> List[GpuUser]:
    """The processes, by number, that have a device open whose name in /dev matches ``names`` (``nvidia[0-9]+``)."""
    pattern = re.compile(r"/dev/(?:%s)(?: \(deleted\))?\Z" % names)
    majors = _majors(_text(proc + "/devices"))
    found = []
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
        folder = "%s/%d" % (proc, pid)
        if any(_major(path) in majors and _is_open(*path.rsplit("/fd/", 1)) for path in _named(folder, pattern)):
            line = " ".join(_text(folder + "/comm").split())
            name = "".join(each if each.isprintable() else "?" for each in line)
            found.append(GpuUser(pid, name, _text(folder + "/cgroup")))
    return found


def _named(folder: str, pattern: Pattern[str]) -> Iterator[str]:
    """The descriptors of a process that have such a name.

    What a process closes meanwhile is left out: a busy one must not look like one without a GPU.
    """
    try:
        listed = os.listdir(folder + "/fd")
    except OSError as error:
        if error.errno in _GONE:
            return
        raise
    for fd in listed:
        path = "%s/fd/%s" % (folder, fd)
        try:
            link = os.readlink(path)
        except OSError:
            continue
        if pattern.match(link):
            yield path


def _majors(devices: str) -> Set[int]:
    """The major numbers of the driver's character devices in /proc/devices."""
    characters = devices.partition("Block devices:")[0]
    return {int(number) for number in re.findall(r"^ *(\d+) nvidia\S*$", characters, re.M)}


def _major(path: str) -> Optional[int]:
    """The major number of the character device behind a link, None for any other file.

    AT_STATX_DONT_SYNC: the type is known without the server of a file, which may be silent (statx(2)).
    """
    try:
        # Slow to import, and only needed where something has the name of a device.
        import ctypes

        buffer = ctypes.create_string_buffer(256)
        flags = _DONT_SYNC | _NO_AUTOMOUNT
        if ctypes.CDLL(None).statx(_AT_FDCWD, os.fsencode(path), flags, 0, buffer):
            return None
    except (ImportError, AttributeError):
        return _of_stat(path)
    (mode,) = struct.unpack_from("=H", buffer, _TYPE)
    (major,) = struct.unpack_from("=I", buffer, _DEVICE_MAJOR)
    return major if stat.S_ISCHR(mode) else None


def _of_stat(path: str) -> Optional[int]:
    """The same without statx (C libraries before 2018), where this may wait."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return os.major(found.st_rdev) if stat.S_ISCHR(found.st_mode) else None


def _is_open(folder: str, fd: str) -> bool:
    """Whether the descriptor is that of an open file: one with O_PATH is only its name (open(2))."""
    flags = re.search(r"^flags:\s*([0-7]+)$", _text("%s/fdinfo/%s" % (folder, fd)), re.M)
    return not (flags and int(flags.group(1), 8) & os.O_PATH)


def _text(path: str) -> str:
    """A file of /proc, "" for one that is gone; processes choose bytes in it."""
    try:
        with open(path, "rb") as file:
            return file.read(65536).decode("utf-8", "replace")
    except OSError:
        return ""
