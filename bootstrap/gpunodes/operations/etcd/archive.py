"""The file of a backup: a tar with parts of known names, and at its end a manifest with their SHA-256.

It is written and read as a stream, so that it can pass a program that encrypts, and so that snapshots of any size take
little memory. A file that is read is hostile until its last byte: everything is checked before anything is used.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from gpunodes import shape
from gpunodes.ansible.module_utils import etcd_backup
from gpunodes.errors import WrongInput
from gpunodes.shape import Many, Moment, Named, Optional, Pattern

MANIFEST = "manifest.json"
SCHEMA = "gpunodes.etcd-backup/1"
SNAPSHOT = etcd_backup.SNAPSHOT
NAMES = (
    SNAPSHOT,
    *(f"pki/{name}" for name in etcd_backup.KEYS),
    *etcd_backup.CONFIGURATION,
    etcd_backup.KUBEADM,
)
"""The parts that a backup may have. Names in a file, or from a machine, are only compared with these."""
LARGEST = 32 << 30
"""Maximum size of a snapshot in bytes: etcd recommends databases of at most 8 GiB (etcd.io, System limits)."""
SMALL = 1 << 20
"""Maximum size of any other part, and of the manifest."""
_CHUNK = 1 << 20
_ETCD_SUM = 32
"""etcd ends a snapshot with the SHA-256 of what precedes it (etcd, server/etcdserver/api/snap/db)."""

_TEXT = Pattern("text of one line", r"[^\x00-\x1f\x7f]{0,500}")
_SHA256 = Pattern("SHA-256", r"[0-9a-f]{64}")
_PATH = Pattern("path", r"(/[A-Za-z0-9._-]+)+")
_PART_NAME = shape.one_of(*NAMES)
ABOUT = {
    "ca_hash": Pattern("pin of a CA (sha256:...)", r"sha256:[0-9a-f]{64}"),
    "endpoint": Pattern("host:port", r"[A-Za-z0-9.:\[\]-]{1,300}"),
    "hostname": _TEXT,
    "time": Moment(),
    "kubernetes": Pattern("version", r"[A-Za-z0-9._-]{0,100}"),
    "paths": Named(_PATH, 10, _PART_NAME),
    "etcd": {
        "version": Pattern("version", r"[0-9][A-Za-z0-9.+-]{0,50}"),
        "revision": int,
        "hash": int,
        "keys": int,
        "db_size": int,
        "members": Many({"id": Pattern("id of a member", r"[0-9a-f]{1,16}"), "name": _TEXT, "learner": bool}, 100),
    },
}
"""What a machine reports about its backup."""
_MANIFEST = {
    "schema": shape.one_of(SCHEMA),
    "gpunodes": _TEXT,
    "machine": _TEXT,
    "about": ABOUT,
    "parts": Many({"name": _PART_NAME, "size": int, "sha256": _SHA256}, len(NAMES)),
    "note": Optional(_TEXT),
}


NO_SUM = "its snapshot does not end with the checksum that etcd gave it"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a backup; ``size`` in bytes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup whose file was checked completely."""

    machine: str
    about: Mapping[str, Any]
    parts: Sequence[Part]

    @property
    def snapshot(self) -> Part:
        return next(part for part in self.parts if part.name == SNAPSHOT)


def parts_problem(parts: object) -> str:
    """What is wrong with a machine's list of parts, "" if it is correct."""
    if found := shape.wrong(parts, Many({"name": _PART_NAME, "size": int}, len(NAMES))):
        return found
    assert isinstance(parts, list)  # noqa: S101 - for the type checker
    names = [part["name"] for part in parts]
    if len(set(names)) != len(names) or SNAPSHOT not in names:
        return "its parts are not those of a backup"
    return next((found for part in parts if (found := _size_problem(part["name"], part["size"]))), "")


def _size_problem(name: str, size: int) -> str:
    limit = LARGEST if name == SNAPSHOT else SMALL
    return "" if 0 < size <= limit else f"{name} has {size} bytes; wanted: 1 to {limit}"


class Writer:
    """Writes the file of a backup to a stream."""

    def __init__(self, out: IO[bytes]) -> None:
        self._tar = tarfile.open(fileobj=cast("IO[bytes]", _Out(out)), mode="w|", format=tarfile.GNU_FORMAT)  # noqa: SIM115 - closed by ``end``
        self._parts: list[Part] = []
        self.intact = True
        """Whether the snapshot ends with the checksum that etcd gave it."""

    def part(self, name: str, size: int, read: Callable[[int], bytes]) -> Part:
        """Write one part of ``size`` bytes, which ``read`` returns in pieces of at most so many bytes."""
        source = _Reader(size, read)
        self._tar.addfile(_header(name, size), source)
        self.intact = self.intact and (name != SNAPSHOT or source.digest.ends_with_sum())
        self._parts.append(Part(name, size, source.digest.whole.hexdigest()))
        return self._parts[-1]

    def end(self, machine: str, about: Mapping[str, Any], version: str) -> Backup:
        """Write the manifest; the file is complete then."""
        manifest = {
            "schema": SCHEMA,
            "gpunodes": version,
            "machine": machine,
            "about": about,
            "parts": [{"name": part.name, "size": part.size, "sha256": part.sha256} for part in self._parts],
        }
        text = json.dumps(manifest, indent=1).encode() + b"\n"
        self._tar.addfile(_header(MANIFEST, len(text)), io.BytesIO(text))
        self._tar.close()
        return Backup(machine, about, tuple(self._parts))


class _Out:
    """A stream for tarfile, which writes its buffer when it is deleted: after a failure the stream is closed then."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    def write(self, data: bytes) -> int:
        return len(data) if self._out.closed else self._out.write(data)


def _header(name: str, size: int) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.mode = size, 0o600
    return made


class _Reader(io.RawIOBase):
    """A file of a known size for tarfile, which hashes what is read."""

    def __init__(self, size: int, read: Callable[[int], bytes]) -> None:
        self._left, self._next = size, read
        self.digest = _Digest()

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = bytearray()
        while len(data) < wanted:
            data += self._next(wanted - len(data))
        self._left -= wanted
        piece = bytes(data)
        self.digest.update(piece)
        return piece


def check(source: IO[bytes], name: str, on_snapshot: Callable[[bytes], None] = lambda _: None) -> Backup:
    """Read the whole file of a backup; raises WrongInput, with its ``name``, unless every byte of it is as it must be.

    ``on_snapshot`` gets the snapshot in pieces. They are not checked yet: a caller that uses them calls this twice.
    """
    seen: dict[str, Part] = {}
    manifest = b""
    own_sum = True
    try:
        with tarfile.open(fileobj=source, mode="r|", errorlevel=2) as tar:
            for member in tar:
                if manifest:
                    raise _wrong(name, "something follows its manifest")
                _check_member(name, member, seen)
                data = tar.extractfile(member)
                assert data  # noqa: S101 - for the type checker: it is a regular file
                if member.name == MANIFEST:
                    manifest = data.read()
                    continue
                digest, tail = _Digest(), on_snapshot if member.name == SNAPSHOT else lambda _: None
                while piece := data.read(_CHUNK):
                    digest.update(piece)
                    tail(piece)
                seen[member.name] = Part(member.name, member.size, digest.whole.hexdigest())
                own_sum = own_sum and (member.name != SNAPSHOT or digest.ends_with_sum())
        # What follows the end of the tar would be in no hash.
        while piece := source.read(_CHUNK):
            if piece.strip(b"\0"):
                raise _wrong(name, "something follows its end")
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise _wrong(name, f"it cannot be read ({error})") from error
    if not own_sum:
        raise _wrong(name, NO_SUM)
    return _compared(name, manifest, seen)


def _check_member(name: str, member: tarfile.TarInfo, seen: Mapping[str, Part]) -> None:
    # Not only isreg: a sparse file is one, and its size is not that of its data.
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse or member.pax_headers:
        raise _wrong(name, f"{member.name!r} is not a plain file")
    if member.name in seen or member.name not in (*NAMES, MANIFEST):
        raise _wrong(name, f"it has {member.name!r}{' twice' if member.name in seen else ''}")
    if found := _size_problem(member.name, member.size):
        raise _wrong(name, found)


class _Digest:
    """The SHA-256 of data, and of all but its last 32 bytes."""

    def __init__(self) -> None:
        self.whole, self._inner, self._tail = hashlib.sha256(), hashlib.sha256(), b""

    def update(self, data: bytes) -> None:
        self.whole.update(data)
        held = self._tail + data
        self._inner.update(held[:-_ETCD_SUM])
        self._tail = held[-_ETCD_SUM:]

    def ends_with_sum(self) -> bool:
        return self._inner.digest() == self._tail


def _compared(name: str, text: bytes, seen: Mapping[str, Part]) -> Backup:
    try:
        manifest = json.loads(text or b"null")
    except (ValueError, RecursionError):
        manifest = None
    if found := shape.wrong(manifest, _MANIFEST):
        raise _wrong(name, f"its manifest is missing or invalid ({found.removeprefix('its answer is invalid: ')})")
    listed = {part["name"]: Part(**part) for part in manifest["parts"]}
    if len(listed) != len(manifest["parts"]) or set(listed) != set(seen) or SNAPSHOT not in listed:
        raise _wrong(name, "its manifest lists other parts than it has")
    if wrong := [part for part in seen if listed[part] != seen[part]]:
        raise _wrong(name, f"{wrong[0]} is not what the manifest says")
    return Backup(manifest["machine"], manifest["about"], tuple(seen.values()))


def _wrong(name: str, found: str) -> WrongInput:
    return WrongInput(
        f"{name} is not a usable backup: {found}", "a complete file of `gpunodes etcd backup`", "use another"
    )
