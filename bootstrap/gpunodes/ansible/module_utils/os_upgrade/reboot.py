"""Whether a machine must be rebooted after upgrades, and why."""

from __future__ import annotations

import glob
import os
import platform
import re

from .. import disk, tree
from ..host import gpu_driver
from . import kernels

PROC = "/proc"
REQUIRED = "/run/reboot-required"
_DELETED = re.compile(r"^\S+ \S*x\S* .* (/(?:usr/)?lib\S*\.so\S*) \(deleted\)$", re.MULTILINE)
_OF_PODS = ("kubepods", "docker", "libpod", "containerd.service", "user.slice")
_SHOWN = 5


def reasons() -> list[str]:
    """Why a reboot is due, none if it is not.

    A newer kernel can boot; the running one's image was replaced; the distribution asks for it; or services still run
    with libraries that were replaced. Pods and users' sessions do not count.
    """
    running = platform.release()
    found = []
    if (newest := kernels.newest(running)) != running:
        found.append(f"the kernel {newest} is installed, and {running} runs")
    elif _changed(f"{gpu_driver.BOOT}/vmlinuz-{running}") > _booted():
        found.append(f"the running kernel {running} was replaced by a newer build")
    if os.path.exists(REQUIRED):
        names = [tree.shown(name) for name in sorted({*(disk.read(f"{REQUIRED}.pkgs") or "").split()})[:_SHOWN]]
        found.append(f"the system requires it for {', '.join(names)}" if names else "the system requires it")
    if outdated := services():
        more = f" and {len(outdated) - _SHOWN} more" if len(outdated) > _SHOWN else ""
        found.append(f"{', '.join(outdated[:_SHOWN])}{more} run with libraries that were replaced")
    return found


def services() -> list[str]:
    """The services, and systemd itself, that still use a deleted library."""
    found = set()
    for folder in glob.glob(f"{PROC}/[0-9]*"):
        try:
            # In uninterruptible sleep a process may keep readers of its memory map waiting.
            if (disk.read(f"{folder}/stat") or "").rpartition(") ")[2].startswith("D"):
                continue
            cgroup, maps = disk.read(f"{folder}/cgroup") or "", disk.read(f"{folder}/maps") or ""
        except OSError:
            continue  # the process ended meanwhile
        if not _DELETED.search(maps) or any(part in cgroup for part in _OF_PODS):
            continue
        service = re.search(r"/([A-Za-z0-9:_.@-]{1,100}\.(?:service|scope))", cgroup)
        found.add("systemd" if folder.endswith("/1") else service[1] if service else "")
    return sorted(found - {""})


def _changed(path: str) -> float:
    """When a file was replaced, in seconds since 1970; dpkg keeps a file's own time, so the inode's counts."""
    try:
        return os.stat(path).st_ctime
    except OSError:
        return 0.0


def _booted() -> float:
    found = re.search(r"^btime (\d+)$", disk.read(f"{PROC}/stat") or "", re.MULTILINE)
    return float(found[1]) if found else 0.0
