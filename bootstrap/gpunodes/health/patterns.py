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
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from gpunodes.ansible.module_utils.probe.known import DRIVER_THREAD
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
_WRITER = re.compile(rb"\s*" + _DATE + rb"\s+\S+\s+(?P<ident>[\w./@-]+)(?:\[\d+\])?:\s")
_PRIORITY = re.compile(rb"\s*\d+,|[^\n]*(?:<\d+>|repeated)")
_NEXT_FACILITY = 8
"""Priorities from this one on belong to other facilities than the kernel's."""
_SHAPES = 1000
DIGITS = bytes.maketrans(b"123456789", b"000000000")
HEADER_BYTES = 400
"""The most bytes before a message that are parsed as its header."""


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a line before the message."""

    kernel: bool
    """The kernel can have written the line."""
    repeated: int = 1
    """N if syslog writes "message repeated N times"."""


_shapes: dict[bytes, bool] = {}
"""By a header's shape (digits masked): whether the kernel can be the writer; a log flood has one shape."""


def from_kernel(header: bytes) -> bool:
    """Whether the kernel can have written the line that starts with ``header``."""
    shape = header.translate(DIGITS)
    known = _shapes.get(shape)
    if known is None:
        known = parse(header).kernel
        # A priority decides by its value, which the shape does not contain.
        if len(_shapes) < _SHAPES and not _PRIORITY.match(header):
            _shapes[shape] = known
    return known


known_kernel = _shapes.get
"""The known result of `from_kernel` for a header with masked digits, None if there is none yet."""


def parse(header: bytes) -> Header:
    """Parse a header (the bytes of a line before the message)."""
    # Single blanks: with a long run of them, the pattern would try every way to divide it.
    header = b" ".join((b"." + header + b".").split())[1:-1]
    found = _HEADER.fullmatch(header)
    if found is None:
        writer = _WRITER.match(header)
        named = writer is not None and writer["ident"] != b"kernel"
        return Header(kernel=not named and _QUOTED.search(header) is not None)
    priorities = [int(found[name][:9]) for name in ("raw", "kmsg", "pri") if found[name]]
    kernel = (
        all(priority < _NEXT_FACILITY for priority in priorities)
        and (found["facility"] or b"kern") == b"kern"
        and all((found[name] or b"kernel") == b"kernel" for name in ("ident", "app"))
        and found["pid"] is None
    )
    return Header(kernel, int(found["repeated"][:9]) if found["repeated"] else 1)


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
    rb"NVRM:\s+Xid\s+\((?:PCI:)?\s*(" + ADDRESS + rb")[^)\n]{0,40}\):\s+(\d{1,4})(?!\d)"
    rb"(?:,\s+pid='?(\d+))?"
)
RECOVERY = re.compile(rb"[^\n]{0,200}?\s+(?:changed\s+from\s+0x\w+\s+\([^)]{0,60}\)\s+)?to\s+0x([0-9a-fA-F]{1,2})\b")
REGISTERS = re.compile(rb"[^(\n]{0,200}\((0x[0-9a-fA-F]{8})\s+(0x[0-9a-fA-F]{8})")
FATAL = re.compile(rb",\s+\S+\s+(Fatal|Link Fatal)\b")

SXID = re.compile(
    rb"(?:nvidia-nvswitch\d*:\s+)?SXid\s+\((?:PCI:)?\s*(" + ADDRESS + rb")\):\s+(\d{1,6})(?!\d)"
    rb"(?:,\s+(?:(Fatal|Non-fatal)|Severity\s+(\d)|(Data\s*\{)))?",
    re.IGNORECASE,
)

HUNG_TASK = re.compile(
    rb"(?:INFO:\s+)?task\s+(\S[^\n]{0,60}?):(\d+)\s+(?:<\w+>\s+)?blocked\s+(?:in I/O wait\s+)?for\s+more\s"
)
SOFT_LOCKUP = re.compile(
    rb"(?:watchdog:\s+)?BUG:\s+soft\s+lockup\s+-\s+CPU#\d+\s+stuck\s+for\s+\d+s!\s+\[(\S[^\n]{0,60}?):(\d+)\]"
)
# The end of a report: the next report, or, after a hung task, a stack dump for another reason.
_REPORT = rb"\btask \S[^\n]{0,60}?:\d+ (?:<\w+> )?(?:is )?blocked |BUG: |rcu: INFO: "
AFTER_LOCKUP = re.compile(_REPORT + rb"|WARNING: |Sending NMI")
AFTER_HUNG_TASK = re.compile(_REPORT + rb"|PID: \d+ Comm: |WARNING: |Sending NMI")
BEFORE_REPORT = (b" blocked for more ", b" Comm: ", b"BUG: soft lockup")
"""Text that every earlier report contains, for a fast backward search in a reversed log."""
# A stack frame, or a kernel worker's work item, in one of NVIDIA's modules. Newer kernels add the build id.
NVIDIA_FRAME = re.compile(
    rb"(?:\+0x[0-9a-f]+/0x[0-9a-f]+|Workqueue:\s+\S+\s+\w+)\s+\[nvidia(?:_uvm|_modeset|_drm)?(?: [0-9a-f]{6,64})?\]"
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
    + rb"):?\s+)?(?:RmInitAdapter\s+failed|rm_init_adapter(?:\(\d+\))?\s+failed)"
    rb"|NVRM:\s+The\s+NVIDIA\s+probe\s+routine\s+failed"
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

# nvidia-smi's own messages, at the start of a line.
SMI_MESSAGE = re.compile(
    rb"(?:nvidia-smi:?\s+)?(?:"
    rb"Unable\s+to\s+determine\s+the\s+(?P<handle>device\s+handle)\s+for\s+GPU\s*\d*:?\s*(?P<gpu>" + ADDRESS + rb")"
    rb":\s+(?P<problem>[^\n]{0,80})"
    rb"|(?P<message>Failed\s+to\s+initialize\s+NVML:\s+[^\n]{0,80}|No\s+devices\s+were\s+found"
    rb"|NVIDIA-SMI\s+(?:has\s+failed\s+because|couldn't)\s+[^\n]{0,80}))"
)  # fmt: skip
# A value of nvidia-smi's table or CSV.
SMI_VALUE = re.compile(rb"(?<=[\s|,\[])(GPU is lost|GPU requires reset|ERR!)(?=[\s|,\]])")

# --- whole logs ------------------------------------------------------------------------------------------------------

# A line of the kernel: by its header, or by a message that only the kernel writes.
KERNEL_LINE = re.compile(
    rb"^[ \t]*+(?:<\d+>|kern\s*:\s*\w+\s*:|\d+,\d+,\d+,[^;\n]{0,40};|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{6}"
    rb"|(?:" + _DATE + rb"\s+)?(?:\S+\s+)?kernel:\s|" + _STAMP + rb'[\s\[]|\{[^\n]{0,4000}"_TRANSPORT"\s*:\s*"kernel"'
    rb"|INFO: task |BUG: |Call [Tt]race:|Kernel panic - |CPU: \d+ PID: )",
    re.MULTILINE,
)  # fmt: skip
BOOTED = re.compile(rb"Linux version \d|-- Boot [0-9a-f]{32}|-- Reboot --")


def newest_first(lines: Iterable[bytes]) -> bool:
    """Whether the times of these lines mostly decrease (``journalctl -r``)."""
    up = down = 0
    previous = Time()
    for line in lines:
        now = time_of(line[:HEADER_BYTES])
        if now.before(previous):
            down += 1
        elif previous.before(now):
            up += 1
        previous = now
    return down > up
