"""Collects raw health facts of a GPU machine in one run. The controller evaluates them.

One file, standard library only, Python 3.6 and newer: modules import it, and the controller sends it over SSH as a
program. It changes nothing on the machine and loads no kernel module.

On a machine whose driver hangs, harmless reads block for ever. So every collector is a child process that reports each
fact as soon as it has it. The parent does nothing that could block: it enforces the deadline, and reports and leaves
behind a child that cannot be killed. docs/json.md describes the facts.
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

TEXT_BYTES = 2 << 20
"""Maximum size of the kernel log, and of nvidia-smi's output."""
MESSAGE_BYTES = 4096
COLLECTOR_BYTES = 8 << 20
"""Maximum output of one collector."""
TASKS = 200
"""Maximum number of reported threads."""
FLOOD = 50
"""A line pattern that occurs more often is a log flood: its first and last lines stay, the others are counted."""
FLOOD_FIRST, FLOOD_LAST = 20, 5
BLOCKS = 64
"""Maximum number of hung-task reports that stay complete."""
BLOCK_LINES = 80
RUNNING_LOCK = "run/gpunodes-nvidia-smi.lock"
"""Held, through an inherited descriptor, as long as a nvidia-smi process of gpunodes exists, even after a kill."""
GPUS_RESET = "run/gpunodes-gpu-reset"
"""Time of the last GPU reset by a repair in this boot, in seconds since the boot (``escalate.py`` writes it)."""
STUCK_S = 20.0
"""A task in uninterruptible sleep for so many seconds is stuck; the driver starts all GPUs of a machine in less."""
HOPELESS_S = 5.0
"""Time limit of nvidia-smi while such a thread exists: nvidia-smi would wait for the same lock."""
SPINNING_S = 30.0
"""A nvidia-smi process is stuck in a loop when it has used so much processor time and spent little time otherwise."""
PROGRAMS = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
NVIDIA = "0x10de"
PF_KTHREAD = 0x00200000  # include/linux/sched.h

Emit = Callable[[str, Any], None]

# A stack line inside a module of the driver.
_DRIVER_FRAME = re.compile(r"\+0x[0-9a-f]+/0x[0-9a-f]+ \[nvidia(_\w+)?[ \]]")
# The driver's own threads and tools, by comm (15 characters at most).
_TOOL = re.compile(r"nvidia-|nv-hostengine|nv-fabricmanag|dcgm|nv_queue|nvc:\[driver|irq/\d+-nvidia|UVM |nvlsm")


class ProbeOptions:
    """How to probe: ``root`` is the file system root to read, ``deadline_s`` and ``smi_s`` are time limits."""

    def __init__(
        self,
        root: str = "/",
        deadline_s: float = 30.0,
        smi_s: float = 20.0,
        expected_gpus: Optional[int] = None,
    ) -> None:
        self.root = root
        self.deadline_s = deadline_s
        self.smi_s = min(smi_s, max(1.0, deadline_s - 3.0))
        self.expected_gpus = expected_gpus

    def path(self, name: str) -> str:
        """``name`` ("proc/uptime") below the root."""
        return os.path.join(self.root, name)


def read(options: ProbeOptions) -> Dict[str, Any]:
    """Collect all facts; returns within the deadline, whatever hangs."""
    started = time.monotonic()
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
        _add_error(facts, "privilege", "not running as root: stacks, and possibly the kernel log, cannot be read")
    _collect(facts, options, started)
    _complete(facts, options)
    facts["took_s"] = round(time.monotonic() - started, 3)
    return facts


def _empty(options: ProbeOptions) -> Dict[str, Any]:
    """The document before any collector has reported."""
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
    """Combine facts of several collectors: add stacks to their threads, and the GPU count of the boot log."""
    stacks = facts.pop("stacks", {})
    for task in facts["tasks"]:
        task["stack"] = stacks.get(str(task["pid"]), [])
    enumerated = facts.pop("enumerated", None)
    if options.expected_gpus is None and enumerated:
        facts["expected"] = {"gpus": enumerated, "from": "boot log"}


# --- collectors: child processes that may be abandoned ---------------------------------------------------------------


class _Collector:
    """A child process that reports facts through a pipe, one JSON line each."""

    def __init__(
        self, name: str, collect: Callable[[ProbeOptions, Emit], None], options: ProbeOptions, limit_s: float
    ) -> None:
        self.name = name
        self.deadline = time.monotonic() + limit_s
        self.limit_s = limit_s
        self.received = 0
        self._incomplete_line = b""
        self.descriptor, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(collect, options, writer)
        os.close(writer)

    def receive(self, facts: Dict[str, Any]) -> bool:
        """Store the facts that the child has written; False at the end of its output."""
        chunk = os.read(self.descriptor, 1 << 16)
        self.received += len(chunk)
        if self.received > COLLECTOR_BYTES:
            _add_error(facts, self.name, "more than {} bytes; the rest is ignored".format(COLLECTOR_BYTES))
            return False
        *lines, self._incomplete_line = (self._incomplete_line + chunk).split(b"\n")
        for line in lines:
            key, value = json.loads(line.decode("ascii"))
            _store(facts, key, value)
        return bool(chunk)

    def end(self, facts: Dict[str, Any], late: bool) -> None:
        """Kill the child's processes; report a child that cannot be killed."""
        os.close(self.descriptor)
        if late:
            _add_error(facts, self.name, "did not finish within {:.0f} s".format(self.limit_s))
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.01)
                    continue
            return
        _add_error(facts, self.name, "process {} cannot be killed and is left behind".format(self.pid))


def _run_child(collect: Callable[[ProbeOptions, Emit], None], options: ProbeOptions, writer: int) -> None:
    """Run a collector in the child process; never returns.

    It closes all inherited descriptors: the caller of the probe waits until its pipes are closed.
    """
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.closerange(3, writer)
        os.closerange(writer + 1, 256)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)

        def emit(key: str, value: Any) -> None:
            data = json.dumps([key, value]).encode("ascii") + b"\n"
            while data:
                data = data[os.write(writer, data) :]

        try:
            collect(options, emit)
        except Exception as error:
            name = collect.__name__.strip("_")
            emit("errors", {"what": name, "error": "{}: {}".format(type(error).__name__, error)})
        code = 0
    finally:
        os._exit(code)


def _collect(facts: Dict[str, Any], options: ProbeOptions, started: float) -> None:
    """Run all collectors in parallel until they end or reach the deadline."""
    limit_s = max(1.0, options.deadline_s - (time.monotonic() - started) - 1.5)
    running: Dict[int, _Collector] = {}
    for name, collect in COLLECTORS:
        collector = _Collector(name, collect, options, limit_s)
        running[collector.descriptor] = collector
    while running:
        now = time.monotonic()
        for collector in [collector for collector in running.values() if collector.deadline <= now]:
            del running[collector.descriptor]
            collector.end(facts, late=True)
        if not running:
            break
        wait = max(0.0, min(collector.deadline for collector in running.values()) - now)
        for descriptor in select.select(list(running), [], [], wait)[0]:
            collector = running[descriptor]
            try:
                more = collector.receive(facts)
            except (ValueError, TypeError, KeyError) as error:
                _add_error(facts, collector.name, "{}: {}".format(type(error).__name__, error))
                more = False
            if not more:
                del running[descriptor]
                collector.end(facts, late=False)


def _store(facts: Dict[str, Any], key: str, value: Any) -> None:
    """Store one fact: append it to a list, merge it into a mapping, set any other value."""
    present = facts.get(key)
    if isinstance(present, list):
        present.append(value)
    elif isinstance(present, dict):
        present.update(value)
    else:
        facts[key] = value


def _add_error(facts: Dict[str, Any], what: str, error: str) -> None:
    facts["errors"].append({"what": what, "error": error})


# --- small readers ---------------------------------------------------------------------------------------------------


def _text(path: str, limit: int = 65536) -> str:
    """The text of a small file, "" for one that is missing or unreadable."""
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
    """The path of a program of the machine."""
    for folder in PROGRAMS.split(":"):
        path = options.path(folder.lstrip("/") + "/" + name)
        if os.access(path, os.X_OK):
            return path
    return None


def _environment() -> Dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LC_")}
    variables.update(PATH=PROGRAMS, LC_ALL="C", LANG="C", LANGUAGE="C")
    return variables


# --- the kernel log --------------------------------------------------------------------------------------------------

Line = Tuple[float, str]
"""Seconds since the boot, and the text."""


def _log(options: ProbeOptions, emit: Emit) -> None:
    """The kernel's log lines of this boot.

    /dev/kmsg is the ring buffer itself: always current, and complete unless it has overflowed. Only then the journal
    is read for the lost lines, because that takes seconds where the journal is long.
    """
    deduplicator = _Deduplicator()
    source: Optional[str] = None
    cut = False
    ring, complete, ring_error = _kmsg(options.path("dev/kmsg"))
    if ring_error:
        emit("errors", {"what": "kmsg", "error": ring_error})
    if ring and complete:
        source = "kmsg"
    else:
        before = ring[0][0] if ring else float("inf")
        from_journal = 0
        try:
            for line in _journal(options, before):
                deduplicator.add(*line)
                from_journal += 1
        except (OSError, _SlowError) as error:
            cut = True
            emit("errors", {"what": "journal", "error": str(error)})
        if from_journal:
            source = "journal"
        elif ring:
            source, cut = "kmsg", True
        else:
            for line in _dmesg(options):
                deduplicator.add(*line)
                source = "dmesg"
    for line in ring:
        deduplicator.add(*line)
    text, incomplete = deduplicator.text()
    emit("log", {"source": source, "cut": cut or incomplete, "text": text, "repeats": deduplicator.repeats()})
    if deduplicator.enumerated:
        emit("enumerated", len(deduplicator.enumerated))


class _SlowError(Exception):
    """A program did not end within its time limit."""


def _kmsg(path: str) -> Tuple[List[Line], bool, str]:
    """The ring buffer's kernel lines, whether they reach back to the boot, and an error message.

    A record is ``priority,sequence,microseconds,flags;text`` and lines of properties that begin with a blank
    (Documentation/ABI/testing/dev-kmsg). User space cannot write records with the kernel's facility, 0.
    """
    lines: List[Line] = []
    first: Optional[int] = None
    lost = False
    try:
        device = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return [], False, error.strerror or str(error)
    deadline = time.monotonic() + 5
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
            if time.monotonic() > deadline:
                lost = True
                break
    finally:
        os.close(device)
    return lines, first == 0 and not lost, ""


def _records(device: int) -> Iterator[Optional[str]]:
    """One record per read, None where records were overwritten; a plain file (in tests) is split into records."""
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

    The facility excludes lines that user space wrote to /dev/kmsg: the journal stores them with the kernel's transport.
    """
    program = _program(options, "journalctl")
    if program is None:
        return
    argv = [program, "-b", "-q", "--no-pager", "-o", "short-monotonic", "_TRANSPORT=kernel", "SYSLOG_FACILITY=0"]
    # `[   12.345678] host kernel: text`; a line without this prefix continues the previous one.
    pattern = re.compile(r"\[ *(\d+\.\d+)\] \S+ [^:]*: ?(.*)")
    seconds = 0.0
    for line in _output(argv, options.deadline_s / 2):
        found = pattern.match(line)
        if found:
            seconds = float(found.group(1))
        if seconds >= before:
            return
        yield seconds, found.group(2) if found else line.strip()


def _dmesg(options: ProbeOptions) -> Iterator[Line]:
    """The ring buffer as dmesg prints it, where /dev/kmsg cannot be read: ``<priority>[seconds] text``."""
    program = _program(options, "dmesg")
    if program is None or options.root != "/":
        return
    pattern = re.compile(r"<(\d+)>\[ *(\d+\.\d+)\] ?(.*)")
    kernel = False
    seconds = 0.0
    with contextlib.suppress(OSError, _SlowError):
        for line in _output([program, "-r"], 5):
            found = pattern.match(line)
            if found:
                kernel = int(found.group(1)) >> 3 == 0
                seconds = float(found.group(2))
            if kernel:
                yield seconds, found.group(3) if found else line


def _output(argv: List[str], limit_s: float) -> Iterator[str]:
    """The lines that a program prints; raises _SlowError after ``limit_s``. Closing the iterator kills the program."""
    deadline = time.monotonic() + limit_s
    with open(os.devnull, "r+b") as null:
        process = subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=null, env=_environment())
    stream = process.stdout
    assert stream is not None  # noqa: S101 - Popen is called with a pipe
    incomplete_line = b""
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise _SlowError("{} did not end within {:.0f} s".format(argv[0], limit_s))
            chunk = os.read(stream.fileno(), 1 << 16)
            *lines, incomplete_line = (incomplete_line + chunk).split(b"\n")
            if len(incomplete_line) > 1 << 20:
                incomplete_line = b""
            for line in lines:
                yield line.decode("utf-8", "replace")
            if not chunk:
                return
    finally:
        process.kill()
        stream.close()


class _Pattern:
    """Lines that differ only in their numbers. ``tail`` holds the last lines of a flood."""

    def __init__(self, line: str, seconds: float, important: bool) -> None:
        self.line = line
        self.first = self.last = seconds
        self.important = important
        self.count = 0
        self.tail: collections.deque[Tuple[int, str]] = collections.deque(maxlen=FLOOD_LAST)


class _Deduplicator:
    """Bounds a log: floods are counted, hung-task reports stay complete, driver lines have priority over others."""

    _DIGITS = str.maketrans(dict.fromkeys("0123456789abcdefABCDEF", "#"))
    _RUN = re.compile(r"#+")
    # Numbers that make a line a different one: event and device.
    _IDENTITY = re.compile(r"S?Xid \([^)]*\): \d+|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}")
    # The further numbers of NVLink's codes have a meaning; those of 154 are its recovery action.
    _NUMBERS_MATTER = re.compile(r"Xid \([^)]*\): 1[45]\d\b")
    _IMPORTANT = re.compile(
        r"NVRM|nvidia|NVIDIA|nvswitch|Xid|AER|PCIe|pcieport|lockup|blocked for more|hung_task|GSP|Hardware Error|panic"
    )
    _BLOCK = re.compile(r"INFO: task .*blocked (?:for more than|in I/O wait)")
    _IN_BLOCK = re.compile(
        r"\s|Call Trace|task:|Workqueue:|Tainted|Not tainted|\"echo 0|[RCE][A-Z0-9]{1,3}:|Future hung"
        r"|INFO: task .*is blocked on"
    )
    # GPUs as the kernel lists them at boot: `pci 0000:3b:00.0: [10de:2330] type 00 class 0x030200`.
    _ENUMERATED = re.compile(r"pci ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0): \[10de:[0-9a-f]{4}\] .*class 0x030[02]")
    _IMPORTANT_BYTES, _OTHER_BYTES = 4 << 20, 8 << 20
    """Limits while reading; TEXT_BYTES limits the result."""
    _MAX_PATTERNS = 20000

    def __init__(self) -> None:
        self.enumerated: Set[str] = set()
        self._number = 0
        self._cut = False
        self._patterns: Dict[str, _Pattern] = {}
        self._important_lines: List[_StoredLine] = []
        self._other_lines: collections.deque[_StoredLine] = collections.deque()
        self._important_bytes = self._other_bytes = 0
        self._blocks = 0
        self._block_left = 0

    def add(self, seconds: float, text: str) -> None:
        """Add one line of the log, oldest first."""
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
                self._store(_StoredLine(self._number, line, None, 0), important=True)
                return
        elif self._block_left and self._IN_BLOCK.match(text):
            self._block_left -= 1
            if self._blocks <= BLOCKS:
                self._store(_StoredLine(self._number, line, None, 0), important=True)
            else:
                self._cut = True
            return
        else:
            self._block_left = 0
        pattern = self._pattern(text, seconds)
        if pattern is None:
            self._store(_StoredLine(self._number, line, None, 0), important=False)
            return
        pattern.count += 1
        pattern.last = seconds
        if pattern.count <= FLOOD:
            self._store(_StoredLine(self._number, line, pattern, pattern.count), pattern.important)
        else:
            pattern.tail.append((self._number, line))

    def text(self) -> Tuple[str, bool]:
        """The bounded log, in its order; and whether it lacks lines that ``repeats`` does not count."""
        important = [(stored.number, stored.line) for stored in self._important_lines if stored.is_kept()]
        others = [(stored.number, stored.line) for stored in self._other_lines if stored.is_kept()]
        for pattern in self._patterns.values():
            (important if pattern.important else others).extend(pattern.tail)
        important.sort()
        others.sort()
        chosen, important_cut = _first_lines(important, TEXT_BYTES * 2 // 3)
        # The newest of the other lines: they show what happened last.
        newest, others_cut = _first_lines(others[::-1], TEXT_BYTES - sum(len(line.encode()) + 1 for _, line in chosen))
        lines = sorted(chosen + newest)
        return "".join(line + "\n" for _, line in lines), self._cut or important_cut or others_cut

    def repeats(self) -> List[Dict[str, Any]]:
        """The floods, the longest first."""
        floods = [pattern for pattern in self._patterns.values() if pattern.count > FLOOD]
        floods.sort(key=lambda pattern: -pattern.count)
        return [
            {"line": pattern.line, "count": pattern.count, "first": pattern.first, "last": pattern.last}
            for pattern in floods[:500]
        ]

    def _pattern(self, text: str, seconds: float) -> Optional[_Pattern]:
        key = self._RUN.sub("#", text.translate(self._DIGITS))
        if "NVRM" in text or "nv" in text or "PCI" in text or "pci" in text:
            key += text if self._NUMBERS_MATTER.search(text) else "".join(self._IDENTITY.findall(text))
        pattern = self._patterns.get(key)
        if pattern is None and len(self._patterns) < self._MAX_PATTERNS:
            pattern = self._patterns[key] = _Pattern(text, seconds, bool(self._IMPORTANT.search(text)))
        return pattern

    def _store(self, stored: "_StoredLine", important: bool) -> None:
        if important:
            if self._important_bytes > self._IMPORTANT_BYTES:
                self._cut = True
                return
            self._important_lines.append(stored)
            self._important_bytes += len(stored.line)
            return
        self._other_lines.append(stored)
        self._other_bytes += len(stored.line)
        while self._other_bytes > self._OTHER_BYTES:
            self._other_bytes -= len(self._other_lines.popleft().line)
            self._cut = True


class _StoredLine:
    """A candidate for the result: the ``ordinal``-th line of its pattern."""

    __slots__ = ("line", "number", "ordinal", "pattern")

    def __init__(self, number: int, line: str, pattern: Optional[_Pattern], ordinal: int) -> None:
        self.number = number
        self.line = line
        self.pattern = pattern
        self.ordinal = ordinal

    def is_kept(self) -> bool:
        """False for the lines in the middle of a flood."""
        pattern = self.pattern
        return (
            pattern is None
            or pattern.count <= FLOOD
            or self.ordinal <= FLOOD_FIRST
            or self.ordinal > pattern.count - FLOOD_LAST
        )


def _first_lines(lines: List[Tuple[int, str]], limit: int) -> Tuple[List[Tuple[int, str]], bool]:
    """The first lines that fit into ``limit`` bytes, and whether lines are missing."""
    for position, (_, line) in enumerate(lines):
        limit -= len(line.encode()) + 1
        if limit < 0:
            return lines[:position], True
    return lines, False


# --- threads ---------------------------------------------------------------------------------------------------------


class _Thread:
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
        self.cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")

    def reread(self, options: ProbeOptions) -> "Optional[_Thread]":
        """The current state of the same thread, None when it is gone."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return _Thread(options, self.pid, self.tid)
        return None

    def switches(self) -> str:
        """Its voluntary context switches: the same number twice means that it slept all the time."""
        found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", _text(self.folder + "/status"), re.MULTILINE)
        return found.group(1) if found else ""

    def last_run_ms(self) -> Optional[float]:
        """When it last ran, in milliseconds of the scheduler's clock; None where the kernel does not report it."""
        found = re.search(r"^se\.exec_start\s*:\s*([\d.]+)", _text(self.folder + "/sched", 4096), re.MULTILINE)
        return float(found.group(1)) if found else None

    def to_fact(self, age_s: float) -> Dict[str, Any]:
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
    """All threads of the machine."""
    for pid in _names(options.path("proc")):
        if pid.isdigit():
            for tid in _names(options.path("proc/{}/task".format(pid))):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    yield _Thread(options, int(pid), int(tid))


def _tasks(options: ProbeOptions, emit: Emit) -> None:
    """Threads that stay in uninterruptible sleep, and the driver's tools; then their stacks: reading them may block."""
    tools: List[_Thread] = []
    asleep: List[_Thread] = []
    for thread in _threads(options):
        if thread.state == "D":
            asleep.append(thread)
        elif _TOOL.match(thread.comm) and (not thread.kthread or thread.state == "R"):
            tools.append(thread)
    stuck = _still_asleep(options, asleep, 0.5)
    now = _now_ms(options)
    for thread in stuck[:TASKS]:
        last_run = thread.last_run_ms()
        emit("tasks", thread.to_fact(max(0.5, (now - last_run) / 1000) if now and last_run else 0.5))
    if len(stuck) > TASKS:
        emit("errors", {"what": "tasks", "error": "{} threads are in uninterruptible sleep".format(len(stuck))})
    reported = stuck[:TASKS] + tools[:TASKS]
    for thread in reported:
        if thread.state != "D":
            emit("tasks", thread.to_fact(0.0))
    for thread in reported:
        if thread.state in "DR":
            lines = _text(thread.folder + "/stack", 8192).splitlines()
            # `[<0>] schedule+0x5d/0xd0`: the address is hidden or useless.
            emit("stacks", {str(thread.tid): [re.sub(r"^\[<[^>]*>\] ", "", line) for line in lines]})


def _still_asleep(options: ProbeOptions, asleep: List[_Thread], seconds: float) -> List[_Thread]:
    """The threads of ``asleep`` that do not wake within ``seconds``: waiting for a disk means a short state D, too."""
    if not asleep:
        return []
    before = [(thread, thread.switches()) for thread in asleep]
    time.sleep(seconds)
    after = [(thread.reread(options), switches) for thread, switches in before]
    return [thread for thread, switches in after if thread and thread.state == "D" and thread.switches() == switches]


def _now_ms(options: ProbeOptions) -> Optional[float]:
    """The scheduler's clock: the time at which the thread of this process last ran."""
    try:
        return _Thread(options, os.getpid(), os.getpid()).last_run_ms()
    except (OSError, ValueError, IndexError):
        return None


# --- nvidia-smi ------------------------------------------------------------------------------------------------------


def _smi(options: ProbeOptions, emit: Emit) -> None:
    """`nvidia-smi -q -x`, unless the module is not loaded (it would load it) or an earlier nvidia-smi is stuck."""
    program = _program(options, "nvidia-smi")
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


def _stuck_smi(options: ProbeOptions) -> Optional[_Thread]:
    """A nvidia-smi process that is in uninterruptible sleep or spins, for longer than a healthy one does."""
    found = [thread for thread in _threads(options) if thread.comm == "nvidia-smi"]
    stuck = _still_asleep(options, [thread for thread in found if thread.state == "D"], 1.0)
    uptime = float((_text(options.path("proc/uptime")).split() or ["0"])[0])
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
                holder = _number(os.read(lock, 32).decode("ascii", "replace"))
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
            env=_environment(),
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )
    if lock is not None:
        os.ftruncate(lock, 0)
        os.write(lock, str(process.pid).encode("ascii"))
        os.close(lock)
    # Reported now in case this process is killed before nvidia-smi ends.
    emit("smi", {"status": "timeout", "pid": process.pid, "message": "nvidia-smi did not end before the probe did"})
    assert process.stdout is not None  # noqa: S101 - Popen is called with a pipe
    output = b""
    ended = False
    driver_check = started + HOPELESS_S
    while not ended and time.monotonic() < deadline and len(output) <= TEXT_BYTES:
        if select.select([process.stdout], [], [], max(0.0, min(deadline, driver_check) - time.monotonic()))[0]:
            chunk = os.read(process.stdout.fileno(), 1 << 16)
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
    now = _now_ms(options) or 0.0
    for thread in _threads(options):
        asleep = thread.state == "D" and now - (thread.last_run_ms() or now) >= STUCK_S * 1000
        if asleep and _DRIVER_FRAME.search(_text(thread.folder + "/stack", 8192)):
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
        return _Thread(options, pid, pid).state
    except (OSError, ValueError, IndexError):
        return None


# --- devices, driver, services ---------------------------------------------------------------------------------------


def _pci(options: ProbeOptions, emit: Emit) -> None:
    """Every NVIDIA function on the bus: whether it responds, its link, its error counters (Linux, sysfs-bus-pci)."""
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
                "responds": _responds(device),
                "link": _link(device),
                "aer": _aer(device),
            },
        )


def _responds(device: str) -> bool:
    """Whether its configuration space is readable: a lost device reads as all ones. Suspended devices are not woken."""
    if _text(device + "power/runtime_status").strip() == "suspended":
        return True
    try:
        with open(device + "config", "rb") as file:
            data = file.read(64)
    except OSError:
        return False
    return data.strip(b"\xff") != b""


def _link(device: str) -> Optional[Dict[str, Any]]:
    width, max_width = (_number(_text(device + name)) for name in ("current_link_width", "max_link_width"))
    speed, max_speed = (_text(device + name).strip() for name in ("current_link_speed", "max_link_speed"))
    if width is None or max_width is None or not speed:
        return None
    return {"speed": speed, "width": width, "max_speed": max_speed, "max_width": max_width}


def _aer(device: str) -> Optional[Dict[str, int]]:
    found: Dict[str, int] = {}
    for name, total in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")):
        number = re.search(r"TOTAL_ERR_" + total + r" (\d+)", _text(device + "aer_dev_" + name))
        if number is None:
            return None
        found[name] = int(number.group(1))
    return found


def _driver(options: ProbeOptions, emit: Emit) -> None:
    """Versions of module and library; the driver's own list of GPUs last, because reading it takes driver locks."""
    emit("driver", {"loaded": os.path.isdir(options.path("sys/module/nvidia")), "library": _library(options)})
    module = _text(options.path("sys/module/nvidia/version")).strip()
    banner = _text(options.path("proc/driver/nvidia/version"))
    in_banner = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", banner)
    emit(
        "driver",
        {
            "module": module or (in_banner.group(1) if in_banner else None),
            "open": "Open Kernel Module" in banner if banner else None,
        },
    )
    base = options.path("proc/driver/nvidia/gpus")
    gpus: List[Dict[str, Any]] = []
    for address in _names(base):
        lines = _text("{}/{}/information".format(base, address)).splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        minor = _number(fields.get("Device Minor", ""))
        gpus.append({"address": address, "minor": -1 if minor is None else minor, "model": fields.get("Model", "")})
        emit("driver", {"gpus": gpus})


def _library(options: ProbeOptions) -> Optional[str]:
    """The version of the NVML library that programs load: the end of its file's name."""
    folders = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "usr/local/nvidia/lib64", "lib/*-linux-gnu")
    for folder in folders:
        for path in sorted(glob.glob(options.path(folder + "/libnvidia-ml.so.1"))):
            found = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", os.path.realpath(path))
            if found:
                return found.group(1)
    return None


SERVICES = ("nvidia-persistenced", "nvidia-fabricmanager")


def _services(options: ProbeOptions, emit: Emit) -> None:
    """The states of the driver's services, in one call of systemctl."""
    program = _program(options, "systemctl")
    if program is None or not os.path.isdir(options.path("run/systemd/system")):
        return
    units = [name + ".service" for name in SERVICES]
    argv = [program, "show", "--property=Id,LoadState,ActiveState", *units]
    states: Dict[str, Dict[str, str]] = {}
    unit: Dict[str, str] = {}
    try:
        for line in [*_output(argv, options.deadline_s / 2), ""]:
            key, _, value = line.partition("=")
            if value:
                unit[key] = value
            elif unit:
                states[unit.get("Id", "").rpartition(".")[0]] = unit
                unit = {}
    except (OSError, _SlowError) as error:
        emit("errors", {"what": "services", "error": str(error)})
    for name, state in states.items():
        if name in SERVICES:
            loaded = state.get("LoadState") == "loaded"
            emit("services", {name: state.get("ActiveState", "unknown") if loaded else "absent"})


def _identity(options: ProbeOptions, emit: Emit) -> None:
    """What identifies this machine, to find its node and its BMC."""
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
    """The MAC addresses of the physical network interfaces (those with a device that is not a virtual function)."""
    base = os.path.join(root, "sys/class/net")
    found = []
    for name in _names(base):
        device = os.path.join(base, name, "device")
        if os.path.exists(device) and not os.path.exists(os.path.join(device, "physfn")):
            found.append(_text(os.path.join(base, name, "address"), 64).strip())
    return sorted({address for address in found if address})[:64]


COLLECTORS: Iterable[Tuple[str, Callable[[ProbeOptions, Emit], None]]] = (
    ("log", _log),
    ("tasks", _tasks),
    ("smi", _smi),
    ("pci", _pci),
    ("driver", _driver),
    ("services", _services),
    ("identity", _identity),
)


# --- as a program ----------------------------------------------------------------------------------------------------


def main(settings: Dict[str, Any]) -> None:
    """Print the facts, compressed, after their length in a line; ``settings`` are the arguments of ProbeOptions."""
    options = ProbeOptions(**settings)
    # The last resort if this process itself hangs.
    signal.alarm(int(options.deadline_s) + 5)
    packed = zlib.compress(json.dumps(read(options)).encode("ascii"), 6)
    sys.stdout.buffer.write(str(len(packed)).encode("ascii") + b"\n" + packed)
    sys.stdout.buffer.flush()
