"""What repair does on the machine itself: reset its GPUs, or bring it down by the means that it still has.

One file, standard library, Python 3.6 and newer; it comes on standard input (``BOOT`` reads it) and runs as root. Its
one argument is JSON:

- ``boot_id``: do nothing unless this is still the running boot;
- ``rung``: ``gpu-reset``, ``reboot``, ``force`` or ``sysrq``;
- ``later``: ``[[seconds, rung], ...]``, what a process that outlives the shutdown does when the machine is still there;
- ``gpus``: PCI addresses to reset, all GPUs when there are none; ``limit_s``: how long the reset may take.

It prints one JSON document and ends at once: the reboot begins after the answer.
"""

import errno
import glob
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

BOOT = "import sys; SOURCE = sys.stdin.read(); exec(SOURCE)"
"""What ``python3 -c`` gets: no machine logs a command line of pages."""
SURVIVOR = "@gpunodes-ladder"
"""systemd's last killing spree spares processes whose name begins with @ (systemd.io, ROOT_STORAGE_DAEMONS)."""
_SYSRQ = (("s", 2.0), ("u", 1.0), ("b", 0.0))
"""The keys and the pauses after them: s and u only start work in the kernel (Linux, admin-guide/sysrq)."""
_SERVICES = ("nvidia-persistenced",)
"""Services of the driver's own that hold the GPUs; started again after a reset."""
_RUNNING_ID = "/proc/sys/kernel/random/boot_id"
_LOG = "/dev/kmsg"
RESET = "/run/gpunodes-gpu-reset"
"""When the GPUs were last reset in this boot, in seconds since it began: what the log says of before is over."""
_TRIGGER = "/proc/sysrq-trigger"
_DEVICE = "/dev/nvidia"
_INFORMATION = "/proc/driver/nvidia/gpus/%s/information"
"""Of each GPU, by its PCI address; its line Device Minor numbers the device file."""
_PCI = re.compile(r"[0-9A-Fa-f]{4,8}(:[0-9A-Fa-f]{2}){2}\.[0-7]\Z")


def main(source: str, options: Dict[str, Any]) -> Dict[str, Any]:
    """Do what ``options`` say; the answer."""
    running = _read(_RUNNING_ID)
    if options.get("boot_id") and options["boot_id"] != running:
        return {"done": False, "boot_id": running, "message": "another boot runs already"}
    if options["step"] == "gpu-reset":
        return reset(options)
    armed = []
    if options.get("later"):
        _detach(lambda: _survive(source, options["later"]))
        armed = [step for _, step in options["later"]]
    _detach(lambda: _down_soon(options["step"]))
    return {"done": True, "boot_id": running, "armed": armed, "message": ""}


def _survive(source: str, later: List[Any]) -> None:
    """Become a process that a shutdown does not end: not in any unit's cgroup, and spared by name."""
    for root in ("/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/systemd/cgroup.procs"):
        try:
            with open(root, "w") as file:
                file.write(str(os.getpid()))
        except OSError:
            continue
    words = [SURVIVOR, "-c", source, json.dumps({"survivor": later})]
    os.execv(sys.executable or "/usr/bin/python3", words)  # noqa: S606 - this very program


def wait_and_escalate(later: List[Any]) -> None:
    """The survivor: all that it needs is open before it sleeps."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trigger = os.open(_TRIGGER, os.O_WRONLY)
    began = time.monotonic()
    for seconds, step in later:
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        down(step, trigger)


def _down_soon(step: str) -> None:
    time.sleep(0.5)  # the answer travels first
    down(step, None)


def down(step: str, trigger: Optional[int]) -> None:
    """Bring the machine down; comes back when that did not happen at once."""
    if step == "sysrq":
        if trigger is None:
            trigger = os.open(_TRIGGER, os.O_WRONLY)
        for key, pause in _SYSRQ:
            os.write(trigger, key.encode())
            time.sleep(pause)
        return
    words = {"reboot": ["systemctl", "reboot", "--no-wall"], "force": ["systemctl", "reboot", "--force", "--force"]}
    _start(words[step])


def reset(options: Dict[str, Any]) -> Dict[str, Any]:
    """Reset GPUs; refused while a process holds one of them.

    GPUs that NVLink joins can be reset apart from each other on newer generations only; nvidia-smi refuses then what
    is too few (nvidia-smi(1), --gpu-reset). So all are reset where that is refused, and no process holds any.
    """
    gpus = options.get("gpus") or []
    if not all(isinstance(gpu, str) and _PCI.match(gpu) for gpu in gpus):
        return {"done": False, "message": "%r are no PCI addresses" % (gpus,)}
    limit = float(options.get("limit_s", 60))
    deadline = time.monotonic() + limit
    stopped = [name for name in _SERVICES if _quiet(["systemctl", "is-active", "--quiet", name], 10) == 0]
    for name in stopped:
        _quiet(["systemctl", "stop", name], 20)
    try:
        held = holders(gpus)
        # What was asked to leave the GPU may need a moment.
        while held and time.monotonic() < deadline - limit / 2:
            time.sleep(1)
            held = holders(gpus)
        if held:
            return {"done": False, "message": "the GPU is held by " + ", ".join(held[:5])}
        code, text = _bounded(["nvidia-smi", "--gpu-reset"] + (["-i", ",".join(gpus)] if gpus else []), deadline)
        if gpus and code and not holders([]):
            code, more = _bounded(["nvidia-smi", "--gpu-reset"], deadline)
            text = "%s; all GPUs: %s" % (text, more)
        if code == 0:
            _mark_reset()
        return {"done": code == 0, "message": text.strip()[:2000]}
    finally:
        for name in stopped:
            _quiet(["systemctl", "start", name], 20)


def _mark_reset() -> None:
    """Remember when the GPUs were reset, by the clock of the kernel's log: it drifts away from the others in weeks."""
    moment = time.monotonic()
    try:
        log = os.open(_LOG, os.O_RDWR | os.O_NONBLOCK)
        try:
            os.lseek(log, 0, os.SEEK_END)
            os.write(log, b"gpunodes: the GPUs were reset\n")
            # priority,sequence,microseconds,flags;text (Linux, ABI/testing/dev-kmsg)
            moment = int(os.read(log, 8192).split(b",")[2]) / 1e6
        finally:
            os.close(log)
    except (OSError, ValueError, IndexError):
        pass
    with open(RESET, "w") as file:
        file.write("%.6f\n" % moment)


def holders(gpus: Sequence[str]) -> List[str]:
    """The processes that have the device of one of these GPUs open, of any when none is named; ``name (pid)``."""
    minors = [re.search(r"^Device Minor:\s*(\d+)$", _read(_INFORMATION % gpu.lower()), re.M) for gpu in gpus]
    named = bool(minors) and all(minors)
    wanted = "|".join(found.group(1) for found in minors if found) if named else r"\d+|ctl|-uvm"
    found = []
    for folder in glob.glob("/proc/[0-9]*"):
        pid = folder.rpartition("/")[2]
        try:
            links = [os.readlink("%s/fd/%s" % (folder, fd)) for fd in os.listdir(folder + "/fd")]
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESRCH, errno.EACCES):
                continue
            raise
        if any(re.match(r"%s(%s)$" % (_DEVICE, wanted), link) for link in links):
            found.append("%s (%s)" % (_read(folder + "/comm"), pid))
    return found


def _bounded(words: Sequence[str], deadline: float) -> Tuple[Optional[int], str]:
    """Run a program that may never end: it is left behind then. Its exit code (None), and what it said."""
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        os.close(writer)
        os.close(reader)
        return None, "%s: %s" % (words[0], error.strerror)
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
    return code, text if code is not None else (text + " it did not end in time").strip()


def _quiet(words: Sequence[str], limit: float) -> Optional[int]:
    """The exit code of a program; None when there is none, or it does not end."""
    return _bounded(words, time.monotonic() + limit)[0]


def _start(words: Sequence[str]) -> None:
    try:
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return


def _detach(work: Callable[[], object]) -> None:
    """Do ``work`` in a process of its own that nobody waits for."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        work()
    finally:
        os._exit(0)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _run() -> None:
    options = json.loads(sys.argv[1])
    if "survivor" in options:
        wait_and_escalate(options["survivor"])
        return
    sys.stdout.write(json.dumps(main(str(globals()["SOURCE"]), options)) + "\n")


if __name__ == "__main__":
    _run()
