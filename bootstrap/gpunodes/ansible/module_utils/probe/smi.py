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
from .threads import Thread, now_ms, still_asleep, threads

MESSAGE_BYTES = 4096
RUNNING_LOCK = "run/gpunodes-nvidia-smi.lock"
"""Held, through an inherited descriptor, as long as a nvidia-smi process of gpunodes exists, even after a kill."""
HOPELESS_S = 5.0
"""Time limit of nvidia-smi while such a thread exists: nvidia-smi would wait for the same lock."""
SPINNING_S = 30.0
"""A nvidia-smi process is stuck in a loop when it has used so much processor time and spent little time otherwise."""
# A stack line inside a module of the driver.
_DRIVER_FRAME = re.compile(r"\+0x[0-9a-f]+/0x[0-9a-f]+ \[nvidia(_\w+)?[ \]]")


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
    stuck = _stuck_smi(options)
    if stuck is not None:
        message = "an earlier nvidia-smi hangs"
        emit("smi", {"status": "stuck", "pid": stuck.tid, "task_state": stuck.state, "message": message})
        return
    lock, holder = _lock(options, deadline)
    if holder is not None:
        message = "an earlier nvidia-smi of gpunodes hangs"
        emit("smi", {"status": "stuck", "pid": holder, "task_state": _state_of(options, holder), "message": message})
        return
    _run_smi([program, "-q", "-x"], lock, deadline, options, emit)


def _stuck_smi(options: ProbeOptions) -> Optional[Thread]:
    """A nvidia-smi process that is in uninterruptible sleep or spins, for longer than a healthy one does."""
    found = [thread for thread in threads(options) if thread.comm == "nvidia-smi"]
    stuck = still_asleep(options, [thread for thread in found if thread.state == "D"], 1.0)
    uptime = float((readers.text(options.path("proc/uptime")).split() or ["0"])[0])
    spinning = [
        thread
        for thread in found
        if thread.state == "R" and thread.cpu_s > max(SPINNING_S, 0.5 * (uptime - thread.started_s))
    ]
    return next(iter(stuck + spinning), None)


def _lock(options: ProbeOptions, deadline: float) -> Tuple[Optional[int], Optional[int]]:
    """The lock that every nvidia-smi process of gpunodes holds; or the process that still holds it at the deadline.

    Only root takes it: a lock file of another user is not trusted.
    """
    if os.geteuid() != 0:
        return None, None
    try:
        lock = os.open(options.path(RUNNING_LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None, None
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock, None
        except OSError:
            # Another probe holds it and may end soon.
            if time.monotonic() > deadline:
                holder = readers.number(os.read(lock, 32).decode("ascii", "replace"))
                os.close(lock)
                return None, holder or 0
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
    # Reported now in case this process is killed before nvidia-smi ends.
    emit("smi", {"status": "timeout", "pid": process.pid, "message": "nvidia-smi did not end before the probe did"})
    stdout = cast(IO[bytes], process.stdout)  # Popen is called with a pipe
    output = b""
    ended = False
    driver_check = started + HOPELESS_S
    while not ended and time.monotonic() < deadline and len(output) <= TEXT_BYTES:
        if select.select([stdout], [], [], max(0.0, min(deadline, driver_check) - time.monotonic()))[0]:
            chunk = os.read(stdout.fileno(), 1 << 16)
            output += chunk
            ended = not chunk
        if time.monotonic() >= driver_check:
            driver_check = deadline
            if _driver_hangs(options):
                break
    while ended and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    # Control characters are not valid there, and take six bytes each in JSON.
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", " ", output[:TEXT_BYTES].decode("utf-8", "replace"))
    fact = {"took_s": round(time.monotonic() - started, 3), "rc": process.poll(), "pid": None, "message": ""}
    if fact["rc"] is None:
        state = _kill(process, options)
        fact["status"] = "timeout"
        fact["message"] = text[-MESSAGE_BYTES:]
        if state is not None:
            fact.update(pid=process.pid, task_state=state)
            emit(
                "errors", {"what": "smi", "error": "process {} cannot be killed and is left behind".format(process.pid)}
            )
    elif "<nvidia_smi_log>" in text:
        fact.update(status="ok" if fact["rc"] == 0 else "failed", xml=text)
    else:
        fact.update(status="failed", message=text[:MESSAGE_BYTES])
    emit("smi", fact)


def _driver_hangs(options: ProbeOptions) -> bool:
    """Whether a thread has slept inside the driver for ``STUCK_S``, as far as the kernel reports it."""
    now = now_ms(options) or 0.0
    for thread in threads(options):
        asleep = thread.state == "D" and now - (thread.last_run_ms() or now) >= STUCK_S * 1000
        if asleep and _DRIVER_FRAME.search(readers.text(thread.folder + "/stack", 8192)):
            return True
    return False


def _kill(process: "subprocess.Popen[bytes]", options: ProbeOptions) -> Optional[str]:
    """Kill the process; returns its state if it survives."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return None
        time.sleep(0.02)
    return _state_of(options, process.pid) or "?"


def _state_of(options: ProbeOptions, pid: int) -> Optional[str]:
    try:
        return Thread(options, pid, pid).state
    except (OSError, ValueError, IndexError):
        return None
