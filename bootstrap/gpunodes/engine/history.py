"""The history of verdicts and repairs of each machine: a file of JSON lines, append-only (0600)."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpunodes.engine.leases.holders import user_at_host
from gpunodes.errors import GpunodesError
from gpunodes.settings import state_home
from gpunodes.shape import LATEST

_FILE = "history.jsonl"


class EntryKind(StrEnum):
    """The kind of an entry."""

    VERDICT = "verdict"
    """Why a repair began; in an entry without a repair id, why the machine was not repaired."""
    STAGE = "stage"
    STEP = "step"
    """An escalation step, with its outcome."""
    VERIFICATION = "verification"
    END = "end"
    """The outcome of a repair."""
    CLEARED = "cleared"
    """A user allowed repairs again, or a command found that its node is not marked any more."""
    BURN_IN = "burn-in"
    """The result of a burn-in."""
    ROLLOUT = "rollout"
    """A stage or the outcome of a roll-out on a machine."""
    POWER = "power"
    """A power action of a user."""
    STATE = "state"
    """A notice reported the machine's new state."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One entry for a machine. ``time`` is in seconds since 1970."""

    time: float
    machine: str
    kind: EntryKind
    what: str
    """The stage, step, action or verdict."""
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
    """The path of the history file."""
    return state_home() / _FILE


def append(entry: HistoryEntry) -> None:
    """Append one entry and sync it to disk. Raises GpunodesError, and leaves the file unchanged, when that fails."""
    # In ASCII: users read the file itself, and a machine's messages may hold terminal sequences or invalid UTF-8.
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
            "a record of all actions on machines",
            "check `df` and the permissions of the folder",
        ) from error


def note(
    machine: str,
    cluster: str,
    kind: EntryKind,
    what: str,
    outcome: str = "",
    detail: str = "",
    *,
    moment: float | None = None,
    seconds: float = 0.0,
    repair: str = "",
    evidence: tuple[str, ...] = (),
) -> None:
    """Append an entry of this command's user, for ``moment`` or now; raises as :func:`append`."""
    append(
        HistoryEntry(
            time=time.time() if moment is None else moment,
            machine=machine,
            kind=kind,
            what=what,
            outcome=outcome,
            detail=detail,
            seconds=round(seconds, 1),
            repair=repair,
            cluster=cluster,
            by=user_at_host(),
            evidence=evidence,
        )
    )


def read(machine: str = "", cluster: str | None = None) -> list[HistoryEntry]:
    """The entries of a machine (of all machines without a name), the oldest first; invalid lines are skipped.

    ``cluster`` selects the entries of one cluster. Raises GpunodesError for a file that cannot be read.
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
            "a readable file",
            "check its permissions",
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class MachineHistory:
    """The summary of a machine's history for the next repair."""

    repairs: tuple[float, ...] = ()
    """The start times of the repairs that ran an escalation step, since a user last cleared the machine."""
    needs_repair: str = ""
    """Why the machine was given up, "" when it was not."""
    not_repaired: str = ""
    """Why the machine was not repaired the last time, "" when there is a later action."""


def summaries(cluster: str) -> Mapping[str, MachineHistory]:
    """The summaries of all machines of a cluster that have a history."""
    found: dict[str, MachineHistory] = {}
    begun: dict[str, float] = {}
    counted: set[str] = set()
    for entry in read(cluster=cluster):
        if entry.kind is EntryKind.STATE:
            continue
        summary = found.get(entry.machine, MachineHistory())
        begun.setdefault(entry.repair, entry.time)
        if entry.kind is EntryKind.CLEARED:
            summary = MachineHistory()
        elif entry.kind is EntryKind.STEP and entry.outcome != "skipped" and entry.repair not in counted:
            counted.add(entry.repair)
            # The start of the repair, the same time as in the annotation of the node.
            summary = dataclasses.replace(summary, repairs=(*summary.repairs, begun.get(entry.repair, entry.time)))
        elif entry.kind is EntryKind.END:
            needs_repair = entry.detail if entry.outcome == "needs-repair" else ""
            summary = dataclasses.replace(summary, needs_repair=needs_repair)
        not_repaired = entry.detail if entry.kind is EntryKind.VERDICT and not entry.repair else ""
        found[entry.machine] = dataclasses.replace(summary, not_repaired=not_repaired)
    return found


def repairs(cluster: str) -> dict[str, int]:
    """How many repairs of a cluster's machines ended with each outcome."""
    return Counter(entry.outcome for entry in read(cluster=cluster) if entry.kind is EntryKind.END)


def reported_states(cluster: str) -> dict[str, str]:
    """The state of each machine of a cluster that the last notice about it reported."""
    return {entry.machine: entry.what for entry in read(cluster=cluster) if entry.kind is EntryKind.STATE}


def _add(descriptor: int, line: bytes) -> None:
    """Append a whole line, or nothing."""
    size = os.fstat(descriptor).st_size
    # A power loss may have left an incomplete line: it must not spoil the next one.
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        line = b"\n" + line
    try:
        while line:
            line = line[os.write(descriptor, line) :]
        os.fsync(descriptor)
    except OSError:
        # The disk is probably full, and a part of the line is written.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _parse(line: str) -> HistoryEntry | None:
    """The entry in a line; None for an invalid line, or one with values of the wrong types."""
    try:
        document: Any = json.loads(line)
        known = {each.name for each in dataclasses.fields(HistoryEntry)}
        values = {name: value for name, value in document.items() if name in known}
        values["kind"] = EntryKind(values["kind"])
        evidence = values.setdefault("evidence", [])
        entry = HistoryEntry(**{**values, "evidence": tuple(evidence)})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    texts = (entry.machine, entry.what, entry.outcome, entry.detail, entry.repair, entry.cluster, entry.by, *evidence)
    # In Python, True is an int; NaN fails the range check.
    numbers = (type(each) in (int, float) and 0 <= each < LATEST for each in (entry.time, entry.seconds))
    typed = isinstance(evidence, list) and all(isinstance(text, str) for text in texts) and all(numbers)
    return entry if typed else None
