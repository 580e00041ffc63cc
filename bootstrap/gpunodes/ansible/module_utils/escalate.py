"""The escalation steps that run on the machine itself: reset its GPUs, or reboot it.

Standard library only, Python 3.6 and newer. The controller sends it, and it runs as root. Its options:

- ``boot_id``: do nothing unless this is still the running boot;
- ``step``: ``gpu-reset``, ``reboot``, ``force`` or ``sysrq``;
- ``later``: ``[[seconds, step], ...]``, steps of a process that survives the shutdown, if the machine still runs then;
- ``gpus``: PCI addresses of the GPUs to reset, empty for all GPUs; ``limit_s``: time limit of the reset.

It prints one JSON document and ends at once: the reboot begins after that.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

SURVIVOR = "@gpunodes-escalation"
"""systemd does not kill processes whose name begins with @ at shutdown (systemd.io, ROOT_STORAGE_DAEMONS)."""
_SYSRQ = (("s", 2.0), ("u", 1.0), ("b", 0.0))
"""The keys and the pauses after them: s and u only start work in the kernel (Linux, admin-guide/sysrq)."""
_SERVICES = ("nvidia-persistenced",)
"""Services of the driver that hold the GPUs; stopped before a reset and started after it."""
_RUNNING_ID = "/proc/sys/kernel/random/boot_id"
_LOG = "/dev/kmsg"
RESET = "/run/gpunodes-gpu-reset"
"""Time of the last GPU reset in this boot, in seconds since the boot: earlier errors in the log are resolved."""
_TRIGGER = "/proc/sysrq-trigger"
_INFORMATION = "/proc/driver/nvidia/gpus/%s/information"
"""One file for each PCI address; its line Device Minor is the number of the device file."""
_PCI = re.compile(r"[0-9A-Fa-f]{4,8}(:[0-9A-Fa-f]{2}){2}\.[0-7]\Z")


def main(options: Dict[str, Any]) -> None:
    """Do what ``options`` request, and print the result document."""
    sys.stdout.write(json.dumps(escalate(options)) + "\n")


def escalate(options: Dict[str, Any]) -> Dict[str, Any]:
    """Do what ``options`` request; returns the result document."""
    running = _read(_RUNNING_ID)
    if options.get("boot_id") and options["boot_id"] != running:
        return {"done": False, "boot_id": running, "message": "the machine has already rebooted"}
    if options["step"] == "gpu-reset":
        return reset(options)
    armed = []
    if options.get("later"):
        _detach(lambda: _survive(options["later"]))
        armed = [step for _, step in options["later"]]
    _detach(lambda: _reboot_soon(options["step"]))
    return {"done": True, "boot_id": running, "armed": armed, "message": ""}


def _survive(later: List[Any]) -> None:
    """Become a process that survives a shutdown: outside of all units' cgroups, with a name that systemd skips."""
    for root in ("/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/systemd/cgroup.procs"):
        try:
            with open(root, "w") as file:
                file.write(str(os.getpid()))
        except OSError:
            continue
    this: Any = sys.modules[__name__].__spec__
    argv = [SURVIVOR, "-c", this.loader.get_source(__name__), json.dumps(later)]
    os.execv(sys.executable or "/usr/bin/python3", argv)  # noqa: S606 - runs this program itself


def wait_and_escalate(later: List[Any]) -> None:
    """Run the later steps; every file that this needs is opened before the first sleep."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trigger = os.open(_TRIGGER, os.O_WRONLY)
    started = time.monotonic()
    for seconds, step in later:
        time.sleep(max(0.0, started + seconds - time.monotonic()))
        reboot(step, trigger)


def _reboot_soon(step: str) -> None:
    time.sleep(0.5)  # the result reaches the controller first
    reboot(step, None)


def reboot(step: str, trigger: Optional[int]) -> None:
    """Reboot the machine; returns if that does not happen at once."""
    if step == "sysrq":
        if trigger is None:
            trigger = os.open(_TRIGGER, os.O_WRONLY)
        for key, pause in _SYSRQ:
            os.write(trigger, key.encode())
            time.sleep(pause)
        return
    argvs = {"reboot": ["systemctl", "reboot", "--no-wall"], "force": ["systemctl", "reboot", "--force", "--force"]}
    _start(argvs[step])


def reset(options: Dict[str, Any]) -> Dict[str, Any]:
    """Reset GPUs; refused while a process uses one of them.

    Only newer generations can reset single GPUs that NVLink connects; older ones refuse the reset of a subset
    (nvidia-smi(1), --gpu-reset). In that case all GPUs are reset if no process uses any of them.
    """
    gpus = options.get("gpus") or []
    if not all(isinstance(gpu, str) and _PCI.match(gpu) for gpu in gpus):
        return {"done": False, "message": "not PCI addresses: %r" % (gpus,)}
    limit = float(options.get("limit_s", 60))
    deadline = time.monotonic() + limit
    stopped = [name for name in _SERVICES if _exit_code(["systemctl", "is-active", "--quiet", name], 10) == 0]
    for name in stopped:
        _exit_code(["systemctl", "stop", name], 20)
    try:
        users = holders(gpus)
        # Processes that were told to end may need a moment.
        while users and time.monotonic() < deadline - limit / 2:
            time.sleep(1)
            users = holders(gpus)
        if users:
            return {"done": False, "message": "the GPU is used by " + ", ".join(users[:5])}
        code, text = _run_bounded(["nvidia-smi", "--gpu-reset"] + (["-i", ",".join(gpus)] if gpus else []), deadline)
        if gpus and code and not holders([]):
            code, all_text = _run_bounded(["nvidia-smi", "--gpu-reset"], deadline)
            text = "%s; all GPUs: %s" % (text, all_text)
        if code == 0:
            _record_reset()
        return {"done": code == 0, "message": text.strip()[:2000]}
    finally:
        for name in stopped:
            _exit_code(["systemctl", "start", name], 20)


def _record_reset() -> None:
    """Record the time of the reset by the clock of the kernel log: it drifts away from other clocks within weeks."""
    reset_s = time.monotonic()
    try:
        log = os.open(_LOG, os.O_RDWR | os.O_NONBLOCK)
        try:
            os.lseek(log, 0, os.SEEK_END)
            os.write(log, b"gpunodes: the GPUs were reset\n")
            # priority,sequence,microseconds,flags;text (Linux, ABI/testing/dev-kmsg)
            reset_s = int(os.read(log, 8192).split(b",")[2]) / 1e6
        finally:
            os.close(log)
    except (OSError, ValueError, IndexError):
        pass
    with open(RESET, "w") as file:
        file.write("%.6f\n" % reset_s)


def holders(gpus: Sequence[str]) -> List[str]:
    """The processes that have the device of one of ``gpus`` open, or of any GPU if that is empty: ``name (pid)``.

    A GPU with an unknown device counts as any GPU.
    """
    # Here, because the process that survives a shutdown has this file only.
    from . import gpu_users

    minors = [re.search(r"^Device Minor:\s*(\d+)$", _read(_INFORMATION % gpu.lower()), re.M) for gpu in gpus]
    known = bool(minors) and all(minors)
    suffixes = "|".join(found.group(1) for found in minors if found) if known else r"\d+|ctl|-uvm"
    return ["%s (%d)" % (user.name, user.pid) for user in gpu_users.find("nvidia(?:%s)" % suffixes)]


def _run_bounded(argv: Sequence[str], deadline: float) -> Tuple[Optional[int], str]:
    """The exit code and the output of a program; the code is None where it does not end, and it may keep running."""
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        os.close(writer)
        os.close(reader)
        return None, "%s: %s" % (argv[0], error.strerror)
    os.close(writer)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    code = process.poll()
    if code is None:
        process.kill()
    os.set_blocking(reader, False)
    try:
        text = os.read(reader, 4096).decode("utf-8", "replace").strip()
    except OSError:
        text = ""
    os.close(reader)
    return code, text if code is not None else (text + " %s did not end in time" % argv[0]).strip()


def _exit_code(argv: Sequence[str], limit: float) -> Optional[int]:
    """The exit code of a program; None where it is not installed or does not end."""
    return _run_bounded(argv, time.monotonic() + limit)[0]


def _start(argv: Sequence[str]) -> None:
    try:
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return


def _detach(work: Callable[[], object]) -> None:
    """Do ``work`` in a detached process of its own."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        work()
    finally:
        os._exit(0)


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


# The process that survives a shutdown.
if __name__ == "__main__":
    wait_and_escalate(json.loads(sys.argv[1]))
