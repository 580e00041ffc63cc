"""What was found and done about each machine: one line of JSON each, appended and never changed (0600)."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpunodes.errors import GpunodesError
from gpunodes.settings import state_home

_FILE = "history.jsonl"
_LAST = 253402300800.0
"""The year 10000, in seconds since 1970: no calendar goes further."""


class EntryKind(StrEnum):
    """What an entry tells."""

    VERDICT = "verdict"
    """Why a repair began, or, where it belongs to none, why none did."""
    STAGE = "stage"
    STEP = "step"
    """A rung of the ladder, with its outcome."""
    VERIFICATION = "verification"
    END = "end"
    """How a repair ended."""
    CLEARED = "cleared"
    """Somebody allowed repairs again."""
    POWER = "power"
    """A power action by hand."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One thing that happened to a machine. ``time`` is in seconds since 1970."""

    time: float
    machine: str
    kind: EntryKind
    what: str
    """The step, rung, action or verdict."""
    outcome: str = ""
    detail: str = ""
    seconds: float = 0.0
    repair: str = ""
    """The id of the repair that it belongs to."""
    cluster: str = ""
    """The control plane's address in the inventory."""
    by: str = ""
    """user@host"""
    evidence: tuple[str, ...] = field(default=())


def path() -> Path:
    """The file."""
    return state_home() / _FILE


def append(entry: HistoryEntry) -> None:
    """Add one entry; it is on the disk when this returns. Raises GpunodesError where it cannot be, and adds nothing."""
    # In ASCII: people look at the file itself, too, and a machine's words may steer a terminal, or be no UTF-8.
    line = json.dumps(dataclasses.asdict(entry)).encode() + b"\n"
    try:
        descriptor = os.open(path(), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _add(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise GpunodesError(
            f"the history of {entry.machine} cannot be written: {error.filename or _FILE}: {error.strerror}",
            "a record of what is done to machines",
            "see `df` and the folder's permissions",
        ) from error


def read(machine: str = "", cluster: str | None = None) -> list[HistoryEntry]:
    """The entries of a machine (of all when none is named), the oldest first; broken lines are passed over.

    ``cluster`` keeps those of one cluster. Raises GpunodesError for a file that cannot be read.
    """
    found = []
    try:
        with path().open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                entry = _parse(line)
                if entry and machine in ("", entry.machine) and cluster in (None, entry.cluster):
                    found.append(entry)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise GpunodesError(
            f"the history cannot be read: {error.filename or _FILE}: {error.strerror}",
            "a file of yours",
            "see its permissions",
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class MachineHistory:
    """What the history says that matters for the next repair."""

    repairs: tuple[float, ...] = ()
    """When repairs began that climbed the ladder, since somebody last cleared the machine."""
    needs_repair: str = ""
    """Why it was given up, "" when it was not."""
    left: str = ""
    """Why it was left as it is the last time, "" when something was done since."""


def summaries(cluster: str) -> Mapping[str, MachineHistory]:
    """The past of every machine of a cluster that has one."""
    found: dict[str, MachineHistory] = {}
    begun: dict[str, float] = {}
    counted: set[str] = set()
    for entry in read(cluster=cluster):
        past = found.get(entry.machine, MachineHistory())
        begun.setdefault(entry.repair, entry.time)
        if entry.kind is EntryKind.CLEARED:
            past = MachineHistory()
        elif entry.kind is EntryKind.STEP and entry.outcome != "skipped" and entry.repair not in counted:
            counted.add(entry.repair)
            # The time that stands on the node, too: when the repair began.
            past = dataclasses.replace(past, repairs=(*past.repairs, begun.get(entry.repair, entry.time)))
        elif entry.kind is EntryKind.END:
            past = dataclasses.replace(past, needs_repair=entry.detail if entry.outcome == "needs-repair" else "")
        left = entry.detail if entry.kind is EntryKind.VERDICT and not entry.repair else ""
        found[entry.machine] = dataclasses.replace(past, left=left)
    return found


def _add(descriptor: int, line: bytes) -> None:
    """Write a whole line at the end, or none of it."""
    size = os.fstat(descriptor).st_size
    # A power cut may have left half a line: the next one must not be lost with it.
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        line = b"\n" + line
    try:
        while line:
            line = line[os.write(descriptor, line) :]
        os.fsync(descriptor)
    except OSError:
        # The disk is full, most likely, and a part of the line stands there.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _parse(line: str) -> HistoryEntry | None:
    """The entry of a line; None for one that is none, or whose values have other types than ours."""
    try:
        read: Any = json.loads(line)
        known = {each.name for each in dataclasses.fields(HistoryEntry)}
        values = {name: value for name, value in read.items() if name in known}
        values["kind"] = EntryKind(values["kind"])
        evidence = values.setdefault("evidence", [])
        entry = HistoryEntry(**{**values, "evidence": tuple(evidence)})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    texts = (entry.machine, entry.what, entry.outcome, entry.detail, entry.repair, entry.cluster, entry.by, *evidence)
    # True is a number to Python, and NaN is in no range.
    numbers = (type(each) in (int, float) and 0 <= each < _LAST for each in (entry.time, entry.seconds))
    typed = isinstance(evidence, list) and all(isinstance(text, str) for text in texts) and all(numbers)
    return entry if typed else None
