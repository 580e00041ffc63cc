"""Reads and writes files. Writes are atomic: after a power cut a file has either the old or the new content."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile


def read(path: str) -> str | None:
    """The content of a text file, or None if it does not exist."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def write(path: str, content: str, mode: int, uid: int = 0, gid: int = 0) -> None:
    """Write ``content`` atomically: to a temporary file in the same folder, flushed to the disk, then renamed."""
    folder = os.path.dirname(path)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{os.path.basename(path)}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            os.fchmod(file.fileno(), mode)
            if os.geteuid() == 0:
                os.fchown(file.fileno(), uid, gid)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    _sync_folder(folder)


def copy(path: str, folder: str) -> None:
    """Copy a file into ``folder``; there it has its name only when it is whole, and on the disk."""
    name = os.path.basename(path)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    try:
        with os.fdopen(descriptor, "wb") as made, open(path, "rb") as source:
            os.fchmod(made.fileno(), 0o644)
            shutil.copyfileobj(source, made)
            made.flush()
            os.fsync(made.fileno())
        os.replace(temporary, f"{folder}/{name}")
    except BaseException:
        remove(temporary)
        raise
    _sync_folder(folder)


def flush(path: str) -> None:
    """Flush a file that another program wrote to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _sync_folder(folder: str) -> None:
    """Flush a rename in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
