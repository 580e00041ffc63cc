"""Back the cluster up into one file: a snapshot of etcd, and what else a control plane cannot make again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpunodes import __version__, clusters, shape
from gpunodes.engine import encryption
from gpunodes.engine.remote import stream
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine
from gpunodes.operations.etcd import archive

SNAPSHOT_S = 1500.0
"""Seconds for making a snapshot and checking it, until its first byte arrives."""
_ANSWER = {"error": {"found": str, "wanted": str, "remedy": str}}
_PROGRESS_S = 2.0
_PARTIAL = ".gpunodes-backup-partial.tar."
"""What the names of files begin with that are being written."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A backup in a file."""

    path: Path
    machine: str
    size: int
    """Of the file, in bytes."""
    backup: archive.Backup


def run(inventory: Inventory, path: Path | None, recipient: str, progress: Callable[[str], None]) -> Saved:
    """Write a backup to ``path``, by default a file in the current folder named after cluster and time.

    The first control plane of this cluster that responds makes it. What killed backups left in that folder is deleted
    first. Raises WrongInput before any machine is contacted, and GpunodesError; then there is no file.
    """
    machines = inventory.control_planes()
    path = path or Path(default_name(inventory))
    encrypt = encryption.argv_for(recipient) if recipient else []
    _check_path(path)
    _delete_leftovers(path.parent, progress)
    problems: list[GpunodesError] = []
    for machine in machines:
        try:
            return _from(inventory, machine, path, encrypt, progress)
        except (stream.StreamLost, _NoBackup) as error:
            problems.append(error)
            progress(str(error))
    first = problems[0].problem
    raise GpunodesError(first.found, first.wanted or "a control plane that responds", first.remedy)


def default_name(inventory: Inventory, now: float | None = None) -> str:
    """``gpunodes-backup-CLUSTER-TIME.tar``, with the UTC time."""
    cluster = "".join(each if each.isalnum() or each in ".-" else "-" for each in Path(inventory.cluster).name)
    return f"gpunodes-backup-{cluster}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}.tar"


class _NoBackup(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """This machine cannot make a backup; another one may."""


def _from(
    inventory: Inventory, machine: Machine, path: Path, encrypt: list[str], progress: Callable[[str], None]
) -> Saved:
    variables = inventory.connection(machine.name)
    progress(f"{machine.name}: making a snapshot of etcd")
    with stream.over_ssh(machine.name, machine.address, variables, "etcd_backup", {}) as source:
        head = source.line(SNAPSHOT_S)
        _check_head(machine.name, head)
        _check_cluster(inventory, machine.name, head["about"]["ca_hash"])
        with _new_file(path) as file:
            backup = _received(machine.name, source, head, file, encrypt, progress)
            size = file.tell() if not encrypt else os.fstat(file.fileno()).st_size
    return Saved(path.absolute(), machine.name, size, backup)


def _check_head(name: str, head: dict[str, Any]) -> None:
    """Raise _NoBackup for a machine that reports an error, or something else than a backup."""
    if "error" in head:
        if shape.wrong(head, _ANSWER):
            raise _NoBackup(f"{name}: its report is invalid", "a report of its backup", "check that it is yours")
        error = head["error"]
        raise _NoBackup(f"{name}: {error['found']}", error["wanted"], error["remedy"])
    if found := archive.parts_problem(head.get("parts")) or shape.wrong(head.get("about"), archive.ABOUT, "about"):
        raise _NoBackup(f"{name}: {found}", "a report of its backup", "check that the machine is yours")


def _check_cluster(inventory: Inventory, name: str, ca: str) -> None:
    """Raise _NoBackup for a machine of another cluster among several control planes.

    Its backup would have the name of one of this cluster, and good ones would be deleted for it. A single control plane
    may have been created anew.
    """
    if len(inventory.control_planes()) == 1:
        return
    known = clusters.ca(inventory.cluster)
    if known and known != ca:
        raise _NoBackup(
            f"{name} belongs to another cluster",
            "a machine of the cluster that this inventory had before",
            "remove it from the group control_plane, or reset it; if the cluster was created anew, `gpunodes status` "
            "notes that",
        )
    if not known:
        clusters.remember_ca(inventory.cluster, ca)


def _received(
    name: str,
    source: stream.Stream,
    head: dict[str, Any],
    file: IO[bytes],
    encrypt: list[str],
    progress: Callable[[str], None],
) -> archive.Backup:
    """Write what the machine sends.

    Raises StreamLost unless every part has the SHA-256 that the machine computed, and _NoBackup for a snapshot that is
    not what etcd wrote.
    """
    with encryption.encrypting(encrypt, file) if encrypt else contextlib.nullcontext(file) as out:
        writer = archive.Writer(out)
        written = [
            writer.part(part["name"], part["size"], _counting(source, part, name, progress)) for part in head["parts"]
        ]
        computed = source.line().get("sha256")
        if computed != {part.name: part.sha256 for part in written}:
            raise source.lost("the data that arrived is not what the machine sent (SHA-256)")
        if not writer.intact:
            remedy = "run it again; check the disk and the memory of the control plane if that does not help"
            raise _NoBackup(f"{name}: {archive.NO_SUM}", "an undamaged snapshot", remedy)
        return writer.end(name, head["about"], __version__)


def _counting(
    source: stream.Stream, part: dict[str, Any], name: str, progress: Callable[[str], None]
) -> Callable[[int], bytes]:
    """Reads from the machine, and reports every few seconds how much of a snapshot has arrived."""
    done, last = 0, time.monotonic()

    def read(most: int) -> bytes:
        nonlocal done, last
        data = source.read(most)
        done += len(data)
        if part["name"] == archive.SNAPSHOT and time.monotonic() - last > _PROGRESS_S:
            last = time.monotonic()
            progress(f"{name}: {done >> 20} of {part['size'] >> 20} MiB")
        return data

    return read


def _check_path(path: Path) -> None:
    # Also a link that leads nowhere: the file would be made where it leads.
    if os.path.lexists(path):
        raise WrongInput(f"{path} exists", "a new file", "choose another --output")
    if not path.parent.is_dir():
        raise WrongInput(
            f"{path.parent} is not a folder", "an existing folder", "create it, or choose another --output"
        )


def _delete_leftovers(folder: Path, progress: Callable[[str], None]) -> None:
    """Delete the files of backups that were killed: they have the keys of the authorities. Others are locked."""
    for each in folder.glob(f"{_PARTIAL}*"):
        try:
            descriptor = os.open(each, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                each.unlink()
            finally:
                os.close(descriptor)
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError as error:
            progress(f"{each} cannot be deleted: {error.strerror}")
        else:
            progress(f"deleted {each}, which a backup that was killed has left")


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file of mode 0600 that gets its name when the block ends without an error; an existing file is not replaced."""
    descriptor, partial = _locked(path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)
        except FileExistsError:
            raise GpunodesError(f"{path} exists by now", "a new file", "choose another --output") from None
        except OSError:
            # A file system without hard links.
            _check_path(path)
            partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def _locked(folder: Path) -> tuple[int, Path]:
    """A new file of mode 0600 that other backups do not delete while it is open, here or in a program that encrypts."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_PARTIAL, dir=folder)
        # Where files cannot be locked, none can be deleted for want of a lock.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, Path(name)
        # Another backup has deleted it before it was locked.
        os.close(descriptor)
