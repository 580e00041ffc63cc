"""The machine that the lab runs on: its commands, networks and memory, and whose files we make."""

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
    """The user whose inventory and key the lab makes: the one behind sudo, where there is one."""

    uid: int
    gid: int

    @classmethod
    def current(cls) -> Owner:
        """Who asked for the lab."""
        return cls(int(os.environ.get("SUDO_UID", os.getuid())), int(os.environ.get("SUDO_GID", os.getgid())))

    def give(self, *paths: Path) -> None:
        """Make ``paths`` theirs."""
        for path in paths:
            os.chown(path, self.uid, self.gid)


def run(command: Sequence[str | Path], *, stdin: str | None = None, timeout: float = 120) -> str:
    """Run a command to its end and return its standard output.

    Raises:
        GpunodesError: it failed or took longer than ``timeout`` seconds; carries its last words.
    """
    words = [str(word) for word in command]
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '/usr/bin:/bin')}:{_SBIN}", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise GpunodesError(f"`{' '.join(words)}` did not end", f"at most {timeout:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
        raise GpunodesError(f"`{' '.join(words)}` failed ({done.returncode}): {' / '.join(last)}")
    return done.stdout


def which(program: str) -> str | None:
    """Where a program is, the administrator's folders included even when the user's PATH lacks them."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SBIN}:/usr/bin:/bin")


def used_networks() -> list[IPv4Network]:
    """Networks that the host has routes to, its default route apart."""
    routes = json.loads(run(["ip", "-j", "-4", "route", "show", "table", "all"]))
    found = [IPv4Network(route["dst"], strict=False) for route in routes if route["dst"] != "default"]
    return [network for network in found if network.prefixlen]


def memory_mib() -> int:
    """Memory that programs could take now without swapping, in MiB (``MemAvailable``)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0
