"""A journal's entries: the messages of the kernel, with a header in the format of dmesg, and of Fabric Manager.

``journalctl -o json`` has an entry per line; `journal_formats` makes its other formats into that one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping

_FABRIC_MANAGER, _FABRIC_MANAGER_UNIT = "nv-fabricmanager", "nvidia-fabricmanager.service"
LINE_BYTES = 64 << 10
"""The most bytes of an entry that are read."""
MARKERS = (b'"MESSAGE":[', b'"MESSAGE" : [')
"""The beginning of a message that is not UTF-8, and so a list of bytes."""

_TRANSPORT = re.compile(rb'"_TRANSPORT"\s*:\s*"kernel"')
_IDENTIFIER = re.compile(rb'"SYSLOG_IDENTIFIER"\s*:\s*"kernel"')
_FACILITY_OF_OTHERS = re.compile(rb'"SYSLOG_FACILITY"\s*:\s*+(?!"0")')


def entry_of(line: bytes) -> Mapping[str, object] | None:
    """The entry of the kernel, or of Fabric Manager, in a line of JSON; None for entries of other writers."""
    import json

    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not message_of(entry):
        return None
    transport = entry.get("_TRANSPORT", entry.get("SYSLOG_IDENTIFIER"))
    if transport == "kernel":
        return entry if entry.get("SYSLOG_FACILITY", "0") == "0" else None
    return entry if is_fabric_manager(entry) else None


def is_kernels(line: bytes) -> bool:
    """Whether `entry_of` has an entry of the kernel for a line of JSON; much faster.

    No value can contain the name of a field: JSON escapes its quotation marks.
    """
    writer = _TRANSPORT if b'"_TRANSPORT"' in line else _IDENTIFIER
    return writer.search(line) is not None and not _FACILITY_OF_OTHERS.search(line)


def is_fabric_manager(entry: Mapping[str, object]) -> bool:
    """Whether an entry is Fabric Manager's.

    Its unit decides, which journald itself records. A program chooses its identifier: that counts only without a unit,
    and not if journald recorded another user than root.
    """
    if entry.get("_TRANSPORT") == "kernel":
        return False
    if "_SYSTEMD_UNIT" in entry:
        return entry["_SYSTEMD_UNIT"] == _FABRIC_MANAGER_UNIT
    return entry.get("SYSLOG_IDENTIFIER") == _FABRIC_MANAGER and entry.get("_UID", "0") == "0"


def message_of(entry: Mapping[str, object]) -> bytes:
    """The message of an entry; journalctl writes a message that is not UTF-8 as a list of bytes."""
    message = entry.get("MESSAGE")
    if isinstance(message, list):
        try:
            return bytes(message)
        except (TypeError, ValueError):
            return b""
    return message.encode(errors="replace") if isinstance(message, str) else b""


def times(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The times of entries, as headers that `patterns.time_of` reads."""
    for line in lines:
        if found := re.search(rb'"__REALTIME_TIMESTAMP"\s*:\s*"(\d{1,16})"', line[:LINE_BYTES]):
            yield _realtime(int(found[1]))


def header_of(entry: Mapping[str, object]) -> bytes:
    """The header of the kernel's entry in the format of dmesg, of Fabric Manager's in that of a syslog."""
    header = b""
    is_program = is_fabric_manager(entry)
    for name, formatted in (("__REALTIME_TIMESTAMP", _realtime), ("__MONOTONIC_TIMESTAMP", _monotonic)):
        value = str(entry.get(name, ""))
        if re.fullmatch(r"[0-9]{1,16}", value) and not (is_program and formatted is _monotonic):
            header += formatted(int(value))
    return header + b"- %s: " % _FABRIC_MANAGER.encode() if is_program else header


def _realtime(usec: int) -> bytes:
    return b"%d-%02d-%02dT%02d:%02d:%02dZ " % time.gmtime(usec // 1_000_000)[:6]


def _monotonic(usec: int) -> bytes:
    return b"[%d.%06d] " % divmod(usec, 1_000_000)
