"""Access to the machines by the ssh program."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Sequence

from gpunodes.errors import GpunodesError
from gpunodes.lab.layout import USER, LabMachine, Layout

START_LIMIT = 600
"""Seconds that a machine gets from power to SSH; without KVM it took 15 on an idle host and 110 on a busy one."""


def command(layout: Layout, machine: LabMachine, argv: Sequence[str] = ()) -> list[str]:
    """The ssh command line that runs ``argv`` on ``machine``, or opens a shell there."""
    options = {
        "UserKnownHostsFile": str(layout.known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "IdentitiesOnly": "yes",
        "ConnectTimeout": "10",
        # A machine that loses power does not close its connection: without this ssh would wait forever.
        "ServerAliveInterval": "10",
        "ServerAliveCountMax": "6",
        "LogLevel": "ERROR",
    }
    flags = [argument for name, value in options.items() for argument in ("-o", f"{name}={value}")]
    return ["ssh", "-F", "none", "-i", str(layout.ssh_key), *flags, f"{USER}@{machine.address}", *argv]


def responds(machine: LabMachine, timeout: float = 3) -> bool:
    """Whether the machine's SSH server sends its banner within ``timeout`` seconds."""
    try:
        with socket.create_connection((machine.address, 22), timeout=timeout) as connection:
            connection.settimeout(timeout)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def wait(layout: Layout, machine: LabMachine, deadline: float) -> None:
    """Wait until a login succeeds.

    Raises:
        GpunodesError: no login by ``deadline`` (of ``time.monotonic``); with the console's last lines.
    """
    error = "no SSH server"
    while time.monotonic() < deadline:
        if responds(machine):
            argv = command(layout, machine, ["true"])
            done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
            if done.returncode == 0:
                return
            error = done.stderr.strip()
        time.sleep(0.5)
    raise GpunodesError(
        f"no SSH login on {machine.name}: {error}; its console's last lines: {console_tail(layout, machine)}",
        remedy=f"see `gpunodes lab console {machine.name}`",
    )


def console_tail(layout: Layout, machine: LabMachine, lines: int = 5) -> str:
    """The last lines of the machine's console, on one line."""
    try:
        text = layout.console_log(machine.name).read_text(errors="replace")
    except OSError:
        return "(none)"
    return " / ".join([line.strip() for line in text.splitlines() if line.strip()][-lines:]) or "(none)"


def set_clock(layout: Layout, machine: LabMachine) -> None:
    """Set the machine's clock to the host's.

    After a restore it still has the time of the snapshot, and an emulated machine may have another time soon after its
    boot: once one was 27 minutes ahead.

    Raises:
        GpunodesError: the machine did not respond.
    """
    argv = command(layout, machine, ["sudo", "date", "--utc", "--set", f"@{time.time():.3f}"])
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False)
    if done.returncode:
        raise GpunodesError(f"setting the clock of {machine.name} failed: {done.stderr.strip()}")
