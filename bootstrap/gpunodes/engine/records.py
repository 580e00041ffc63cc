"""The records of unfinished repairs, one small file each, written to disk before the step that they describe begins."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from gpunodes.errors import GpunodesError
from gpunodes.repair.record import RepairRecord, parse
from gpunodes.settings import state_home


def write(record: RepairRecord) -> None:
    """Write the record to disk in one step (0600); it survives a power loss after this returns."""
    target = _path(record.machine, record.cluster)
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


def remove(record: RepairRecord) -> None:
    """Delete the record of a repair that has ended."""
    _path(record.machine, record.cluster).unlink(missing_ok=True)


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
                f"another command on the controller repairs {machine}", "one at a time", "wait for it to end"
            ) from error
        yield
    finally:
        os.close(descriptor)


def read(cluster: str) -> dict[str, RepairRecord]:
    """The unfinished repairs of a cluster, by machine."""
    found = {}
    for path in sorted(_folder().glob("*.json")):
        try:
            record = parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # not a record of gpunodes: those are written in one step
        if record.cluster == cluster:
            found[record.machine] = record
    return found


def _folder() -> Path:
    folder = state_home() / "repairs"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _path(machine: str, cluster: str) -> Path:
    return _folder() / f"{machine}-{hashlib.sha256(cluster.encode()).hexdigest()[:8]}.json"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
