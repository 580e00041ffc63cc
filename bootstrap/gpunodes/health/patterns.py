"""The patterns of relevant log lines, in every format of a kernel log.

A line consists of a header (writer and time) and a message. The patterns below match the messages. `Header` tells
whether the kernel can be the writer, since any program can write a line that looks like the kernel's.
Messages are matched as bytes, and across line breaks, because a mail or a page may have wrapped them.

Sources of the formats: NVIDIA open-gpu-kernel-modules (nvidia/nv.c, nv-pci.c, src/nvidia/kernel), Linux
kernel/hung_task.c, kernel/watchdog.c, drivers/pci/pcie/aer.c, Documentation/ABI/testing/dev-kmsg, journalctl(1).
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from gpunodes.ansible.module_utils.probe.known import DRIVER_THREAD, FAULT, MODULE
from gpunodes.health.model import Time

# --- headers ---------------------------------------------------------------------------------------------------------

_ZONE = rb"(?: ?(?:Z|[+-]\d\d:?\d\d|[A-Z]{3,5}))?"
_DATE = (
    # ISO 8601, journalctl -o short-iso and short-full; syslog, journalctl's own; journalctl -o short-unix.
    rb"(?:(?:[A-Z][a-z]{2} )?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?" + _ZONE +
    rb"|(?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} {1,2}\d{1,2} (?:\d{4} )?\d\d:\d\d:\d\d(?:\.\d+)?" + _ZONE +
    rb"|\d{9,10}\.\d{6})"
)  # fmt: skip
# dmesg: time since boot, also with the time since the previous line (-d); wall-clock time (-T); human-readable (-H).
_STAMP = (
    rb"\[\s*(?:\+?\d+\.\d+(?:\s<\s*\+?\d+\.\d+>)?|[A-Z][a-z]{2} [A-Z][a-z]{2} {1,2}\d{1,2} \d\d:\d\d:\d\d \d{4}"
    rb"|[A-Z][a-z]{2} {0,2}\d{1,2} \d\d:\d\d)\]"
)
_KERNEL_TAIL = rb"(?:<(?P<pri>\d+)>)?\s*(?:" + _STAMP + rb")?\s*(?:\[\s*[TC]\d+\]\s*)?"
_HEADER = re.compile(
    rb"[\s>*|-]*"  # the characters before a quotation or a list item
    rb"(?:<(?P<raw>\d+)>\s*|(?P<facility>\w+)\s*:\s*\w+\s*:\s*)?"
    rb"(?:(?P<kmsg>\d+),\d+,\d+,[^;\n]{0,40};"
    rb"|1 " + _DATE + rb" \S+ (?P<app>\S+) \S+ \S+ - "  # RFC 5424
    rb"|(?:" + _DATE + rb"\s+)?(?:\[\s*\d+\.\d+\]\s+)?(?:(?:\S+\s+)?(?P<ident>[\w./@-]+)(?P<pid>\[\d+\])?:\s+)?)?"
    rb"(?:message repeated (?P<repeated>\d+) times: \[\s*)?" + _KERNEL_TAIL
)  # fmt: skip
# A tool's text before a quoted kernel line: the kernel's header must be directly before the message.
_QUOTED = re.compile(rb"(?:kernel:\s*(?:" + _STAMP + rb"\s*)?|\[\s*\d+\.\d+\]\s*)(?:\[\s*[TC]\d+\]\s*)?$")
# A line that starts like a syslog line and names its writer.
_WRITER = re.compile(rb"\s*" + _DATE + rb"\s+\S+\s+(?P<ident>[\w./@-]+)(?P<pid>\[\d+\])?:\s")
_PRIORITY = re.compile(rb"\s*\d+,|[^\n]*(?:<\d+>|repeated)")
# A header of the kernel with its name after the time, or with a priority. Only beside such a one do other entries
# certainly have one, too: without names, a message of the kernel can look like a name.
_BEFORE_TIME = rb"[\s>*|-]*+(?:<\d+>\s*)?(?:1 )?"
_NAME = rb"(?:\[\s*\d+\.\d+\]\s+)?(?:\S*[^\s:]\s+)?kernel(?::\s| \S+ \S+ - )"
_OTHER_PRIORITY = (
    rb"[\s>*|-]*+(?:<(?:[89]|\d{2,})>|(?:[89]|\d{2,}),\d+,\d+,|(?!kern\b)[a-z]+\d?[ \t]*:[ \t]*[a-z]+[ \t]*:)"
)


def _test(kernels: bytes, others: bytes) -> tuple[re.Pattern[bytes], Callable[[bytes], bool | None]]:
    """A pattern of headers, and a test of entries: the kernel's, others', or None if it has no mark."""
    mark, other = re.compile(kernels), re.compile(others)
    return mark, lambda entry: True if mark.match(entry) else False if other.match(entry) else None


_KERNELS = (
    *(
        _test(
            rb"[\s>*|-]*+(?:<[0-7]>\s*)?(?:1 )?" + time + rb"\s+" + _NAME,
            _OTHER_PRIORITY + rb"|" + _BEFORE_TIME + time + rb"\s++(?!" + _NAME + rb")",
        )
        for time in (_DATE, _STAMP)
    ),
    _test(rb"[\s>*|-]*(?:<[0-7]>|[0-7],\d+,\d+,|kern[ \t]*:)", _OTHER_PRIORITY),
)
is_kernels_in_syslog = _KERNELS[0][1]
_NEXT_FACILITY = 8
"""Priorities from this one on belong to other facilities than the kernel's."""
_SHAPES = 1000
DIGITS = bytes.maketrans(b"123456789", b"000000000")
HEADER_BYTES = 400
"""The most bytes before a message that are parsed as its header."""


class Writer(Enum):
    """Who can have written a line that contains a message of the kernel."""

    KERNEL = "the kernel"
    QUOTED = "a program that quotes a whole line of the kernel"
    PROGRAM = "a program"


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a line before the message."""

    writer: Writer
    repeated: int = 1
    """N if syslog writes "message repeated N times"."""


_shapes: dict[bytes, Writer] = {}
"""The writer by a header's shape (digits masked); a log flood has one shape."""


def writer_of(header: bytes) -> Writer:
    """Who can have written the line that starts with ``header``."""
    shape = header.translate(DIGITS)
    known = _shapes.get(shape)
    if known is None:
        known = parse(header).writer
        # A priority decides by its value, which the shape does not contain.
        if len(_shapes) < _SHAPES and not _PRIORITY.match(header):
            _shapes[shape] = known
    return known


known_writer = _shapes.get
"""The known result of `writer_of` for a header with masked digits, None if there is none yet."""


def parse(header: bytes) -> Header:
    """Parse a header (the bytes of a line before the message)."""
    # Single blanks: with a long run of them, the pattern would try every way to divide it.
    header = b" ".join((b"." + header + b".").split())[1:-1]
    found = _HEADER.fullmatch(header)
    if found is None:
        writer = _WRITER.match(header)
        named = writer is not None and writer["ident"] != b"kernel"
        return Header(Writer.QUOTED if not named and _QUOTED.search(header) else Writer.PROGRAM)
    priorities = [int(found[name][:9]) for name in ("raw", "kmsg", "pri") if found[name]]
    kernel = (
        all(priority < _NEXT_FACILITY for priority in priorities)
        and (found["facility"] or b"kern") == b"kern"
        and all((found[name] or b"kernel") == b"kernel" for name in ("ident", "app"))
        and found["pid"] is None
    )
    return Header(Writer.KERNEL if kernel else Writer.PROGRAM, int(found["repeated"][:9]) if found["repeated"] else 1)


def kernels_beside(header: bytes) -> Callable[[bytes], bool | None] | None:
    """A test whether an entry beside the kernel's with this header can be the kernel's, too; None if all can be."""
    return next((test for mark, test in _KERNELS if mark.match(header)), None)


def names_writer(line: bytes) -> bool:
    """Whether a line names the program that wrote it, or the kernel, as in a syslog."""
    header = line[: HEADER_BYTES // 2]
    return b" kernel: " in header or ((found := _WRITER.match(header)) is not None and found["pid"] is not None)


# --- times -----------------------------------------------------------------------------------------------------------

_MONOTONIC = re.compile(rb"\[\s*(\d{1,12}\.\d{1,9})\]")
_USEC = re.compile(rb"\d+,\d+,(\d{1,18}),[^;\n]{0,40};")
_ISO = re.compile(rb"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?\d*(Z|[+-]\d\d:?\d\d)?")
_CTIME = re.compile(rb"([A-Z][a-z]{2}) {1,2}(\d{1,2}) (?:(\d{4}) )?(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?: (\d{4}))?")
_MONTHS = {name.encode(): number for number, name in enumerate(calendar.month_abbr) if name}


def time_of(header: bytes) -> Time:
    """The time in a header."""
    monotonic, epoch, dated, text = None, None, True, ""
    if found := _MONOTONIC.search(header):
        monotonic, text = float(found[1]), found[0].decode()
    elif found := _USEC.search(header):
        monotonic = int(found[1]) / 1e6
        text = f"[{monotonic:.6f}]"
    if found := _ISO.search(header):
        text = found[0].decode()
        epoch = _iso(text)
    elif found := _CTIME.search(header):
        text = found[0].decode()
        year = found[3] or found[7]
        dated = year is not None
        try:
            # 1972 is a leap year, so that February 29 is valid too.
            moment = (int(year or 1972), _MONTHS[found[1]], int(found[2]), *(int(found[part]) for part in (4, 5, 6)))
            epoch = float(calendar.timegm((*moment, 0, 0, 0)))
        except (KeyError, ValueError):
            epoch = None
    return Time(monotonic, epoch, dated, text)


def _iso(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text.replace(",", "."))
    except ValueError:
        return None
    if moment.tzinfo is None:
        return float(calendar.timegm(moment.timetuple()))
    return moment.timestamp()


# --- messages --------------------------------------------------------------------------------------------------------

# domain:bus:slot.function; the domain has four digits, or eight in nvidia-smi; the function can be missing.
ADDRESS = rb"[0-9a-fA-F]{1,8}(?::[0-9a-fA-F]{1,2}){1,2}(?:\.[0-7])?"

XID = re.compile(
    # A code directly before the mark of a pager is not whole.
    rb"NVRM:\s+Xid\s+\((?:PCI:)?\s*(" + ADDRESS + rb")[^)\n]{0,40}\):\s+(\d{1,4})(?![\d>]|\xe2\x80\xa6)"
    rb"(?:,\s+pid='?(\d+))?"
)
# The line may be wrapped anywhere; the number of another line is not this one's.
RECOVERY = re.compile(
    rb"(?:[^,\n]{0,3}(?:,\s+pid=[^,\n]{1,20})?,\s+name=[^\n]{0,15},)?+"  # a process's name, which may look like it
    rb"(?:(?!NVRM:)[^\0]){0,240}?\s+to\s+0x([0-9a-fA-F]{1,2})\b"
)
REGISTERS = re.compile(rb"[^(\n]{0,200}\((0x[0-9a-fA-F]{8})\s+(0x[0-9a-fA-F]{8})")
FATAL = re.compile(rb",\s+(?!name=)\S+\s+(Fatal|Link Fatal)\b")

SXID = re.compile(
    rb"(?:nvidia-nvswitch\d*:\s+)?SXid\s+\((?:PCI:)?\s*(" + ADDRESS + rb")\):\s+(\d{1,6})(?!\d)"
    rb"(?:,\s+(?:(Fatal|Non-fatal)|Severity\s+(\d)|(Data\s*\{)))?",
    re.IGNORECASE,
)

# The name may contain blanks and colons; the pid is after its last colon, and old kernels may omit it.
_TASK = rb"task\s+(\S[^\n]{0,60}?)(?::(\d+))?"
HUNG_TASK = re.compile(
    rb"(?:INFO:\s+)?" + _TASK + rb"\s+(?:<\w+>\s+)?"
    rb"(?:blocked\s+(?:in\s+I/O\s+wait\s+)?for\s+more\s|can't\s+die\s+for\s+more\s)"
)  # fmt: skip
LOCK_OWNER = re.compile(
    rb"(?:INFO:\s+)?" + _TASK + rb"\s+(?:<\w+>\s+)?(?:is\s+)?blocked\s+on\s+an?\s+[\w-]+"
    rb"\s+likely\s+(?:owned|last\s+held)\s+by\s+" + _TASK +
    # A name may contain anything, and the kernel writes nothing after it: so only the end of the line ends it.
    rb"(?=\.?(?:\s+<\w+>)?[\]\"'})\t\r ]*(?:\n|\Z))"
)  # fmt: skip
NOT_FROZEN = re.compile(
    rb"Freezing\s+(?:of\s+)?(?:user\s+space\s+processes|(?:remaining\s+freezable\s+)?tasks)\s+failed"
    rb"\s+after\s[^\n]{0,40}refusing\s+to\s+freeze"
)
# A task in uninterruptible sleep, as the kernel shows tasks: `task:NAME state:D stack:0 pid:77`.
TASK_DUMP = re.compile(rb"task:(\S[^\n]{0,60}?)\s+state:D\b[^\n]{0,80}?\bpid:\s*(\d+)")
AFTER_FREEZE = re.compile(
    rb"OOM killer enabled|Restarting (?:kernel threads|tasks)|PM: suspend exit|Freezing\s+(?:of|user|remaining|tasks)\s"
)
SOFT_LOCKUP = re.compile(
    rb"(?:watchdog:\s+)?BUG:\s+soft\s+lockup\s+-\s+CPU#\d+\s+stuck\s+for\s+\d+s!\s+\[(\S[^\n]{0,60}?):(\d+)\]"
)
# The end of a report: whatever can begin the next one, else a log of beginnings would be read again and again; after
# a hung task also a stack dump for another reason.
_REPORT = rb"task\s+\S[^\n]{0,60}?(?::\d+)?\s+(?:<\w+>\s+)?(?:is\s+)?blocked\s|can't\s+die\s+for\s|BUG:\s|rcu: INFO: "
AFTER_LOCKUP = re.compile(_REPORT + rb"|WARNING: |Sending NMI")
AFTER_HUNG_TASK = re.compile(_REPORT + rb"|PID: \d+ Comm: |WARNING: |Sending NMI")
# The line of die(): `Oops: 0002 [#1] SMP`, `general protection fault: 0000 [#1]`, `Internal error: Oops: 960000 [#1]`.
OOPS = re.compile(
    rb"(?:Oops|[Gg]eneral protection fault|invalid opcode|Internal error|divide error|stack segment)\b[^\n]{0,160}"
    rb": [0-9a-f]{4,16} \[#\d+\]"
)
TASK_OF_OOPS = re.compile(rb"\bPID: (\d+) (?:UID: \d+ )?Comm: (\S[^\n]{0,30}?) (?:Tainted|Not tainted|Kdump)")
AFTER_OOPS = re.compile(rb"---\[ end (?:trace|Kernel panic)|</IRQ>|\[#\d+\]")
UNSURE_FRAME = re.compile(rb"\? [^\n]*")
# A stack frame, or a kernel worker's work item, in one of NVIDIA's modules. Newer kernels add the build id.
NVIDIA_FRAME = re.compile(
    rb"(?:\+0x[0-9a-f]+/0x[0-9a-f]+|Workqueue:\s+\S+\s+\w+)\s+\[%b(?: [0-9a-f]{6,64})?\]" % MODULE.encode()
)
FAULT_FRAME = re.compile(FAULT.encode())
# What is before a frame in a line that begins with `[`, a time: an address, the mark of an unsure frame, a register.
# A line may also have the name of a program that crashed, which can look like a frame.
BEFORE_FRAME = re.compile(
    rb"\s*\[[^\]\n]*\](?:\s+(?:\S+\s+)?kernel:)?(?:\s*\[[\s\d.]+\])?(?:\s*\[\s*[TC]\d+\])?"
    rb"\s*(?:[A-Z]?IP|LR|pc|lr)?(?: is at)?[\s\[\]<>?:\da-f]*"
)
# What a whole stack ends with: the first function of a thread of the kernel, or how a program entered the kernel.
STACK_END = re.compile(rb"\b(?:kthread|entry_\w+|do_syscall\w*|system_call\w*|el0\w*|asm_exc_\w+)\+0x\w+/0x\w+")
# Frames of the NFS client (fs/nfs) and of its transport (net/sunrpc), as modules or built into the kernel. And those of
# a task that waits for the lock of a folder (fs/namei.c): the one that has it may wait for NFS, and a driver has none.
NFS_FRAME = re.compile(
    rb"\b(?:_{0,2}rpc_|nfs\d?_)\w+\+0x[0-9a-f]+/0x[0-9a-f]+|\+0x[0-9a-f]+/0x[0-9a-f]+\s+\[(?:nfs\w*|sunrpc)[ \]]"
    rb"|\b(?:open_last_lookups|lookup_slow|filename_create|do_unlinkat|lock_rename)\+0x[0-9a-f]+/0x[0-9a-f]+"
)
# Threads of the driver, and programs that only use the driver.
NVIDIA_TASK = re.compile(DRIVER_THREAD.encode())

OFF_BUS = re.compile(
    rb"GPU\s+(?:at\s+)?(?:PCI:)?(" + ADDRESS + rb"):?\s+(?:GPU\s+)?has\s+fallen\s+off\s+the\s+bus"
    rb"|(?:The\s+)?NVIDIA\s+GPU\s+(" + ADDRESS + rb")(?s:.{0,400}?)fallen\s+off\s+the\s+bus",
)
INIT_FAILED = re.compile(
    rb"NVRM:\s+(?:GPU\s+(?:at\s+)?(?:PCI:)?("
    + ADDRESS
    + rb"):?\s+)?(?:RmInitAdapter\s+failed|rm_init_adapter(?:\(\d+\))?\s+failed|request_irq\(\)\s+failed"
    rb"|Failed\s+to\s+enable\s+MSI-X(?!\S*\s+falling\s+back)|No\s+interrupts\s+of\s+any\s+type\s+are\s+available)"
    rb"|NVRM:\s+The\s+NVIDIA\s+probe\s+routine\s+failed"
)
NO_INTERRUPT = re.compile(rb"irq|MSI-X|interrupts")
# Another driver owns the GPUs; if it owns all of them, the module does not stay loaded.
NOT_PROBED = re.compile(rb"NVRM:\s+The\s+NVIDIA\s+probe\s+routine\s+was\s+not\s+called\s+for\s+(\d{1,4})\s+device")
NONE_PROBED = re.compile(rb"NVRM:\s+No\s+NVIDIA\s+(?:devices\s+probed|graphics\s+adapter|GPU)")
# nouveau loads firmware from a folder of the same name; the driver works without its debug logs (gsp_log).
FIRMWARE = re.compile(
    rb"\bnvidia\s+("
    + ADDRESS
    + rb"):\s+(?:Direct\s+firmware\s+load\s+for\s+nvidia/(?!\S*gsp_log)\S+\s+failed\s+with\s+error"
    rb"|firmware:\s+failed\s+to\s+load\s+nvidia/(?!\S*gsp_log)\S+)"
)
# An initialisation failure that recurs at every boot: firmware, module flavour or BIOS.
INIT_CAUSE = re.compile(
    rb"NVRM:\s[^\n]{0,120}?(?:No firmware image found|RmFetchGspRmImages|[Ff]ailed to load firmware"
    rb"|requires use of the NVIDIA open kernel modules|is not supported by (?:the|open)\b"
    rb"|I/O region assigned to your NVIDIA device is invalid|BIOS may have misconfigured your GPU"
    rb"|64-bit BAR mapped above 4GB by the system)"
    rb"|NVRM:\s+installed in this system (?:is not supported by|requires use of)"
)
MISMATCH = re.compile(
    rb"NVRM:\s+API\s+mismatch:\s+the\s+client\s+(?:'([^'\n]{0,40})'\s+(?:\(pid \d+\)\s+)?)?"
    rb"has\s+the\s+version\s+([\d.]+\d)"
    rb"(?:(?s:.{0,200}?)kernel\s+module\s+has\s+the\s+version\s+([\d.]+\d))?"
)
GSP_TIMEOUT = re.compile(
    rb"NVRM:[^\n]{0,120}?(?:[Tt]imeout\s[^\n]{0,40}RPC\s+(?:response\s+)?from\s+(?:GPU\d+\s+)?GSP)"
)
RESET_REQUIRED = re.compile(rb"NVRM:[^\n]{0,120}?\[NV_ERR_RESET_REQUIRED\]")
UVM_FATAL = re.compile(rb"(?:nvidia-uvm:[^\n]{0,160}?)?[Ee]ncountered\s+a\s+global\s+fatal\s+error")
AER = re.compile(
    rb"([\w-]+)\s+("
    + ADDRESS
    + rb"):\s+(?:AER:\s+)?PCIe\s+Bus\s+Error:\s+severity=(Corrected|Uncorrect\w+)(?:\s+\((Fatal|Non-Fatal)\))?"
)
AER_UNHANDLED = re.compile(
    rb"nvidia\s+(" + ADDRESS + rb"):\s+(?:AER:\s+)?(?:can't\s+recover|device\s+has\s+no\s+AER-aware)"
)
# What the kernel found on the bus at boot. Class 03: display and 3D controllers. Source: Linux drivers/pci/probe.c.
GPU_FOUND = re.compile(rb"pci\s+(" + ADDRESS + rb"):\s+\[10de:[0-9a-f]{4}\]\s+type\s+\w+\s+class\s+0x03")
# Downstream port containment, by the kernel or by the firmware: the port cut off what is below it.
CONTAINED = re.compile(
    rb"([\w-]+)\s+(" + ADDRESS + rb"):\s+(?:DPC:\s+containment\s+event|EDR:\s+EDR\s+event\s+received)"
)

# Fabric Manager's own log, and its lines in a syslog: by its name, its script or its unit; also of RFC 5424.
NVSWITCH_ERROR = re.compile(
    rb"detected\s+NVSwitch\s+(fatal|non-fatal)\s+error\s+(\d{1,6})\b(?:[^\n]{0,120}?\bpci\s+bus\s+id\s+("
    + ADDRESS
    + rb"))?"
)
FABRIC_MANAGER_HEADER = re.compile(
    rb"\s*(?:\[[A-Z][a-z]{2} \d{1,2} \d{4} \d\d:\d\d:\d\d\]\s+\[[A-Z]+\]\s+\[tid \d+\]\s*"
    rb"|(?:<\d+>)?(?:1 )?(?:" + _DATE + rb"|\[\s*\d+\.\d+(?:\s<\s*\+?\d+\.\d+\s*>)?\])"
    rb"\s+\S+\s+nv(?:idia)?-fabricmanag[\w.-]*(?:(?:\[\d+\])?:| \S+ \S+ -)\s+(?:\[[^\]\n]{0,40}\]\s*)*)"
)  # fmt: skip

# nvidia-smi's own messages, at the start of a line.
SMI_MESSAGE = re.compile(
    rb"(?:nvidia-smi:?\s+)?(?:"
    rb"Unable\s+to\s+determine\s+the\s+(?P<handle>device\s+handle)\s+for\s+GPU\s*\d*:?\s*(?P<gpu>" + ADDRESS + rb")"
    rb":\s+(?P<problem>[^\n]{0,80})"
    rb"|(?P<message>Failed\s+to\s+initialize\s+NVML:\s+[^\n]{0,80}|No\s+devices\s+were\s+found"
    rb"|NVIDIA-SMI\s+(?:has\s+failed\s+because|couldn't)\s+[^\n]{0,80}))"
)  # fmt: skip
# A GPU in the output of `nvidia-smi -L`; slices of it (MIG) are in further lines.
SMI_LISTED = re.compile(rb"[ \t]*GPU (\d{1,3}): [^\n]{1,80}? \(UUID: GPU-")
# A value of nvidia-smi's table or CSV.
SMI_VALUE = re.compile(rb"(?<=[\s|,\[])(GPU is lost|GPU requires reset|ERR!)(?=[\s|,\]])")

# --- whole logs ------------------------------------------------------------------------------------------------------

# A line of the kernel: by its header, or by a message that only it writes. A binary file has a line with `<5>`, too.
KERNEL_LINE = re.compile(
    rb"^[ \t]*+(?:<\d+>(?=[\t -~]{8})|kern\s*:\s*\w+\s*:|\d+,\d+,\d+,[^;\n]{0,40};|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{6}"
    rb"|(?:" + _DATE + rb"\s+)?(?:\S+\s+)?kernel:\s|" + _STAMP + rb'[\s\[]|\{[^\n]{0,4000}"_TRANSPORT"\s*:\s*"kernel"'
    rb"|INFO: task |BUG: |Call [Tt]race:|Kernel panic - |CPU: \d+ PID: )",
    re.MULTILINE,
)  # fmt: skip
# What only a kernel with NVIDIA's driver writes: its messages, and its modules in a stack or in a list of modules.
DRIVER_MESSAGE = re.compile(rb"NVRM: |nvidia(?:[-_][a-z]+\d*)?(?: [0-9a-fA-F]{4}:[0-9a-fA-F:.]+)?: ")
DRIVER_MODULE = re.compile(rb"/0x[0-9a-f]+\s+\[%b[\] ]|Modules linked in:[^\n:]{0,4000}\bnvidia\b" % MODULE.encode())
# The first line of an entry of a log: its further lines, and what a mail has wrapped, begin with no time. A search for
# the line break before it is far faster than one with `^`.
ENTRY = re.compile(
    rb"\n[ \t>]*(?:<\d+>[ \t]*(?:1 )?|[a-z\d]+[ \t]*:[ \t]*[a-z]+[ \t]*:[ \t]*)?(?:\{|\d+,\d+,\d+,|"
    + _DATE
    + rb"|"
    + _STAMP
    + rb")"
)
BOOTED = re.compile(rb"Linux version \d|-- Boot [0-9a-f]{32}|-- Reboot --")
ORDER_LINES = 300
"""Lines that show the order of a log, if their times differ."""


def newest_first(lines: Iterable[bytes]) -> bool:
    """Whether the times of these lines mostly decrease (``journalctl -r``), in the first ones that have an order.

    A flood may have more lines in its second than what is looked at otherwise.
    """
    up = down = 0
    previous = Time()
    for number, line in enumerate(lines):
        if number >= ORDER_LINES and (up or down):
            break
        now = time_of(line[:HEADER_BYTES])
        if now.before(previous):
            down += 1
        elif previous.before(now):
            up += 1
        previous = now
    return down > up
