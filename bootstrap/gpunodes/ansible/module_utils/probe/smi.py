"""The run of nvidia-smi, which hangs where the driver hangs."""

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import time
from typing import IO, List, Optional, Tuple, cast

from . import readers
from .known import STUCK_S
from .options import TEXT_BYTES, Emit, ProbeOptions
from .threads import Thread, cpu_clocks, thread_of, threads

MESSAGE_BYTES = 4096
RUNNING_LOCK = "run/gpunodes-nvidia-smi.lock"
"""Held, through an inherited descriptor, as long as a nvidia-smi process of gpunodes exists, even after a kill."""
USERS_LOCK = "tmp/gpunodes-nvidia-smi-{}.lock"
"""The same for a probe without root, by the number of its user."""
LOOK_S = 1.0
"""How often a running nvidia-smi is looked at."""
KILL_S, MOVES_S, BUSY_KILL_S = 1.0, 2.0, 4.0
"""How long a killed nvidia-smi may live; longer if it had moved within ``MOVES_S``: it may wait for a lock."""
HOPELESS_S = 5.0
"""Time limit of nvidia-smi while a thread hangs in the driver: it would wait for the same lock."""


def smi(options: ProbeOptions, emit: Emit) -> None:
    """`nvidia-smi -q -x`, unless the module is not loaded (it would load it) or an earlier nvidia-smi is stuck."""
    program = readers.program(options, "nvidia-smi")
    if not os.path.isdir(options.path("sys/module/nvidia")):
        emit("smi", {"status": "absent", "message": "the kernel module nvidia is not loaded"})
        return
    if program is None:
        emit("smi", {"status": "absent", "message": "nvidia-smi is not installed"})
        return
    deadline = time.monotonic() + options.smi_s
    stuck = hung_thread(options, "nvidia-smi")
    if stuck is not None:
        message = "an earlier nvidia-smi hangs in the driver"
        state = {"pid": stuck.tid, "task_state": stuck.state, "still_s": STUCK_S}
        emit("smi", {"status": "stuck", "message": message, "stack": stuck.stack(), **state})
        return
    lock, holder = _lock(options, deadline)
    if holder is None:
        _run_smi([program, "-q", "-x"], lock, deadline, options, emit)
        return
    message = "an earlier nvidia-smi of gpunodes hangs"
    emit("smi", {"status": "stuck", "pid": holder.pid, "took_s": holder.exists_s(), "message": message})
    holder.emit_state(emit)


class _Watched:
    """A nvidia-smi of gpunodes, and since when it has not moved."""

    def __init__(self, options: ProbeOptions, pid: int) -> None:
        self.pid = pid
        self._options = options
        self._switches = ""
        self._moved = time.monotonic()

    def look(self, *, wrote: bool = False) -> None:
        """It moved if it wrote or woke: in a hung driver it does neither, in one that many programs use it does."""
        thread = thread_of(self._options, self.pid, self.pid)
        switches = thread.switches() if thread else ""
        if wrote or switches != self._switches:
            self._switches = switches
            self._moved = time.monotonic()

    def still_s(self) -> float:
        return round(time.monotonic() - self._moved, 3)

    def exists_s(self) -> float:
        """For how long it exists; 0 if it is gone."""
        thread = thread_of(self._options, self.pid, self.pid)
        uptime = readers.text(self._options.path("proc/uptime")).split()
        return round(max(0.0, float(uptime[0]) - thread.started_s), 3) if thread and uptime else 0.0

    def emit_state(self, emit: Emit) -> None:
        """Report how it hangs; its stack last, which may block."""
        emit("smi", {"still_s": self.still_s()})
        left = thread_of(self._options, self.pid, self.pid)
        if left is not None:
            emit("smi", {"task_state": left.state})
            emit("smi", {"stack": left.stack()})


def hung_thread(options: ProbeOptions, name: str = "") -> Optional[Thread]:
    """A thread that hangs in the driver, if ``name`` is set one with this name."""
    found = list(threads(options))
    asleep = [thread for thread in found if thread.state == "D" and name in ("", thread.comm)]
    clocks = cpu_clocks(found) if asleep else {}
    return next((thread for thread in asleep if thread.hangs_in_driver(clocks)), None)


def _lock(options: ProbeOptions, deadline: float) -> Tuple[Optional[int], Optional[_Watched]]:
    """The lock that every nvidia-smi process of gpunodes holds; or the process that still holds it at the deadline.

    Another process can only have its name. A lock file of another user is not trusted.
    """
    user = os.geteuid()
    try:
        name = USERS_LOCK.format(user) if user else RUNNING_LOCK
        lock = os.open(options.path(name), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None, None
    found = os.fstat(lock)
    if found.st_uid != user or found.st_nlink != 1:
        os.close(lock)
        return None, None
    holder: Optional[_Watched] = None
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock, None
        except OSError:
            # Another probe holds it and may end soon.
            pid = readers.number(os.pread(lock, 32, 0).decode("ascii", "replace")) or 0
            if holder is None or holder.pid != pid:
                holder = _Watched(options, pid)
            holder.look()
            if time.monotonic() > deadline:
                os.close(lock)
                return None, holder
            time.sleep(0.2)


def _run_smi(argv: List[str], lock: Optional[int], deadline: float, options: ProbeOptions, emit: Emit) -> None:
    started = time.monotonic()
    with open(os.devnull, "r+b") as null:
        process = subprocess.Popen(
            argv,
            stdin=null,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=readers.environment(),
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )
    if lock is not None:
        os.ftruncate(lock, 0)
        os.write(lock, str(process.pid).encode("ascii"))
        os.close(lock)
    # In case this process is killed before nvidia-smi ends.
    emit("smi", {"status": "timeout", "pid": process.pid, "message": "nvidia-smi did not end before the probe did"})
    watched = _Watched(options, process.pid)
    output, ended = _read(process, watched, deadline, options, emit)
    while ended and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    # Control characters are not valid there, and take six bytes each in JSON.
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", " ", output[:TEXT_BYTES].decode("utf-8", "replace"))
    fact = {"took_s": round(time.monotonic() - started, 3), "rc": process.poll(), "pid": None, "message": ""}
    fact["still_s"] = watched.still_s()
    spare_s = options.deadline_s - options.smi_s - 2
    kill_s = KILL_S if watched.still_s() > MOVES_S else max(KILL_S, min(BUSY_KILL_S, spare_s))
    survives = fact["rc"] is None and not _kill(process, kill_s)
    if fact["rc"] is None:
        fact.update(status="timeout", message=text[-MESSAGE_BYTES:])
    elif "<nvidia_smi_log>" in text:
        fact.update(status="ok" if fact["rc"] == 0 else "failed", xml=text)
    else:
        fact.update(status="failed", message=text[:MESSAGE_BYTES])
    if survives:
        fact.update(pid=process.pid, task_state="?")
        emit("errors", {"what": "smi", "error": "process {} cannot be killed and is left behind".format(process.pid)})
    emit("smi", fact)
    if survives:
        watched.emit_state(emit)


def _read(
    process: "subprocess.Popen[bytes]", watched: _Watched, deadline: float, options: ProbeOptions, emit: Emit
) -> Tuple[bytes, bool]:
    """Its output until the deadline, or until it is hopeless; and whether it has closed it."""
    started = time.monotonic()
    stdout = cast(IO[bytes], process.stdout)  # Popen is called with a pipe
    output = b""
    driver_check = started + HOPELESS_S
    while time.monotonic() < deadline and len(output) <= TEXT_BYTES:
        wait = min(LOOK_S, deadline - time.monotonic(), driver_check - time.monotonic())
        wrote = bool(select.select([stdout], [], [], max(0.0, wait))[0])
        if wrote:
            chunk = os.read(stdout.fileno(), 1 << 16)
            output += chunk
            if not chunk:
                return output, True
        watched.look(wrote=wrote)
        if time.monotonic() >= driver_check:
            driver_check = deadline
            # To look for a hung thread may block.
            emit("smi", {"still_s": watched.still_s(), "took_s": round(time.monotonic() - started, 3)})
            if hung_thread(options) is not None:
                break
    return output, False


def _kill(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Kill the process; False if it survives that for so many seconds."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return True
        time.sleep(0.02)
    return False
