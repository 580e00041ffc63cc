"""What keeps the driver loaded: processes with a GPU device open, and kernel modules that use it.

Names come from processes, which choose them: they are shown without control characters, and never used otherwise.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .. import disk, gpu_users
from ..host import gpu_driver

MODULES = ("nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia_peermem", "nvidia_fs", "gdrdrv", "nvidia")
"""The driver's modules and those that use it, in the order in which they can be unloaded."""
SERVICES = (
    "nvidia-persistenced",
    "nvidia-fabricmanager",
    "nvidia-imex",
    "nvidia-dcgm",
    "dcgm",
    "nvidia-powerd",
)
"""NVIDIA's services that keep the driver in use or load it again."""
MIG_INSTANCES = "/proc/driver/nvidia/capabilities/gpu*/mig/gi*"
_SHOWN = 60


@dataclass(frozen=True)
class User:
    """A process that has a GPU device open."""

    name: str
    pid: int
    where: str
    """The pod, container or service that it belongs to, "" for none."""

    def __str__(self) -> str:
        place = f" of {self.where}" if self.where else ""
        return f"{self.name[:_SHOWN] or '?'} (process {self.pid}{place})"


def find() -> list[User]:
    """The processes with an open GPU device, by process id; reading never waits for a hung driver."""
    found = gpu_users.find(r"nvidia.*", gpu_driver.PROC)
    return [User(user.name, user.pid, place_of(user.cgroup)) for user in found]


def place_of(cgroup: str) -> str:
    """The pod, container or service of a /proc/PID/cgroup."""
    if pod := re.search(r"kubepods[^\n]*?pod([0-9a-f]{8}(?:[_-][0-9a-f]{4}){3}[_-][0-9a-f]{12})", cgroup):
        return f"pod {pod[1].replace('_', '-')}"
    if container := re.search(r"(?:docker|libpod|cri-containerd)[-/]([0-9a-f]{12})[0-9a-f]{52}", cgroup):
        return f"container {container[1]}"
    service = re.search(r"/([A-Za-z0-9:_.@-]{1,100}\.service)(?:/|$)", cgroup, re.MULTILINE)
    return service[1] if service else ""


def loaded() -> list[str]:
    """The loaded modules that must be unloaded, in that order; modules of others that use the driver come first."""
    folder = f"{gpu_driver.SYS}/module"
    others = sorted(
        os.path.basename(path)
        for name in MODULES
        for path in glob.glob(f"{folder}/{name}/holders/*")
        if os.path.basename(path) not in MODULES
    )
    return [*dict.fromkeys(others), *(name for name in MODULES if os.path.exists(f"{folder}/{name}"))]


def loaded_version() -> str:
    """The version of the loaded driver, "" if none is loaded."""
    return (disk.read(f"{gpu_driver.SYS}/module/nvidia/version") or "").strip()


def wait_until_unused(limit_s: float) -> list[User]:
    """The processes that still use the GPUs after at most ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(1)
    return found


def described(users: Sequence[User]) -> str:
    """Why the driver stays loaded, for a message: its users, or else the counter of the module."""
    if users:
        return f"{', '.join(map(str, users))} use{'s' if len(users) == 1 else ''} the GPUs"
    counts = {name: (disk.read(f"{gpu_driver.SYS}/module/{name}/refcnt") or "").strip() for name in loaded()}
    used = [f"{name} ({count} users)" for name, count in counts.items() if count not in {"", "0"}]
    return f"the kernel modules {', '.join(used or counts)} cannot be unloaded"
