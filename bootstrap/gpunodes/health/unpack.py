"""Decompression of gzip, bzip2, xz and zip's members, in pieces and in bounded memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, Protocol, TypeVar

PIECE = 256 << 10
"""Bytes per piece: small enough to stay in a processor's cache."""
MEMORY = 96 << 20
"""Memory limit of a decompressor in bytes: xz -9 takes 65 MiB."""
_FIRST = 8 << 10
_HEAD = 512
"""Bytes needed to recognise a file: a tar member's header is the longest."""

_Thing = TypeVar("_Thing")


class BrokenArchive(Exception):  # noqa: N818 - the name is a description
    """A compressed file or an archive cannot be unpacked."""


class Pieces:
    """An iterator of bytes with the interface of a file, as tarfile and the decompressors need it."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._buffer = b""
        self._next = 0
        """Where the next byte to read is in the buffer."""
        self.taken = 0
        """Bytes read so far."""

    def read(self, size: int) -> bytes:
        available = len(self._buffer) - self._next
        if available < size:
            parts = [self._buffer[self._next :]]
            while available < size and (piece := next(self._pieces, b"")):
                parts.append(piece)
                available += len(piece)
            self._buffer, self._next = b"".join(parts), 0
        read = self._buffer[self._next : self._next + size]
        self._next += len(read)
        self.taken += len(read)
        return read

    def unread(self, number: int) -> None:
        """Give back the last bytes of the last read."""
        self._next -= number
        self.taken -= number

    def head(self) -> bytes:
        """The first bytes, without consuming them."""
        head = self.read(_HEAD)
        self.unread(len(head))
        return head

    def all(self) -> Iterator[bytes]:
        """Everything, in pieces."""
        if rest := self._buffer[self._next :]:
            yield rest
        yield from self._pieces


def in_pieces(stream: BinaryIO) -> Iterator[bytes]:
    """The content of a stream."""
    return iter(lambda: stream.read(PIECE), b"")


def reading(things: Iterable[_Thing], error: type[Exception]) -> Iterator[_Thing]:
    """``things``, with errors during the iteration raised as BrokenArchive."""
    try:
        yield from things
    except (error, EOFError) as problem:
        raise BrokenArchive(str(problem)) from problem


class _Decompressor(Protocol):
    """The interface of zlib's decompressors."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes, most: int, /) -> bytes: ...


class _Keeping(Protocol):
    """The interface of the decompressors of lzma and bz2, which keep unconsumed input instead of returning it."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = ...) -> bytes: ...


class _AsZlib:
    """A decompressor of lzma or bz2 with the interface of zlib's."""

    unconsumed_tail = b""

    def __init__(self, unpacker: _Keeping) -> None:
        self._unpacker = unpacker

    @property
    def eof(self) -> bool:
        return self._unpacker.eof

    @property
    def unused_data(self) -> bytes:
        return self._unpacker.unused_data

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._unpacker.decompress(data, most)


def gzip(pieces: Pieces) -> Iterator[bytes]:
    """The content of a gzip file."""
    return reading(_streams(pieces, lambda: zlib.decompressobj(wbits=31), b"\x1f\x8b"), zlib.error)


def xz(pieces: Pieces) -> Iterator[bytes]:
    """The content of an xz file."""
    import lzma

    def make() -> _AsZlib:
        return _AsZlib(lzma.LZMADecompressor(memlimit=MEMORY))

    return reading(_streams(pieces, make, b"\xfd7zXZ\x00"), lzma.LZMAError)


def bzip2(pieces: Pieces) -> Iterator[bytes]:
    """The content of a bzip2 file."""
    import bz2

    return reading(_streams(pieces, lambda: _AsZlib(bz2.BZ2Decompressor()), b"BZh"), OSError)


def deflated(pieces: Pieces) -> Iterator[bytes]:
    """The content of one stream without a header, as zip has them; what follows it can be read next."""
    return reading(_stream(pieces, zlib.decompressobj(wbits=-15)), zlib.error)


def _streams(pieces: Pieces, make: Callable[[], _Decompressor], magic: bytes) -> Iterator[bytes]:
    """The content of several concatenated streams, each of which begins with ``magic``."""
    while True:
        yield from _stream(pieces, make())
        # After the end comes another stream, or padding, or the rest of a tape block.
        if not pieces.head().startswith(magic):
            return


def _stream(pieces: Pieces, unpacker: _Decompressor) -> Iterator[bytes]:
    """The content of one stream; of a truncated one, the part that exists."""
    # Small at first: an archive can have many small streams, and what follows a stream is read again.
    size = _FIRST
    data = pieces.read(size)
    while not unpacker.eof:
        plain = unpacker.decompress(data, PIECE)
        data = unpacker.unconsumed_tail
        if plain:
            yield plain
        if not data and not unpacker.eof and len(plain) < PIECE and not (data := pieces.read(size)):
            return
        size = min(2 * size, PIECE)
    pieces.unread(len(unpacker.unused_data))
