"""The machine's threads: those that are stuck, and the driver's tools."""

import contextlib
import os
import re
import time
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

from . import readers
from .known import DRIVER_THREAD, FILE_WAIT, STUCK_S, in_driver
from .options import Emit, ProbeOptions

TASKS = 200
"""Maximum number of reported threads."""
SETTLE_S = 0.5
"""A thread that sleeps for so long is reported."""
SPARE_S = 4.0
"""The probe's time that the watch of threads leaves for its end."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PF_KTHREAD = 0x00200000  # include/linux/sched.h
_TOOL = re.compile(DRIVER_THREAD)
_OF_CPU = re.compile(r"(migration|ksoftirqd|kworker)/\d")


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
        self.started_s = int(fields[19]) / CLOCK_TICKS
        self.cpu = fields[36]

    def switches(self) -> str:
        """Its voluntary context switches: as long as they are the same, it sleeps."""
        found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", readers.text(self.folder + "/status"), re.MULTILINE)
        return found.group(1) if found else ""

    def last_run_ms(self) -> Optional[float]:
        """When it last ran, in milliseconds of its CPU's clock; None where the kernel does not report it."""
        found = re.search(r"^se\.exec_start\s*:\s*([\d.]+)", readers.text(self.folder + "/sched", 4096), re.MULTILINE)
        return float(found.group(1)) if found else None

    def wchan(self) -> str:
        return readers.text(self.folder + "/wchan", 256).strip()

    def waits_for_file(self) -> bool:
        """Before Linux 5.7 a read of its stack then waits, too, if it executes the file."""
        return bool(FILE_WAIT.match(self.wchan()))

    def stack(self) -> List[str]:
        """Its kernel stack, [] if it cannot be read; reading it may block."""
        lines = readers.text(self.folder + "/stack", 8192).splitlines()
        # `[<0>] schedule+0x5d/0xd0`: the address is hidden or useless.
        return [re.sub(r"^\[<[^>]*>\] ", "", line) for line in lines]

    def age_s(self, clocks: Dict[str, float]) -> float:
        """For how many seconds, at least, it has not run."""
        last_run = self.last_run_ms()
        return max(0.0, clocks.get(self.cpu, 0.0) - last_run) / 1000 if last_run else 0.0

    def hangs_in_driver(self, clocks: Dict[str, float]) -> bool:
        """Whether it has slept in the driver for ``STUCK_S``, by its stack: it may have any name."""
        return self.age_s(clocks) >= STUCK_S and not self.waits_for_file() and in_driver(self.stack())

    def to_fact(self, clocks: Dict[str, float]) -> Dict[str, Any]:
        return {
            "pid": self.tid,
            "comm": self.comm,
            "state": self.state,
            "kthread": self.kthread,
            "wchan": self.wchan(),
            "stack": [],
            "age_s": round(max(SETTLE_S, self.age_s(clocks)), 1) if self.state == "D" else 0.0,
        }


def thread_of(options: ProbeOptions, pid: int, tid: int) -> Optional[Thread]:
    """The current state of a thread, None when it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return Thread(options, pid, tid)
    return None


def threads(options: ProbeOptions) -> Iterator[Thread]:
    """All threads of the machine, by the numbers of their processes: the kernel's own come first."""
    for pid in _numbers(options.path("proc")):
        for tid in _numbers(options.path("proc/{}/task".format(pid))):
            found = thread_of(options, pid, tid)
            if found:
                yield found


def _numbers(folder: str) -> List[int]:
    return sorted(int(name) for name in readers.names(folder) if name.isdigit())


def tasks(options: ProbeOptions, emit: Emit) -> None:
    """Threads that stay in uninterruptible sleep, and the driver's tools; then their stacks, which may block.

    Of thousands that wait for files, those in the driver are reported, whatever their place.
    """
    started = time.monotonic()
    tools: List[Thread] = []
    asleep: List[Thread] = []
    found = list(threads(options))
    for thread in found:
        if thread.state == "D":
            asleep.append(thread)
        elif _TOOL.match(thread.comm) and (not thread.kthread or thread.state == "R"):
            tools.append(thread)
    stuck = still_asleep(options, asleep, SETTLE_S)
    clocks = cpu_clocks(found) if stuck else {}
    for thread in stuck[:TASKS]:
        emit("tasks", thread.to_fact(clocks))
    if len(stuck) > TASKS:
        emit("errors", {"what": "threads", "error": "{} threads are in uninterruptible sleep".format(len(stuck))})
    reported = stuck[:TASKS] + tools[:TASKS]
    for thread in reported:
        if thread.state != "D":
            emit("tasks", thread.to_fact(clocks))
    in_the_driver = _more(stuck[TASKS:], clocks, emit)
    in_the_driver += _stacks(sorted(reported, key=Thread.waits_for_file), emit)
    limit_s = min(options.smi_s, options.deadline_s - SPARE_S - (time.monotonic() - started))
    _watch(options, in_the_driver, clocks, limit_s, emit)


def _more(asleep: List[Thread], clocks: Dict[str, float], emit: Emit) -> List[Thread]:
    """Report those that sleep in the driver, and return them."""
    found: List[Thread] = []
    for thread in asleep:
        stack = [] if thread.waits_for_file() else thread.stack()
        if len(found) < TASKS and in_driver(stack):
            emit("tasks", thread.to_fact(clocks))
            emit("stacks", {str(thread.tid): stack})
            found.append(thread)
    return found


def _stacks(reported: List[Thread], emit: Emit) -> List[Thread]:
    """Report stacks; returns the threads that sleep in the driver."""
    found: List[Thread] = []
    for thread in reported:
        if thread.state in "DR":
            stack = thread.stack()
            emit("stacks", {str(thread.tid): stack})
            if thread.state == "D" and in_driver(stack):
                found.append(thread)
    return found


def _watch(options: ProbeOptions, asleep: List[Thread], clocks: Dict[str, float], limit_s: float, emit: Emit) -> None:
    """Watch threads in the driver until one has slept for ``STUCK_S``; report how long those slept that did not wake.

    In a driver that hundreds of programs use, each of them waits for a lock most of the time. But they wake.
    """
    started = time.monotonic()
    ages = {thread.tid: max(SETTLE_S, thread.age_s(clocks)) for thread in asleep}
    before = [(thread, thread.switches()) for thread in asleep]
    waited = 0.0
    while before and waited < limit_s and max(ages[thread.tid] for thread, _ in before) + waited < STUCK_S:
        time.sleep(SETTLE_S)
        before = _unmoved(options, before)
        waited = time.monotonic() - started
        emit("ages", {str(thread.tid): round(ages[thread.tid] + waited, 1) for thread, _ in before})


def still_asleep(options: ProbeOptions, asleep: List[Thread], seconds: float) -> List[Thread]:
    """The threads of ``asleep`` that do not wake within ``seconds``: waiting for a disk means a short state D, too."""
    if not asleep:
        return []
    before = [(thread, thread.switches()) for thread in asleep]
    time.sleep(seconds)
    return [thread for thread, _ in _unmoved(options, before)]


def _unmoved(options: ProbeOptions, before: List[Tuple[Thread, str]]) -> List[Tuple[Thread, str]]:
    """Those of ``before`` that have slept since, with the same number of context switches."""
    after = [(thread_of(options, thread.pid, thread.tid), switches) for thread, switches in before]
    return [
        (thread, switches)
        for thread, switches in after
        if thread and thread.state == "D" and thread.switches() == switches
    ]


def cpu_clocks(found: Iterable[Thread]) -> Dict[str, float]:
    """When the kernel's threads of each CPU last ran. Its clock leaves out its interrupts, so clocks differ."""
    clocks: Dict[str, float] = {}
    for thread in found:
        if thread.kthread and _OF_CPU.match(thread.comm):
            clocks[thread.cpu] = max(clocks.get(thread.cpu, 0.0), thread.last_run_ms() or 0.0)
    return clocks
