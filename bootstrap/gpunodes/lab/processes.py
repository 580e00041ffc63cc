"""Daemons of the lab: started by hand, remembered by process id and start time, ended by nobody's mistake.

A process id alone may belong to somebody else by the time we use it; together with the start time (field 22 of
``/proc/PID/stat``, proc(5)) it names one process for as long as the machine runs.
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
    """One process that is or was there."""

    pid: int
    start: int
    """Clock ticks between the machine's start and the process's."""
    command: tuple[str, ...] = ()
    """What it was started with; empty for a process that somebody else started."""

    @property
    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return start_time(self.pid) == self.start


def start_time(pid: int) -> int | None:
    """The start time of a running process in clock ticks since boot; None for none and for a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command's name is in parentheses and may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def start(folder: Path, name: str, command: Sequence[str | Path], log: Path, environment: dict[str, str]) -> Process:
    """Start a daemon in a session of its own, its output going to ``log``, and remember it in ``folder``."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
        )
    process = Process(child.pid, start_time(child.pid) or 0, tuple(str(word) for word in command))
    (folder / f"{name}.json").write_text(json.dumps(asdict(process)))
    return process


def find(folder: Path, name: str) -> Process | None:
    """The remembered daemon called ``name``, if it still runs."""
    try:
        data = json.loads((folder / f"{name}.json").read_text())
        process = Process(data["pid"], data["start"], tuple(data["command"]))
    except (OSError, ValueError, KeyError):
        return None
    return process if process.alive else None


def remembered(folder: Path) -> dict[str, Process]:
    """All remembered daemons that still run, by name."""
    names = sorted(path.stem for path in folder.glob("*.json"))
    return {name: process for name in names if (process := find(folder, name))}


def elsewhere(mentions: Iterable[str]) -> list[Process]:
    """Processes outside our own network namespace whose command line holds one of ``mentions``.

    So QEMU, which libvirt starts, is found even when libvirt is gone and the namespace has lost its name; what a user
    does in the host's own namespace with the lab's files is not ours.
    """
    wanted = tuple(mentions)
    own = (_PROC / "self" / "ns" / "net").stat().st_ino
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            ours = any(text in words for text in wanted) and (entry / "ns" / "net").stat().st_ino != own
        except OSError:
            continue
        began = start_time(int(entry.name))
        if ours and began is not None:
            found.append(Process(int(entry.name), began))
    return found


def end(processes: Iterable[Process], grace: float = 5) -> None:
    """End processes: asked first, killed after ``grace`` seconds."""
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
            # The handle holds on to whoever has the id now: only if that is still ours is the signal sent.
            if process.alive:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
