"""Turns saved files into streams of bytes: recognised by content, unpacked in memory, bounded.

Names inside an archive are never used as paths, and nothing is written. A compressed file can hold a log of any length:
it is read piece by piece. A file that unpacks to far more than its size is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from gpunodes.errors import WrongInput
from gpunodes.health import journal_formats, unpack, zip_archive
from gpunodes.health.unpack import PIECE, BrokenArchive, Pieces, in_pieces

GROWTH = 250
"""The largest accepted growth. A repetitive text shrinks to a hundredth; larger growth is an attempt to fill memory."""
UNCHECKED_BYTES = 256 << 20
"""Unpacked bytes below which growth is not checked."""
MEMBERS = 200_000
DEPTH = 4
"""The most nested levels of archives and compressions."""

Unpack = Callable[[BinaryIO], Iterator[bytes]]
"""Unpacks a format that Python's standard library lacks; raises BrokenArchive."""

_WANTED = "a kernel log, a journal, nvidia-smi's output, or an archive of them"


def texts(stream: BinaryIO, name: str, unzstd: Unpack) -> Iterator[Iterator[bytes]]:
    """The texts of a file: one, or those of an archive's members, each in pieces; they must be read in order.

    Raises WrongInput for a file that is broken, would fill the memory, or has members outside its archive.
    """
    try:
        yield from _open(Pieces(in_pieces(stream)), name, unzstd, 0)
    except BrokenArchive as error:
        raise WrongInput(f"{name} cannot be unpacked: {error}", _WANTED, "save it again") from error


def _open(pieces: Pieces, name: str, unzstd: Unpack, depth: int) -> Iterator[Iterator[bytes]]:
    if depth > DEPTH:
        raise WrongInput(f"{name} has more than {DEPTH} nested archives", _WANTED, "unpack it")
    head = pieces.head()
    plain = _decompressed(pieces, head, unzstd)
    if plain is not None:
        yield from _open(Pieces(_Bound(pieces, name)(plain)), name, unzstd, depth + 1)
    elif head[257:262] == b"ustar":
        yield from _tar(pieces, name, unzstd, depth)
    elif head.startswith(zip_archive.MAGIC):
        yield from _zip(pieces, name, unzstd, depth)
    elif head.startswith((b"\xff\xfe", b"\xfe\xff")):
        import codecs

        yield (text.encode() for text in codecs.iterdecode(pieces.all(), "utf-16", "replace"))
    else:
        yield journal_formats.as_json(head, pieces.all())


def _decompressed(pieces: Pieces, head: bytes, unzstd: Unpack) -> Iterator[bytes] | None:
    """The content of a compressed file, None for other files."""
    if head.startswith(b"\x1f\x8b"):
        return unpack.gzip(pieces)
    if head.startswith(b"\xfd7zXZ\x00"):
        return unpack.xz(pieces)
    if head.startswith(b"BZh") and head[4:10] in _BZIP2_BLOCKS:
        return unpack.bzip2(pieces)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return unzstd(cast(BinaryIO, pieces))
    return None


# The number pi before a block, that of its square root at the end of an empty file.
_BZIP2_BLOCKS = (b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90")


def _tar(pieces: Pieces, name: str, unzstd: Unpack, depth: int) -> Iterator[Iterator[bytes]]:
    """The files of a tar archive. Links and devices are skipped; a sosreport has many."""
    import tarfile

    with tarfile.open(fileobj=cast(BinaryIO, pieces), mode="r|", bufsize=PIECE, errors="replace") as archive:
        for number, member in enumerate(unpack.reading(archive, tarfile.TarError)):
            _check_member(name, member.name, number)
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None:
                yield from _open(Pieces(in_pieces(cast(BinaryIO, content))), name, unzstd, depth + 1)
            # tarfile remembers every member; those of a large archive would fill the memory.
            archive.members.clear()  # type: ignore[attr-defined]  # not in typeshed, in every Python


def _zip(pieces: Pieces, name: str, unzstd: Unpack, depth: int) -> Iterator[Iterator[bytes]]:
    """The files of a zip archive."""
    bound = _Bound(pieces, name)
    for number, (member, content) in enumerate(zip_archive.members(pieces)):
        _check_member(name, member, number)
        plain = bound(content)
        yield from _open(Pieces(plain), name, unzstd, depth + 1)
        for _ in plain:
            pass  # the next member follows what its reader left


def _check_member(name: str, member: str, number: int) -> None:
    """Refuse an archive with a member outside of itself, or with too many members."""
    parts = member.replace("\\", "/").split("/")
    if not parts[0] or ".." in parts:
        raise WrongInput(f"{name} has a member whose path is outside the archive", _WANTED, "do not trust it")
    if number >= MEMBERS:
        raise WrongInput(f"{name} has more than {MEMBERS} members", _WANTED, "pass only the log")


class _Bound:
    """Passes on unpacked content; raises WrongInput if all of it is more than `GROWTH` times the packed size."""

    def __init__(self, packed: Pieces, name: str) -> None:
        self._packed = packed
        self._name = name
        self._size = 0

    def __call__(self, plain: Iterator[bytes]) -> Iterator[bytes]:
        for piece in plain:
            self._size += len(piece)
            if self._size > UNCHECKED_BYTES and self._size > GROWTH * self._packed.taken:
                found = f"{self._name} unpacks to more than {GROWTH} times its size"
                raise WrongInput(found, _WANTED, "do not trust it")
            yield piece
