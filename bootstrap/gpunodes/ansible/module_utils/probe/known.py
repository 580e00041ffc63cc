"""What the probe and the health rules both know about the driver and the log."""

import re
from typing import Iterable

DRIVER_THREAD = (
    r"nvidia-[\w./:-]*|nv-fabricmanag\w*|nv-hostengine|nvlsm|dcgm[\w-]*|nv_queue|nv_open_q|nvc:\[\w+\]"
    r"|irq/\d+-nvidia\S*|UVM (?:global|GPU|deferred|Tools)[^:]*"
)
"""The names of the driver's own threads and tools, cut to 15 characters. They prove nothing of a process."""
MODULE = "nvidia(?:_uvm|_modeset|_drm)?"
"""The driver's modules. Another one, nvidia_fs, waits for files."""
FAULT = (
    r"(?:(?:filemap|handle_mm|page)_fault|faultin_page|get_user_pages|do_mem_abort)[\w.]{0,200}\+\S{1,200}(?!\S| \[)"
)
"""A frame of a thread that needs a page of memory: it can be a file's, whose server is frozen."""
_WAITS = re.compile(r"\+0x[0-9a-f]+/0x[0-9a-f]+ \[(" + MODULE + r")[ \]]|" + FAULT)
FILE_WAIT = re.compile("_*(?:rpc|nfs|folio_wait|wait_on_page|page_wait|request_wait|fuse)")
"""Where threads wait for files (/proc/PID/wchan)."""
STUCK_S = 20.0
"""A task in uninterruptible sleep for so many seconds is stuck; the driver starts all GPUs of a machine in less."""
FLOOD_FIRST, FLOOD_LAST = 20, 5
"""How many lines of a log flood stay in the log; the others are only counted."""


def in_driver(stack: Iterable[str]) -> bool:
    """Whether a thread waits in the driver, not for a page, by its stack, innermost frame first."""
    found = next(filter(None, map(_WAITS.search, stack)), None)
    return bool(found and found.group(1))
