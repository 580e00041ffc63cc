"""What the probe and the health rules both know about the driver and the log."""

DRIVER_THREAD = (
    r"nvidia-[\w./:-]*|nv-fabricmanag\w*|nv-hostengine|nvlsm|dcgm[\w-]*|nv_queue|nv_open_q|nvc:\[\w+\]"
    r"|irq/\d+-nvidia\S*|UVM (?:global|GPU|deferred|Tools)[^:]*"
)
"""The names of the driver's own threads and tools, as a pattern. The kernel truncates names to 15 characters.

Any process can take one of them: only for a thread of the kernel does a name prove anything.
"""
STUCK_S = 20.0
"""A task in uninterruptible sleep for so many seconds is stuck; the driver starts all GPUs of a machine in less."""
FLOOD_FIRST, FLOOD_LAST = 20, 5
"""How many lines of a log flood stay in the log; the others are only counted."""
