"""What a GPU machine knows of its own health, read in one go: raw facts, judged elsewhere.

One file, standard library only, Python 3.6 and newer: it is a module's import and, sent over SSH as it stands, a
program. It changes nothing on the machine and loads no kernel module.

A machine whose driver hangs makes harmless reads block for ever. So every part of the probe is a child process that
tells what it finds while it finds it; the parent itself touches nothing that could block, keeps the time, and leaves
behind a child that cannot be killed, saying so. Facts are described in docs/json.md.
"""

import collections
import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import zlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Set, Tuple

SCHEMA = "gpunodes.probe/1"
MARK = b"gpunodes.probe/1 "
"""What the framed answer begins with; ``MARK ready``, then ``MARK <bytes>`` before the compressed document."""

TEXT_BYTES = 2 << 20
"""Most that the kernel log, or nvidia-smi's answer, may hold."""
MESSAGE_BYTES = 4096
PART_BYTES = 8 << 20
"""Most that one part may tell."""
TASKS = 200
"""Most threads that are told of."""
FLOOD = 50
"""A line form seen more often is a storm: its first lines and its last stay, the others are counted."""
FLOOD_FIRST, FLOOD_LAST = 20, 5
BLOCKS = 64
"""Most reports of hung tasks that stay whole."""
BLOCK_LINES = 80
RUNNING_LOCK = "run/gpunodes-nvidia-smi.lock"
"""Held, through an inherited descriptor, for as long as a nvidia-smi of ours lives, killed or not."""
GPUS_RESET = "run/gpunodes-gpu-reset"
"""When a repair last reset the GPUs in this boot, in seconds since it began (``escalate.py`` writes it)."""
STUCK_S = 20.0
"""Seconds in uninterruptible sleep from which a task is stuck; the driver starts all GPUs of a machine in less."""
HOPELESS_S = 5.0
"""What nvidia-smi gets beside such a thread: it would wait for the same lock."""
SPINNING_S = 30.0
"""Processor time after which a nvidia-smi that did little else is stuck in a loop."""
PROGRAMS = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
NVIDIA = "0x10de"
PF_KTHREAD = 0x00200000  # include/linux/sched.h

Emit = Callable[[str, Any], None]

# A line of a stack that is inside a module of the driver.
_DRIVER_FRAME = re.compile(r"\+0x[0-9a-f]+/0x[0-9a-f]+ \[nvidia(_\w+)?[ \]]")
# The driver's own threads and tools, by comm (15 characters at most).
_TOOL = re.compile(r"nvidia-|nv-hostengine|nv-fabricmanag|dcgm|nv_queue|nvc:\[driver|irq/\d+-nvidia|UVM |nvlsm")


class ProbeOptions:
    """How to probe: ``root`` is the tree that is read, ``deadline_s`` and ``smi_s`` are seconds."""

    def __init__(
        self,
        root: str = "/",
        deadline_s: float = 30.0,
        smi_s: float = 20.0,
        expected_gpus: Optional[int] = None,
        framed: bool = False,
    ) -> None:
        self.root = root
        self.deadline_s = deadline_s
        self.smi_s = min(smi_s, max(1.0, deadline_s - 3.0))
        self.expected_gpus = expected_gpus
        self.framed = framed

    def path(self, name: str) -> str:
        """``name`` ("proc/uptime") below the root."""
        return os.path.join(self.root, name)


def read(options: ProbeOptions) -> Dict[str, Any]:
    """All facts; ends within the deadline, whatever hangs."""
    begun = time.monotonic()
    facts: Dict[str, Any] = _empty(options)
    uptime = _text(options.path("proc/uptime")).split()
    facts["uptime_s"] = float(uptime[0]) if uptime else 0.0
    facts["boot_id"] = _text(options.path("proc/sys/kernel/random/boot_id")).strip() or None
    with contextlib.suppress(ValueError):
        facts["gpus_reset_s"] = float(_text(options.path(GPUS_RESET)))
    facts["kernel"] = _text(options.path("proc/sys/kernel/osrelease")).strip()
    for key, name in (("detect_count", "detect_count"), ("timeout_s", "timeout_secs"), ("warnings", "warnings")):
        facts["hung_task"][key] = _number(_text(options.path("proc/sys/kernel/hung_task_" + name)))
    if os.geteuid() != 0:
        _say(facts, "privilege", "not root: stacks, and perhaps the kernel log, cannot be read")
    _gather(facts, options, begun)
    _complete(facts, options)
    facts["took_s"] = round(time.monotonic() - begun, 3)
    return facts


def _empty(options: ProbeOptions) -> Dict[str, Any]:
    """The document of a machine that tells nothing."""
    return {
        "schema": SCHEMA,
        "time": time.time(),
        "boot_id": None,
        "uptime_s": 0.0,
        "took_s": 0.0,
        "kernel": "",
        "errors": [],
        "log": {"source": None, "cut": False, "text": "", "repeats": []},
        "tasks": [],
        "hung_task": {"detect_count": None, "timeout_s": None, "warnings": None},
        "smi": {
            "status": "failed",
            "pid": None,
            "rc": None,
            "took_s": 0.0,
            "task_state": None,
            "xml": None,
            "message": "",
        },
        "pci": [],
        "driver": {"loaded": False, "module": None, "library": None, "open": None, "gpus": []},
        "services": {},
        "hostname": None,
        "machine_id": None,
        "product_uuid": None,
        "product_serial": None,
        "macs": [],
        "expected": {"gpus": options.expected_gpus, "from": None if options.expected_gpus is None else "setting"},
    }


def _complete(facts: Dict[str, Any], options: ProbeOptions) -> None:
    """What follows from several parts: stacks beside their threads, GPUs that the boot log counted."""
    stacks = facts.pop("stacks", {})
    for task in facts["tasks"]:
        task["stack"] = stacks.get(str(task["pid"]), [])
    enumerated = facts.pop("enumerated", None)
    if options.expected_gpus is None and enumerated:
        facts["expected"] = {"gpus": enumerated, "from": "boot log"}


# --- parts: children that may be abandoned ---------------------------------------------------------------------------


class _Part:
    """A child process that tells facts, one JSON line each, on a pipe."""

    def __init__(
        self, name: str, work: Callable[[ProbeOptions, Emit], None], options: ProbeOptions, seconds: float
    ) -> None:
        self.name = name
        self.until = time.monotonic() + seconds
        self.seconds = seconds
        self.received = 0
        self._rest = b""
        self.descriptor, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _child(work, options, writing)
        os.close(writing)

    def receive(self, facts: Dict[str, Any]) -> bool:
        """Take in what the child says; False when that was all."""
        chunk = os.read(self.descriptor, 1 << 16)
        self.received += len(chunk)
        if self.received > PART_BYTES:
            _say(facts, self.name, "more than {} bytes; the rest is left out".format(PART_BYTES))
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            key, value = json.loads(line.decode("ascii"))
            _take(facts, key, value)
        return bool(chunk)

    def end(self, facts: Dict[str, Any], late: bool) -> None:
        """Kill what still runs of the child; say so when that does not help."""
        os.close(self.descriptor)
        if late:
            _say(facts, self.name, "did not answer within {:.0f} s".format(self.seconds))
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.01)
                    continue
            return
        _say(facts, self.name, "process {} cannot be killed and is left behind".format(self.pid))


def _child(work: Callable[[ProbeOptions, Emit], None], options: ProbeOptions, writing: int) -> None:
    """The child's whole life; never returns. It holds nothing of ours: a caller waits for its own pipes to close."""
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.closerange(3, writing)
        os.closerange(writing + 1, 256)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)

        def emit(key: str, value: Any) -> None:
            data = json.dumps([key, value]).encode("ascii") + b"\n"
            while data:
                data = data[os.write(writing, data) :]

        try:
            work(options, emit)
        except Exception as error:
            emit("errors", {"what": work.__name__.strip("_"), "error": "{}: {}".format(type(error).__name__, error)})
        code = 0
    finally:
        os._exit(code)


def _gather(facts: Dict[str, Any], options: ProbeOptions, begun: float) -> None:
    """Run all parts side by side until they end or their time is up."""
    left = max(1.0, options.deadline_s - (time.monotonic() - begun) - 1.5)
    parts: Dict[int, _Part] = {}
    for name, work in PARTS:
        part = _Part(name, work, options, left)
        parts[part.descriptor] = part
    while parts:
        now = time.monotonic()
        for part in [part for part in parts.values() if part.until <= now]:
            del parts[part.descriptor]
            part.end(facts, late=True)
        if not parts:
            break
        wait = max(0.0, min(part.until for part in parts.values()) - now)
        for descriptor in select.select(list(parts), [], [], wait)[0]:
            part = parts[descriptor]
            try:
                goes_on = part.receive(facts)
            except (ValueError, TypeError, KeyError) as error:
                _say(facts, part.name, "{}: {}".format(type(error).__name__, error))
                goes_on = False
            if not goes_on:
                del parts[descriptor]
                part.end(facts, late=False)


def _take(facts: Dict[str, Any], key: str, value: Any) -> None:
    """Put one fact in its place: lists grow, mappings are filled, the rest is set."""
    present = facts.get(key)
    if isinstance(present, list):
        present.append(value)
    elif isinstance(present, dict):
        present.update(value)
    else:
        facts[key] = value


def _say(facts: Dict[str, Any], what: str, error: str) -> None:
    facts["errors"].append({"what": what, "error": error})


# --- small readers ---------------------------------------------------------------------------------------------------


def _text(path: str, limit: int = 65536) -> str:
    """A small file's text, "" for one that is not there or does not let itself be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _number(text: str) -> Optional[int]:
    try:
        return int(text.strip(), 0)
    except ValueError:
        return None


def _names(path: str) -> List[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _program(options: ProbeOptions, name: str) -> Optional[str]:
    """Where a program of the machine lies."""
    for folder in PROGRAMS.split(":"):
        path = options.path(folder.lstrip("/") + "/" + name)
        if os.access(path, os.X_OK):
            return path
    return None


def _environment() -> Dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LC_")}
    kept.update(PATH=PROGRAMS, LC_ALL="C", LANG="C", LANGUAGE="C")
    return kept


# --- the kernel log --------------------------------------------------------------------------------------------------

Line = Tuple[float, str]
"""Seconds since the boot, text."""


def _log(options: ProbeOptions, emit: Emit) -> None:
    """The kernel's lines of this boot.

    /dev/kmsg is the ring buffer itself: always newest, and complete unless it has overflowed. Only then is the journal
    asked for what is gone, which costs seconds where it is long.
    """
    deduplicator = _Deduplicator()
    source: Optional[str] = None
    cut = False
    ring, complete, trouble = _kmsg(options.path("dev/kmsg"))
    if trouble:
        emit("errors", {"what": "kmsg", "error": trouble})
    if ring and complete:
        source = "kmsg"
    else:
        before = ring[0][0] if ring else float("inf")
        told = 0
        try:
            for line in _journal(options, before):
                deduplicator.add(*line)
                told += 1
        except (OSError, _SlowError) as error:
            cut = True
            emit("errors", {"what": "journal", "error": str(error)})
        if told:
            source = "journal"
        elif ring:
            source, cut = "kmsg", True
        else:
            for line in _dmesg(options):
                deduplicator.add(*line)
                source = "dmesg"
    for line in ring:
        deduplicator.add(*line)
    text, left_out = deduplicator.text()
    emit("log", {"source": source, "cut": cut or left_out, "text": text, "repeats": deduplicator.repeats()})
    if deduplicator.enumerated:
        emit("enumerated", len(deduplicator.enumerated))


class _SlowError(Exception):
    """A program takes too long."""


def _kmsg(path: str) -> Tuple[List[Line], bool, str]:
    """The ring buffer's kernel lines, whether they reach back to the boot, and what went wrong.

    A record is ``priority,sequence,microseconds,flags;text`` and lines of properties that begin with a blank
    (Documentation/ABI/testing/dev-kmsg). The kernel never lets user space write with its own facility, 0.
    """
    lines: List[Line] = []
    first: Optional[int] = None
    lost = False
    try:
        device = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return [], False, error.strerror or str(error)
    until = time.monotonic() + 5
    try:
        for record in _records(device):
            if record is None:
                lost = True
                continue
            head, _, body = record.partition(";")
            numbers = head.split(",")[:3]
            if not all(number.isdigit() for number in numbers):
                continue
            priority, sequence, microseconds = (int(number) for number in numbers)
            if first is None:
                first = sequence
            if priority >> 3 == 0:
                seconds = microseconds / 1e6
                message = body.split("\n", 1)[0]
                for text in message.replace("\\x0a", "\n").split("\n") if "\\x0a" in message else [message]:
                    lines.append((seconds, text))
            if time.monotonic() > until:
                lost = True
                break
    finally:
        os.close(device)
    return lines, first == 0 and not lost, ""


def _records(device: int) -> Iterator[Optional[str]]:
    """One record a read, None where some were overwritten; a plain file, as in tests, is split at its records."""
    while True:
        try:
            data = os.read(device, 65536)
        except OSError as error:
            if error.errno == errno.EPIPE:
                yield None
                continue
            return
        if not data:
            return
        for record in re.split(r"\n(?=\d)", data.decode("utf-8", "replace")):
            yield record


def _journal(options: ProbeOptions, before: float) -> Iterator[Line]:
    """This boot's kernel lines in the journal up to ``before`` (seconds since the boot).

    The facility keeps out what user space wrote to /dev/kmsg, which the journal stores with the kernel's transport.
    """
    program = _program(options, "journalctl")
    if program is None:
        return
    argv = [program, "-b", "-q", "--no-pager", "-o", "short-monotonic", "_TRANSPORT=kernel", "SYSLOG_FACILITY=0"]
    # `[   12.345678] host kernel: text`; a line without a prefix goes on with the one before.
    form = re.compile(r"\[ *(\d+\.\d+)\] \S+ [^:]*: ?(.*)")
    seconds = 0.0
    for line in _output(argv, options.deadline_s / 2):
        found = form.match(line)
        if found:
            seconds = float(found.group(1))
        if seconds >= before:
            return
        yield seconds, found.group(2) if found else line.strip()


def _dmesg(options: ProbeOptions) -> Iterator[Line]:
    """The ring buffer as dmesg tells it, where /dev/kmsg cannot be read: ``<priority>[seconds] text``."""
    program = _program(options, "dmesg")
    if program is None or options.root != "/":
        return
    form = re.compile(r"<(\d+)>\[ *(\d+\.\d+)\] ?(.*)")
    kernel = False
    seconds = 0.0
    with contextlib.suppress(OSError, _SlowError):
        for line in _output([program, "-r"], 5):
            found = form.match(line)
            if found:
                kernel = int(found.group(1)) >> 3 == 0
                seconds = float(found.group(2))
            if kernel:
                yield seconds, found.group(3) if found else line


def _output(argv: List[str], seconds: float) -> Iterator[str]:
    """The lines that a program prints; raises _SlowError when it takes longer. It is killed when nobody reads on."""
    until = time.monotonic() + seconds
    with open(os.devnull, "r+b") as null:
        process = subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=null, env=_environment())
    stream = process.stdout
    assert stream is not None  # noqa: S101 - asked for above
    rest = b""
    try:
        while True:
            left = until - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise _SlowError("{} did not end within {:.0f} s".format(argv[0], seconds))
            chunk = os.read(stream.fileno(), 1 << 16)
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > 1 << 20:
                rest = b""
            for line in lines:
                yield line.decode("utf-8", "replace")
            if not chunk:
                return
    finally:
        process.kill()
        stream.close()


class _Form:
    """Lines that are alike but for their numbers. ``tail`` holds the last of a storm."""

    def __init__(self, line: str, seconds: float, telling: bool) -> None:
        self.line = line
        self.first = self.last = seconds
        self.telling = telling
        self.count = 0
        self.tail: collections.deque[Tuple[int, str]] = collections.deque(maxlen=FLOOD_LAST)


class _Deduplicator:
    """Bounds a log: storms are counted, reports of hung tasks stay whole, lines of drivers go before others."""

    _DIGITS = str.maketrans(dict.fromkeys("0123456789abcdefABCDEF", "#"))
    _RUN = re.compile(r"#+")
    # What tells lines apart that are alike but for their numbers: which event, on which device.
    _IDENTITY = re.compile(r"S?Xid \([^)]*\): \d+|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}")
    # NVLink's codes carry their meaning in further numbers, 154 its recovery action.
    _NUMBERS_MATTER = re.compile(r"Xid \([^)]*\): 1[45]\d\b")
    _TELLING = re.compile(
        r"NVRM|nvidia|NVIDIA|nvswitch|Xid|AER|PCIe|pcieport|lockup|blocked for more|hung_task|GSP|Hardware Error|panic"
    )
    _BLOCK = re.compile(r"INFO: task .*blocked (?:for more than|in I/O wait)")
    _IN_BLOCK = re.compile(
        r"\s|Call Trace|task:|Workqueue:|Tainted|Not tainted|\"echo 0|[RCE][A-Z0-9]{1,3}:|Future hung"
        r"|INFO: task .*is blocked on"
    )
    # GPUs as the kernel lists them at boot: `pci 0000:3b:00.0: [10de:2330] type 00 class 0x030200`.
    _ENUMERATED = re.compile(r"pci ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0): \[10de:[0-9a-f]{4}\] .*class 0x030[02]")
    _TELLING_BYTES, _OTHER_BYTES = 4 << 20, 8 << 20
    """Held while reading; what is handed out is bounded by TEXT_BYTES."""
    _FORMS = 20000

    def __init__(self) -> None:
        self.enumerated: Set[str] = set()
        self._number = 0
        self._cut = False
        self._forms: Dict[str, _Form] = {}
        self._telling: List[_Kept] = []
        self._others: collections.deque[_Kept] = collections.deque()
        self._telling_bytes = self._others_bytes = 0
        self._blocks = 0
        self._block_left = 0

    def add(self, seconds: float, text: str) -> None:
        """One line of the log, oldest first."""
        self._number += 1
        text = text[:2000].rstrip("\n")
        if "[10de:" in text:
            found = self._ENUMERATED.search(text)
            if found:
                self.enumerated.add(found.group(1))
        line = "[{:12.6f}] {}".format(seconds, text)
        if "blocked " in text and self._BLOCK.search(text):
            self._blocks += 1
            self._block_left = BLOCK_LINES
            if self._blocks <= BLOCKS:
                self._keep(_Kept(self._number, line, None, 0), telling=True)
                return
        elif self._block_left and self._IN_BLOCK.match(text):
            self._block_left -= 1
            if self._blocks <= BLOCKS:
                self._keep(_Kept(self._number, line, None, 0), telling=True)
            else:
                self._cut = True
            return
        else:
            self._block_left = 0
        form = self._form(text, seconds)
        if form is None:
            self._keep(_Kept(self._number, line, None, 0), telling=False)
            return
        form.count += 1
        form.last = seconds
        if form.count <= FLOOD:
            self._keep(_Kept(self._number, line, form, form.count), form.telling)
        else:
            form.tail.append((self._number, line))

    def text(self) -> Tuple[str, bool]:
        """What stays of the log, in its order; and whether anything is left out that is not counted."""
        telling = [(kept.number, kept.line) for kept in self._telling if kept.stays()]
        others = [(kept.number, kept.line) for kept in self._others if kept.stays()]
        for form in self._forms.values():
            (telling if form.telling else others).extend(form.tail)
        telling.sort()
        others.sort()
        chosen, left = _fitting(telling, TEXT_BYTES * 2 // 3)
        # Of the other lines the newest, which tell what was going on.
        newest, rest = _fitting(others[::-1], TEXT_BYTES - sum(len(line.encode()) + 1 for _, line in chosen))
        lines = sorted(chosen + newest)
        return "".join(line + "\n" for _, line in lines), self._cut or left or rest

    def repeats(self) -> List[Dict[str, Any]]:
        """The storms, the longest first."""
        floods = [form for form in self._forms.values() if form.count > FLOOD]
        floods.sort(key=lambda form: -form.count)
        return [
            {"line": form.line, "count": form.count, "first": form.first, "last": form.last} for form in floods[:500]
        ]

    def _form(self, text: str, seconds: float) -> Optional[_Form]:
        key = self._RUN.sub("#", text.translate(self._DIGITS))
        if "NVRM" in text or "nv" in text or "PCI" in text or "pci" in text:
            key += text if self._NUMBERS_MATTER.search(text) else "".join(self._IDENTITY.findall(text))
        form = self._forms.get(key)
        if form is None and len(self._forms) < self._FORMS:
            form = self._forms[key] = _Form(text, seconds, bool(self._TELLING.search(text)))
        return form

    def _keep(self, kept: "_Kept", telling: bool) -> None:
        if telling:
            if self._telling_bytes > self._TELLING_BYTES:
                self._cut = True
                return
            self._telling.append(kept)
            self._telling_bytes += len(kept.line)
            return
        self._others.append(kept)
        self._others_bytes += len(kept.line)
        while self._others_bytes > self._OTHER_BYTES:
            self._others_bytes -= len(self._others.popleft().line)
            self._cut = True


class _Kept:
    """A line that may stay: the ``ordinal``-th of its form."""

    __slots__ = ("form", "line", "number", "ordinal")

    def __init__(self, number: int, line: str, form: Optional[_Form], ordinal: int) -> None:
        self.number = number
        self.line = line
        self.form = form
        self.ordinal = ordinal

    def stays(self) -> bool:
        """Whether it is not one of a storm's middle."""
        form = self.form
        return (
            form is None or form.count <= FLOOD or self.ordinal <= FLOOD_FIRST or self.ordinal > form.count - FLOOD_LAST
        )


def _fitting(lines: List[Tuple[int, str]], room: int) -> Tuple[List[Tuple[int, str]], bool]:
    """The first lines that fit into so many bytes, and whether any does not."""
    for position, (_, line) in enumerate(lines):
        room -= len(line.encode()) + 1
        if room < 0:
            return lines[:position], True
    return lines, False


# --- threads ---------------------------------------------------------------------------------------------------------


class _Thread:
    """A thread as /proc/PID/task/TID/stat tells it (proc(5)). Its command line is never read: that can block."""

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
        self.cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")

    def again(self, options: ProbeOptions) -> "Optional[_Thread]":
        """The same thread as it is now, None when it is gone."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return _Thread(options, self.pid, self.tid)
        return None

    def switches(self) -> str:
        """How often it gave the processor away: the same number twice means that it has slept all the time."""
        found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", _text(self.folder + "/status"), re.MULTILINE)
        return found.group(1) if found else ""

    def ran_at(self) -> Optional[float]:
        """When it last ran, in milliseconds of the scheduler's clock, where the kernel tells."""
        found = re.search(r"^se\.exec_start\s*:\s*([\d.]+)", _text(self.folder + "/sched", 4096), re.MULTILINE)
        return float(found.group(1)) if found else None

    def told(self, age_s: float) -> Dict[str, Any]:
        """The fact about it."""
        return {
            "pid": self.tid,
            "comm": self.comm,
            "state": self.state,
            "kthread": self.kthread,
            "wchan": _text(self.folder + "/wchan", 256).strip(),
            "stack": [],
            "age_s": round(age_s, 1),
        }


def _threads(options: ProbeOptions) -> Iterator[_Thread]:
    """Every thread of the machine."""
    for pid in _names(options.path("proc")):
        if pid.isdigit():
            for tid in _names(options.path("proc/{}/task".format(pid))):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    yield _Thread(options, int(pid), int(tid))


def _tasks(options: ProbeOptions, emit: Emit) -> None:
    """Threads in uninterruptible sleep that stay in it, and the driver's tools; then their stacks, which may block."""
    told: List[_Thread] = []
    asleep: List[_Thread] = []
    for thread in _threads(options):
        if thread.state == "D":
            asleep.append(thread)
        elif _TOOL.match(thread.comm) and (not thread.kthread or thread.state == "R"):
            told.append(thread)
    stuck = _staying(options, asleep, 0.5)
    now = _now_ms(options)
    for thread in stuck[:TASKS]:
        ran = thread.ran_at()
        emit("tasks", thread.told(max(0.5, (now - ran) / 1000) if now and ran else 0.5))
    if len(stuck) > TASKS:
        emit("errors", {"what": "tasks", "error": "{} threads sleep uninterruptibly".format(len(stuck))})
    told = stuck[:TASKS] + told[:TASKS]
    for thread in told:
        if thread.state != "D":
            emit("tasks", thread.told(0.0))
    for thread in told:
        if thread.state in "DR":
            lines = _text(thread.folder + "/stack", 8192).splitlines()
            # `[<0>] schedule+0x5d/0xd0`: the address is hidden, or of no use.
            emit("stacks", {str(thread.tid): [re.sub(r"^\[<[^>]*>\] ", "", line) for line in lines]})


def _staying(options: ProbeOptions, asleep: List[_Thread], seconds: float) -> List[_Thread]:
    """Those of ``asleep`` that do not wake within ``seconds``: who waits for a disk is in state D too, briefly."""
    if not asleep:
        return []
    before = [(thread, thread.switches()) for thread in asleep]
    time.sleep(seconds)
    again = [(thread.again(options), switches) for thread, switches in before]
    return [thread for thread, switches in again if thread and thread.state == "D" and thread.switches() == switches]


def _now_ms(options: ProbeOptions) -> Optional[float]:
    """The scheduler's clock: our own thread has just run."""
    try:
        return _Thread(options, os.getpid(), os.getpid()).ran_at()
    except (OSError, ValueError, IndexError):
        return None


# --- nvidia-smi ------------------------------------------------------------------------------------------------------


def _smi(options: ProbeOptions, emit: Emit) -> None:
    """`nvidia-smi -q -x`, unless the module is not loaded (it would load it) or an earlier one is stuck."""
    program = _program(options, "nvidia-smi")
    if not os.path.isdir(options.path("sys/module/nvidia")):
        emit("smi", {"status": "absent", "message": "the module nvidia is not loaded"})
        return
    if program is None:
        emit("smi", {"status": "absent", "message": "nvidia-smi is not installed"})
        return
    until = time.monotonic() + options.smi_s
    stuck = _stuck_smi(options)
    if stuck is not None:
        emit("smi", {"status": "stuck", "pid": stuck.tid, "task_state": stuck.state, "message": "an earlier one hangs"})
        return
    lock, holder = _lock(options, until)
    if holder is not None:
        state = _state_of(options, holder)
        emit("smi", {"status": "stuck", "pid": holder, "task_state": state, "message": "an earlier one of ours hangs"})
        return
    _run_smi([program, "-q", "-x"], lock, until, options, emit)


def _stuck_smi(options: ProbeOptions) -> Optional[_Thread]:
    """A nvidia-smi that sleeps uninterruptibly, or spins, and has done so for longer than a healthy one."""
    found = [thread for thread in _threads(options) if thread.comm == "nvidia-smi"]
    stuck = _staying(options, [thread for thread in found if thread.state == "D"], 1.0)
    uptime = float((_text(options.path("proc/uptime")).split() or ["0"])[0])
    spinning = [
        thread
        for thread in found
        if thread.state == "R" and thread.cpu_s > max(SPINNING_S, 0.5 * (uptime - thread.started_s))
    ]
    return next(iter(stuck + spinning), None)


def _lock(options: ProbeOptions, until: float) -> Tuple[Optional[int], Optional[int]]:
    """The lock that every nvidia-smi of ours holds while it lives; or the process that will not let go of it.

    Only root can keep it: others' files there could not be trusted.
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
            # Another probe's, perhaps about to end.
            if time.monotonic() > until:
                holder = _number(os.read(lock, 32).decode("ascii", "replace"))
                os.close(lock)
                return None, holder or 0
            time.sleep(0.2)


def _run_smi(argv: List[str], lock: Optional[int], until: float, options: ProbeOptions, emit: Emit) -> None:
    begun = time.monotonic()
    with open(os.devnull, "r+b") as null:
        process = subprocess.Popen(
            argv,
            stdin=null,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )
    if lock is not None:
        os.ftruncate(lock, 0)
        os.write(lock, str(process.pid).encode("ascii"))
        os.close(lock)
    # Should we ourselves be ended before it is.
    emit("smi", {"status": "timeout", "pid": process.pid, "message": "it did not end before the probe did"})
    assert process.stdout is not None  # noqa: S101 - asked for above
    output = b""
    ended = False
    doubted = begun + HOPELESS_S
    while not ended and time.monotonic() < until and len(output) <= TEXT_BYTES:
        if select.select([process.stdout], [], [], max(0.0, min(until, doubted) - time.monotonic()))[0]:
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            output += chunk
            ended = not chunk
        if time.monotonic() >= doubted:
            doubted = until
            if _driver_hangs(options):
                break
    while ended and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    # Control signs have no place there, and take six bytes each in JSON.
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", " ", output[:TEXT_BYTES].decode("utf-8", "replace"))
    fact = {"took_s": round(time.monotonic() - begun, 3), "rc": process.poll(), "pid": None, "message": ""}
    if fact["rc"] is None:
        state = _killed(process, options)
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
    """Whether a thread has slept inside the driver for ``STUCK_S``, as far as the kernel tells."""
    now = _now_ms(options) or 0.0
    for thread in _threads(options):
        asleep = thread.state == "D" and now - (thread.ran_at() or now) >= STUCK_S * 1000
        if asleep and _DRIVER_FRAME.search(_text(thread.folder + "/stack", 8192)):
            return True
    return False


def _killed(process: "subprocess.Popen[bytes]", options: ProbeOptions) -> Optional[str]:
    """Kill it; the state that it is in when that does not help."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        if process.poll() is not None:
            return None
        time.sleep(0.02)
    return _state_of(options, process.pid) or "?"


def _state_of(options: ProbeOptions, pid: int) -> Optional[str]:
    try:
        return _Thread(options, pid, pid).state
    except (OSError, ValueError, IndexError):
        return None


# --- devices, driver, services ---------------------------------------------------------------------------------------


def _pci(options: ProbeOptions, emit: Emit) -> None:
    """Every NVIDIA function on the bus: whether it answers, its link, its error counters (Linux, sysfs-bus-pci)."""
    base = options.path("sys/bus/pci/devices")
    for address in _names(base):
        device = base + "/" + address + "/"
        if _text(device + "vendor").strip() != NVIDIA:
            continue
        driver: Optional[str] = None
        with contextlib.suppress(OSError):
            driver = os.path.basename(os.readlink(device + "driver"))
        emit(
            "pci",
            {
                "address": address,
                "vendor": NVIDIA[2:],
                "device": _text(device + "device").strip()[2:],
                "class": _text(device + "class").strip()[2:],
                "driver": driver,
                "answers": _answers(device),
                "link": _link(device),
                "aer": _aer(device),
            },
        )


def _answers(device: str) -> bool:
    """Whether its configuration space can be read; a device that is gone reads as all ones. A sleeping one is left."""
    if _text(device + "power/runtime_status").strip() == "suspended":
        return True
    try:
        with open(device + "config", "rb") as file:
            data = file.read(64)
    except OSError:
        return False
    return data.strip(b"\xff") != b""


def _link(device: str) -> Optional[Dict[str, Any]]:
    width, widest = (_number(_text(device + name)) for name in ("current_link_width", "max_link_width"))
    speed, fastest = (_text(device + name).strip() for name in ("current_link_speed", "max_link_speed"))
    if width is None or widest is None or not speed:
        return None
    return {"speed": speed, "width": width, "max_speed": fastest, "max_width": widest}


def _aer(device: str) -> Optional[Dict[str, int]]:
    found: Dict[str, int] = {}
    for name, total in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")):
        number = re.search(r"TOTAL_ERR_" + total + r" (\d+)", _text(device + "aer_dev_" + name))
        if number is None:
            return None
        found[name] = int(number.group(1))
    return found


def _driver(options: ProbeOptions, emit: Emit) -> None:
    """Versions of module and library; the driver's own list of GPUs last, which takes its locks."""
    emit("driver", {"loaded": os.path.isdir(options.path("sys/module/nvidia")), "library": _library(options)})
    module = _text(options.path("sys/module/nvidia/version")).strip()
    banner = _text(options.path("proc/driver/nvidia/version"))
    named = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", banner)
    emit(
        "driver",
        {
            "module": module or (named.group(1) if named else None),
            "open": "Open Kernel Module" in banner if banner else None,
        },
    )
    base = options.path("proc/driver/nvidia/gpus")
    gpus: List[Dict[str, Any]] = []
    for address in _names(base):
        lines = _text("{}/{}/information".format(base, address)).splitlines()
        told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        minor = _number(told.get("Device Minor", ""))
        gpus.append({"address": address, "minor": -1 if minor is None else minor, "model": told.get("Model", "")})
        emit("driver", {"gpus": gpus})


def _library(options: ProbeOptions) -> Optional[str]:
    """The version of the NVML library that programs get: the end of its file's name."""
    folders = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "usr/local/nvidia/lib64", "lib/*-linux-gnu")
    for folder in folders:
        for path in sorted(glob.glob(options.path(folder + "/libnvidia-ml.so.1"))):
            found = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", os.path.realpath(path))
            if found:
                return found.group(1)
    return None


SERVICES = ("nvidia-persistenced", "nvidia-fabricmanager")


def _services(options: ProbeOptions, emit: Emit) -> None:
    """What systemd says of the driver's services, in one question."""
    program = _program(options, "systemctl")
    if program is None or not os.path.isdir(options.path("run/systemd/system")):
        return
    units = [name + ".service" for name in SERVICES]
    argv = [program, "show", "--property=Id,LoadState,ActiveState", *units]
    states: Dict[str, Dict[str, str]] = {}
    told: Dict[str, str] = {}
    try:
        for line in [*_output(argv, options.deadline_s / 2), ""]:
            key, _, value = line.partition("=")
            if value:
                told[key] = value
            elif told:
                states[told.get("Id", "").rpartition(".")[0]] = told
                told = {}
    except (OSError, _SlowError) as error:
        emit("errors", {"what": "services", "error": str(error)})
    for name, state in states.items():
        if name in SERVICES:
            loaded = state.get("LoadState") == "loaded"
            emit("services", {name: state.get("ActiveState", "unknown") if loaded else "absent"})


def _identity(options: ProbeOptions, emit: Emit) -> None:
    """Which machine this is, for its node and its BMC to be told by."""
    for key, name in (
        ("hostname", "proc/sys/kernel/hostname"),
        ("machine_id", "etc/machine-id"),
        ("product_uuid", "sys/class/dmi/id/product_uuid"),
        ("product_serial", "sys/class/dmi/id/product_serial"),
    ):
        emit(key, _text(options.path(name), 256).strip() or None)
    for address in macs(options.root):
        emit("macs", address)


def macs(root: str = "/") -> List[str]:
    """The MAC addresses of the physical network interfaces (those with a device that is no virtual function)."""
    base = os.path.join(root, "sys/class/net")
    found = []
    for name in _names(base):
        device = os.path.join(base, name, "device")
        if os.path.exists(device) and not os.path.exists(os.path.join(device, "physfn")):
            found.append(_text(os.path.join(base, name, "address"), 64).strip())
    return sorted({address for address in found if address})[:64]


PARTS: Iterable[Tuple[str, Callable[[ProbeOptions, Emit], None]]] = (
    ("log", _log),
    ("tasks", _tasks),
    ("smi", _smi),
    ("pci", _pci),
    ("driver", _driver),
    ("services", _services),
    ("identity", _identity),
)


# --- as a program ----------------------------------------------------------------------------------------------------


def main(argv: List[str]) -> int:
    """Print the facts as one JSON document; the options are a JSON object in the first argument."""
    options = ProbeOptions(**(json.loads(argv[1]) if len(argv) > 1 else {}))
    output = sys.stdout.buffer
    # The last resort, should this process itself be held up.
    signal.alarm(int(options.deadline_s) + 5)
    if options.framed:
        # Tells a machine that is slow from one whose shell never comes to us.
        output.write(MARK + b"ready\n")
        output.flush()
    document = json.dumps(read(options)).encode("ascii")
    if options.framed:
        packed = zlib.compress(document, 6)
        output.write(MARK + str(len(packed)).encode("ascii") + b"\n" + packed)
    else:
        output.write(document + b"\n")
    output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
