"""The identity of a command in a lock: whose it is, and whether its process is alive."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import socket
import subprocess
import sys
from pathlib import Path

_UNKNOWN_BOOT = f"unknown-{secrets.token_hex(8)}"


def user_at_host() -> str:
    """The user of this command, and the controller."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def identity(command: str) -> str:
    """The identity of this command in a lock: user@host and command, and the data to check if its process is alive."""
    name = f"{user_at_host()}/{command}"
    return f"{name}/{_boot_and_namespace()}/{os.getpid()}/{_start_time(os.getpid())}/{secrets.token_hex(4)}"


def described(holder: str) -> str:
    """A holder's identity for messages: its command and user."""
    user, _, command = holder.rsplit("/", 4)[0].partition("/")
    return f"`gpunodes {command}` of {user}" if command else user or "an unknown user"


def dead_here(holder: str) -> bool:
    """Whether the holder was a process of the controller, in its current boot, that has ended: then its lock is free.

    Hosts may share a name, and containers a kernel: a process counts as dead only if this process could see it alive.
    """
    parts = holder.rsplit("/", 4)
    if len(parts) != 5 or not re.fullmatch("[0-9]+", parts[2]):  # noqa: PLR2004 - the parts of an identity
        return False
    name, boot, pid, start_time, _ = parts
    host = name.partition("/")[0].rpartition("@")[2]
    return host == socket.gethostname() and boot == _boot_and_namespace() and _has_ended(int(pid), start_time)


def _has_ended(pid: int, start_time: str) -> bool:
    """Whether the process with this start time has ended; /proc may hide other users' processes (proc(5), hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # a process of another user
    current = _start_time(pid)
    return bool(current) and current != start_time


def _boot_and_namespace() -> str:
    """The boot id, and the pid namespace, which decides which processes are visible (pid_namespaces(7)).

    macOS has no such namespaces. A boot that is unknown is no other command's boot.
    """
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "kern.bootsessionuuid") or _UNKNOWN_BOOT
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks (proc(5), stat, field 22), on macOS as a date; "" without a process."""
    if sys.platform == "darwin":
        return "-".join(_output("ps", "-o", "lstart=", "-p", str(pid)).split())
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _output(*argv: str) -> str:
    """What a program of macOS prints in one line; "" if it fails."""
    try:
        done = subprocess.run(argv, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
