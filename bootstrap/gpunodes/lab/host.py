"""The lab's host: its commands, networks and memory, and the user who owns the lab's files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from gpunodes.errors import GpunodesError

Report = Callable[[str], None]
"""Takes one line of progress for the user."""

_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Owner:
    """The user who owns the lab's inventory and key: behind sudo, the user who called it."""

    uid: int
    gid: int

    @classmethod
    def current(cls) -> Owner:
        """The user who runs the lab's command."""
        return cls(int(os.environ.get("SUDO_UID", os.getuid())), int(os.environ.get("SUDO_GID", os.getgid())))

    def give(self, *paths: Path) -> None:
        """Change the owner of ``paths`` to this user."""
        for path in paths:
            os.chown(path, self.uid, self.gid)


def run(command: Sequence[str | Path], *, stdin: str | None = None, timeout: float = 120) -> str:
    """Run a command to its end and return its standard output.

    Raises:
        GpunodesError: it failed or took longer than ``timeout`` seconds; with its last lines of output.
    """
    argv = [str(argument) for argument in command]
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '/usr/bin:/bin')}:{_SBIN}", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise GpunodesError(f"`{' '.join(argv)}` did not end", f"at most {timeout:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
        raise GpunodesError(f"`{' '.join(argv)}` failed ({done.returncode}): {' / '.join(last)}")
    return done.stdout


def which(program: str) -> str | None:
    """The path of a program, searched for in PATH and in the sbin folders."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SBIN}:/usr/bin:/bin")


def used_networks() -> list[IPv4Network]:
    """Networks that the host has routes to, except the default route."""
    routes = json.loads(run(["ip", "-j", "-4", "route", "show", "table", "all"]))
    found = [IPv4Network(route["dst"], strict=False) for route in routes if route["dst"] != "default"]
    return [network for network in found if network.prefixlen]


def memory_mib() -> int:
    """Memory that is available without swapping, in MiB (``MemAvailable``)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0
