"""Daemons of the lab: started, recorded by process id and start time, and ended.

A process id alone may meanwhile belong to another process; together with the start time (field 22 of
``/proc/PID/stat``, proc(5)) it identifies one process until the host reboots.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process, which may have ended."""

    pid: int
    start: int
    """Its start time in clock ticks since boot."""
    command: tuple[str, ...] = ()
    """Its command line; empty for a process that the lab did not start."""

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not count."""
        return start_time(self.pid) == self.start


def start_time(pid: int) -> int | None:
    """The start time of a running process in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command's name is in parentheses and may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def start(folder: Path, name: str, command: Sequence[str | Path], log: Path, environment: dict[str, str]) -> Process:
    """Start a daemon in a new session, with its output in ``log``, and record it in ``folder``."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            [str(argument) for argument in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
        )
    process = Process(child.pid, start_time(child.pid) or 0, tuple(str(argument) for argument in command))
    (folder / f"{name}.json").write_text(json.dumps(asdict(process)))
    return process


def find(folder: Path, name: str) -> Process | None:
    """The recorded daemon called ``name``, if it still runs."""
    try:
        data = json.loads((folder / f"{name}.json").read_text())
        process = Process(data["pid"], data["start"], tuple(data["command"]))
    except (OSError, ValueError, KeyError):
        return None
    return process if process.alive else None


def recorded(folder: Path) -> dict[str, Process]:
    """All recorded daemons that still run, by name."""
    names = sorted(path.stem for path in folder.glob("*.json"))
    return {name: process for name in names if (process := find(folder, name))}


def in_other_namespaces(mentions: Iterable[str]) -> list[Process]:
    """Processes outside the current network namespace whose command line contains one of ``mentions``.

    This finds QEMU, which libvirt starts, even when libvirt has ended and the namespace has lost its name. It does not
    find a user's processes that use the lab's files in the host's namespace.
    """
    texts = tuple(mentions)
    own = (_PROC / "self" / "ns" / "net").stat().st_ino
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            matches = any(text in command for text in texts) and (entry / "ns" / "net").stat().st_ino != own
        except OSError:
            continue
        started = start_time(int(entry.name))
        if matches and started is not None:
            found.append(Process(int(entry.name), started))
    return found


def end(processes: Iterable[Process], grace: float = 5) -> None:
    """End processes by SIGTERM, and after ``grace`` seconds by SIGKILL."""
    left = [process for process in processes if process.alive]
    for number, limit in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        for process in left:
            _send(process, number)
        deadline = time.monotonic() + limit
        while left and time.monotonic() < deadline:
            for process in left:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            left = [process for process in left if process.alive]
            if left:
                time.sleep(0.05)


def _send(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            # The handle refers to the process that has the id now: only the recorded one gets the signal.
            if process.alive:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
