"""The machine's clock: whether it is synchronised, and by which time service. Starts no program."""

from __future__ import annotations

import ctypes
import glob
import os
import re
import struct
from typing import Any

from . import disk, ledger
from .problem import MachineProblem

_PROGRAMS = {"chronyd", "systemd-timesyn", "ntpd", "ptp4l", "phc2sys"}
"""Processes of time services: chrony, systemd-timesyncd, ntpsec, ntp and openntpd, linuxptp.

The kernel cuts their names after 15 characters (proc_pid_comm(5)). A guest's clock such as kvm-clock is no service: it
ticks like the host's, and nothing sets it again after a pause or a migration.
"""
_OWN = ("systemd-timesyncd", "chronyd")
"""Services that the role node may start."""
_SERVICE = re.compile(r"/system\.slice/(?:[^/\n]+\.slice/)*([A-Za-z0-9:_.\\@-]{1,200})\.service$", re.MULTILINE)
_UNSYNCHRONISED = 0x40
"""STA_UNSYNC (adjtimex(2), linux/timex.h)."""
_STATUS_AFTER_LONGS = 5
"""In struct timex ``status`` follows ``modes``, padded to a long, and four longs."""


def read(root: str = "") -> dict[str, Any]:
    """``synchronised`` (None if the kernel does not tell), the running ``services``, and which one is gpunodes' own."""
    return {"synchronised": synchronised(), "services": services(root), "own": _own()}


def synchronised() -> bool | None:
    """Whether the kernel takes its clock for synchronised: a time service clears its flag STA_UNSYNC."""
    buffer = ctypes.create_string_buffer(512)  # struct timex has 208 bytes; modes = 0 only reads
    try:
        failed = ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0
    except (AttributeError, OSError):
        return None
    (status,) = struct.unpack_from("i", buffer, _STATUS_AFTER_LONGS * struct.calcsize("l"))
    return None if failed else not status & _UNSYNCHRONISED


def services(root: str = "") -> list[str]:
    """The running time services by the names of their systemd units; a time service in a container does not count."""
    found: set[str] = set()
    for path in glob.glob(f"{root}/proc/[0-9]*/comm"):
        try:
            if (disk.read(path) or "").strip() in _PROGRAMS:
                unit = _SERVICE.search(disk.read(f"{os.path.dirname(path)}/cgroup") or "")
                found.update({unit.group(1)} if unit else ())
        except OSError:  # the process has ended
            continue
    return sorted(found)


def _own() -> str:
    """The time service that gpunodes started, "" for none."""
    try:
        started = ledger.load().services
    except MachineProblem:
        return ""
    return next((name for name in _OWN if name in started and not started[name]["active"]), "")
