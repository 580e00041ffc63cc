"""The machine's threads: those that are stuck, and the driver's tools."""

import contextlib
import os
import re
import time
from typing import Any, Dict, Iterator, List, Optional

from . import readers
from .known import DRIVER_THREAD, STUCK_S
from .options import Emit, ProbeOptions

TASKS = 200
"""Maximum number of reported threads."""
PF_KTHREAD = 0x00200000  # include/linux/sched.h
_TOOL = re.compile(DRIVER_THREAD)
# A line of /proc/PID/stack inside a module of the driver.
_DRIVER_FRAME = re.compile(r"\+0x[0-9a-f]+/0x[0-9a-f]+ \[nvidia(_\w+)?[ \]]")


class Thread:
    """A thread according to /proc/PID/task/TID/stat (proc(5)). Its command line is never read: that can block."""

    def __init__(self, options: ProbeOptions, pid: int, tid: int) -> None:
        """Raises OSError or ValueError for a thread that is gone."""
        self.folder = options.path("proc/{}/task/{}".format(pid, tid))
        self.pid, self.tid = pid, tid
        with open(self.folder + "/stat", "rb") as file:
            head, _, tail = file.read(2048).decode("utf-8", "replace").rpartition(")")
        self.comm = head.partition("(")[2]
        fields = tail.split()
        self.state = fields[0]
        self.kthread = bool(int(fields[6]) & PF_KTHREAD)

    def reread(self, options: ProbeOptions) -> "Optional[Thread]":
        """The current state of the same thread, None when it is gone."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return Thread(options, self.pid, self.tid)
        return None

    def switches(self) -> str:
        """Its voluntary context switches: the same number twice means that it slept all the time."""
        found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", readers.text(self.folder + "/status"), re.MULTILINE)
        return found.group(1) if found else ""

    def last_run_ms(self) -> Optional[float]:
        """When it last ran, in milliseconds of the scheduler's clock; None where the kernel does not report it."""
        found = re.search(r"^se\.exec_start\s*:\s*([\d.]+)", readers.text(self.folder + "/sched", 4096), re.MULTILINE)
        return float(found.group(1)) if found else None

    def stack(self) -> List[str]:
        """Its kernel stack, [] if it cannot be read; reading it may block."""
        lines = readers.text(self.folder + "/stack", 8192).splitlines()
        # `[<0>] schedule+0x5d/0xd0`: the address is hidden or useless.
        return [re.sub(r"^\[<[^>]*>\] ", "", line) for line in lines]

    def hangs_in_driver(self, now: Optional[float]) -> bool:
        """Whether it has slept in the driver for ``STUCK_S`` at ``now``, the scheduler's clock.

        Its stack is the kernel's word. Its name is not: a process calls itself what it likes.
        """
        last_run = self.last_run_ms() if self.state == "D" and now else None
        return bool(now and last_run and now - last_run >= STUCK_S * 1000 and in_driver(self.stack()))

    def to_fact(self, age_s: float) -> Dict[str, Any]:
        return {
            "pid": self.tid,
            "comm": self.comm,
            "state": self.state,
            "kthread": self.kthread,
            "wchan": readers.text(self.folder + "/wchan", 256).strip(),
            "stack": [],
            "age_s": round(age_s, 1),
        }


def in_driver(stack: List[str]) -> bool:
    return any(_DRIVER_FRAME.search(line) for line in stack)


def threads(options: ProbeOptions) -> Iterator[Thread]:
    """All threads of the machine, by the numbers of their processes: the kernel's own come first."""
    for pid in _numbers(options.path("proc")):
        for tid in _numbers(options.path("proc/{}/task".format(pid))):
            with contextlib.suppress(OSError, ValueError, IndexError):
                yield Thread(options, pid, tid)


def _numbers(folder: str) -> List[int]:
    return sorted(int(name) for name in readers.names(folder) if name.isdigit())


def tasks(options: ProbeOptions, emit: Emit) -> None:
    """Threads that stay in uninterruptible sleep, and the driver's tools; then their stacks: reading them may block.

    A frozen file server makes thousands of threads wait. Those in the driver are reported, whatever their place.
    """
    tools: List[Thread] = []
    asleep: List[Thread] = []
    for thread in threads(options):
        if thread.state == "D":
            asleep.append(thread)
        elif _TOOL.match(thread.comm) and (not thread.kthread or thread.state == "R"):
            tools.append(thread)
    stuck = still_asleep(options, asleep, 0.5)
    now = now_ms(options)
    for thread in stuck[:TASKS]:
        _emit_sleeper(thread, now, emit)
    if len(stuck) > TASKS:
        emit("errors", {"what": "tasks", "error": "{} threads are in uninterruptible sleep".format(len(stuck))})
    reported = stuck[:TASKS] + tools[:TASKS]
    for thread in reported:
        if thread.state != "D":
            emit("tasks", thread.to_fact(0.0))
    for thread in reported:
        if thread.state in "DR":
            emit("stacks", {str(thread.tid): thread.stack()})
    left = TASKS
    for thread in stuck[TASKS:]:
        stack = thread.stack()
        if left and in_driver(stack):
            left -= 1
            _emit_sleeper(thread, now, emit)
            emit("stacks", {str(thread.tid): stack})


def _emit_sleeper(thread: Thread, now: Optional[float], emit: Emit) -> None:
    last_run = thread.last_run_ms()
    emit("tasks", thread.to_fact(max(0.5, (now - last_run) / 1000) if now and last_run else 0.5))


def still_asleep(options: ProbeOptions, asleep: List[Thread], seconds: float) -> List[Thread]:
    """The threads of ``asleep`` that do not wake within ``seconds``: waiting for a disk means a short state D, too."""
    if not asleep:
        return []
    before = [(thread, thread.switches()) for thread in asleep]
    time.sleep(seconds)
    after = [(thread.reread(options), switches) for thread, switches in before]
    return [thread for thread, switches in after if thread and thread.state == "D" and thread.switches() == switches]


def now_ms(options: ProbeOptions) -> Optional[float]:
    """The scheduler's clock: the time at which the thread of this process last ran."""
    try:
        return Thread(options, os.getpid(), os.getpid()).last_run_ms()
    except (OSError, ValueError, IndexError):
        return None
