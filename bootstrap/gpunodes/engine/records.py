"""The records of unfinished work on machines, one small file each, written to disk before each step.

Repairs and roll-outs have a folder each. A machine is locked for both at once: commands of one user never repair
a machine and roll something out to it at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from gpunodes.errors import GpunodesError
from gpunodes.repair.record import RepairRecord, parse
from gpunodes.settings import state_home

REPAIRS = "repairs"
ROLLOUTS = "rollouts"


class Record(Protocol):
    """The state of the work on one machine."""

    @property
    def machine(self) -> str: ...
    @property
    def cluster(self) -> str: ...
    def text(self) -> str:
        """The record as one line of JSON."""


_Record = TypeVar("_Record", bound=Record)


def write(record: Record, kind: str = REPAIRS) -> None:
    """Write the record to disk in one step (0600); it survives a power loss after this returns."""
    target = _path(record.machine, record.cluster, kind)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(record.text().encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def remove(record: Record, kind: str = REPAIRS) -> None:
    """Delete the record of work that has ended."""
    _path(record.machine, record.cluster, kind).unlink(missing_ok=True)


@contextlib.contextmanager
def claimed(machine: str, cluster: str) -> Iterator[None]:
    """Lock a machine against other commands of this user while inside; raises GpunodesError when it is locked."""
    path = _path(machine, cluster).with_suffix(".lock")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise GpunodesError(
                f"another command on the controller works on {machine}", "one at a time", "wait for it to end"
            ) from error
        yield
    finally:
        os.close(descriptor)


def read(cluster: str) -> dict[str, RepairRecord]:
    """The unfinished repairs of a cluster, by machine."""
    return read_kind(cluster, REPAIRS, parse)


def read_kind(cluster: str, kind: str, parsed: Callable[[str], _Record]) -> dict[str, _Record]:
    """The unfinished work of a kind in a cluster, by machine; ``parsed`` may raise ValueError."""
    return {record.machine: record for record in _all(kind, parsed) if record.cluster == cluster}


def repairs() -> set[str]:
    """The ids of the unfinished repairs of all clusters."""
    return {record.id for record in _all(REPAIRS, parse)}


def _all(kind: str, parsed: Callable[[str], _Record]) -> Iterator[_Record]:
    for path in sorted(_folder(kind).glob("*.json")):
        try:
            yield parsed(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # not a record of gpunodes: those are written in one step


def _folder(kind: str = REPAIRS) -> Path:
    folder = state_home() / kind
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _path(machine: str, cluster: str, kind: str = REPAIRS) -> Path:
    # `rollout abandon` names a node that no machine of the inventory has, and a control plane may call it ../../x.
    name = machine.replace("/", "%2F")
    return _folder(kind) / f"{name}-{hashlib.sha256(cluster.encode()).hexdigest()[:8]}.json"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
