"""Turns saved files into streams of bytes: recognised by content, unpacked in memory, bounded.

Names inside an archive are never used as paths, and nothing is written. A compressed file can hold a log of any length:
it is read piece by piece. A file that unpacks to far more than its size is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, Protocol, TypeVar, cast

from gpunodes.errors import WrongInput

PIECE = 256 << 10
"""Bytes per piece: small enough to stay in a processor's cache."""
GROWTH = 250
"""The largest accepted growth. A repetitive text shrinks to a hundredth; larger growth is an attempt to fill memory."""
UNCHECKED_BYTES = 256 << 20
"""Unpacked bytes below which growth is not checked."""
MEMORY = 96 << 20
"""Memory limit of a decompressor in bytes: xz -9 takes 65 MiB."""
MEMBERS = 200_000
_HEAD = 512
"""Bytes needed to recognise a file: a tar member's header is the longest."""
DEPTH = 4
"""The most nested levels of archives and compressions."""

Unpack = Callable[[BinaryIO], Iterator[bytes]]
"""Unpacks a format that Python's standard library lacks; raises BrokenArchive."""

_Thing = TypeVar("_Thing")


class BrokenArchive(Exception):  # noqa: N818 - the name is a description
    """A compressed file or an archive cannot be unpacked."""


_WANTED = "a kernel log, a journal, nvidia-smi's output, or an archive of them"


class _Pieces:
    """An iterator of bytes with the interface of a file, as tarfile and the decompressors need it."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""
        self.taken = 0
        """Bytes read so far."""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (piece := next(self._pieces, b"")):
            self._rest += piece
        taken, self._rest = self._rest[:size], self._rest[size:]
        self.taken += len(taken)
        return taken

    def head(self) -> bytes:
        """The first bytes, without consuming them."""
        self._rest = self.read(_HEAD) + self._rest
        self.taken = 0
        return self._rest[:_HEAD]

    def all(self) -> Iterator[bytes]:
        """Everything, in pieces."""
        if self._rest:
            yield self._rest
        yield from self._pieces


def texts(stream: BinaryIO, name: str, unzstd: Unpack) -> Iterator[Iterator[bytes]]:
    """The texts of a file: one, or those of an archive's members, each in pieces; they must be read in order.

    Raises WrongInput for a file that is broken, would fill the memory, or has members outside its archive.
    """
    try:
        yield from _open(_Pieces(_in_pieces(stream)), name, unzstd, 0)
    except BrokenArchive as error:
        raise WrongInput(f"{name} cannot be unpacked: {error}", _WANTED, "save it again") from error


def _open(pieces: _Pieces, name: str, unzstd: Unpack, depth: int) -> Iterator[Iterator[bytes]]:
    if depth > DEPTH:
        raise WrongInput(f"{name} has more than {DEPTH} nested archives", _WANTED, "unpack it")
    head = pieces.head()
    plain: Iterator[bytes] | None = None
    if head.startswith(b"\x1f\x8b"):
        plain = _reading(_unpacked(pieces, lambda: zlib.decompressobj(wbits=31)), zlib.error)
    elif head.startswith(b"\xfd7zXZ\x00"):
        plain = _reading(_unpacked(pieces, _Xz), _lzma_error())
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        plain = unzstd(cast(BinaryIO, pieces))
    if plain is not None:
        yield from _open(_Pieces(_bounded(plain, pieces, name)), name, unzstd, depth + 1)
    elif head[257:262] == b"ustar":
        yield from _members(pieces, name, unzstd, depth)
    elif head.startswith((b"\xff\xfe", b"\xfe\xff")):
        import codecs

        yield (text.encode() for text in codecs.iterdecode(pieces.all(), "utf-16", "replace"))
    else:
        yield pieces.all()


def _members(pieces: _Pieces, name: str, unzstd: Unpack, depth: int) -> Iterator[Iterator[bytes]]:
    """The files of a tar archive. Links and devices are skipped; a sosreport has many."""
    import tarfile

    with tarfile.open(fileobj=cast(BinaryIO, pieces), mode="r|", bufsize=PIECE, errors="replace") as archive:
        for number, member in enumerate(_reading(archive, tarfile.TarError)):
            if member.name.startswith("/") or ".." in member.name.split("/"):
                raise WrongInput(f"{name} has a member whose path is outside the archive", _WANTED, "do not trust it")
            if number >= MEMBERS:
                raise WrongInput(f"{name} has more than {MEMBERS} members", _WANTED, "pass only the log")
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None:
                yield from _open(_Pieces(_in_pieces(cast(BinaryIO, content))), name, unzstd, depth + 1)
            # tarfile remembers every member; those of a large archive would fill the memory.
            archive.members.clear()  # type: ignore[attr-defined]  # not in typeshed, in every Python


def _reading(things: Iterable[_Thing], error: type[Exception]) -> Iterator[_Thing]:
    """``things``, with errors during the iteration raised as BrokenArchive."""
    try:
        yield from things
    except (error, EOFError) as problem:
        raise BrokenArchive(str(problem)) from problem


def _in_pieces(stream: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: stream.read(PIECE), b"")


class _Decompressor(Protocol):
    """The interface of zlib's decompressors."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes, most: int, /) -> bytes: ...


def _lzma_error() -> type[Exception]:
    import lzma

    return lzma.LZMAError


class _Xz:
    """lzma's decompressor with the interface of zlib's; it keeps unconsumed input instead of returning it."""

    unconsumed_tail = b""

    def __init__(self) -> None:
        import lzma

        self._unpacker = lzma.LZMADecompressor(memlimit=MEMORY)

    @property
    def eof(self) -> bool:
        return self._unpacker.eof

    @property
    def unused_data(self) -> bytes:
        return self._unpacker.unused_data

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._unpacker.decompress(data, most)


def _unpacked(pieces: _Pieces, make: Callable[[], _Decompressor]) -> Iterator[bytes]:
    """The unpacked content, also of several concatenated streams; of a truncated file, the part that exists."""
    data = pieces.read(PIECE)
    while data:
        unpacker = make()
        while not unpacker.eof:
            plain = unpacker.decompress(data, PIECE)
            data = unpacker.unconsumed_tail
            if plain:
                yield plain
            if not data and not unpacker.eof and len(plain) < PIECE and not (data := pieces.read(PIECE)):
                return
        # After the end comes another stream, or padding, or the rest of a tape block.
        data = unpacker.unused_data or pieces.read(PIECE)
        if not data.startswith((b"\x1f\x8b", b"\xfd7zXZ\x00")):
            return


def _bounded(plain: Iterator[bytes], packed: _Pieces, name: str) -> Iterator[bytes]:
    """``plain``; raises WrongInput if it grows to more than `GROWTH` times the packed size."""
    size = 0
    for piece in plain:
        size += len(piece)
        if size > UNCHECKED_BYTES and size > GROWTH * packed.taken:
            raise WrongInput(f"{name} unpacks to more than {GROWTH} times its size", _WANTED, "do not trust it")
        yield piece
