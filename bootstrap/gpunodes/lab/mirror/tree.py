"""Files as data, and tar archives of them that come out the same every time."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

MTIME = 1767225600
"""Seconds since the epoch that every file of the mirror carries (2026-01-01), so that equal inputs give equal bytes."""


@dataclass(frozen=True)
class Entry:
    """One file of an archive, owned by root.

    ``path`` is absolute. ``content`` is a regular file's bytes, or the file they are read from; ``link`` is a symbolic
    link's target; with neither it is a directory.
    """

    path: str
    content: bytes | Path | None = None
    mode: int = 0o644
    link: str | None = None


def write_tar(stream: IO[bytes], entries: Iterable[Entry], prefix: str = "") -> None:
    """Write ``entries`` and the directories above them as a tar archive; ``prefix`` is "./" in Debian packages."""
    known: set[str] = set()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for entry in entries:
            for parent in reversed(PurePosixPath(entry.path).parents):
                _directory(tar, prefix, str(parent), 0o755, known)
            if entry.link is not None:
                info = _info(prefix, entry.path, 0o777)
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
                tar.addfile(info)
            elif entry.content is None:
                _directory(tar, prefix, entry.path, entry.mode, known)
            else:
                _file(tar, _info(prefix, entry.path, entry.mode), entry.content)
            known.add(entry.path)


def _file(tar: tarfile.TarFile, info: tarfile.TarInfo, content: bytes | Path) -> None:
    if isinstance(content, bytes):
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    else:
        info.size = content.stat().st_size
        with content.open("rb") as stream:
            tar.addfile(info, stream)


def _directory(tar: tarfile.TarFile, prefix: str, path: str, mode: int, known: set[str]) -> None:
    if path in known or (path == "/" and not prefix):
        return
    known.add(path)
    info = _info(prefix, path, mode)
    info.type = tarfile.DIRTYPE
    tar.addfile(info)


def _info(prefix: str, path: str, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(prefix + path.lstrip("/"))
    info.mode, info.mtime, info.uname, info.gname = mode, MTIME, "root", "root"
    return info
