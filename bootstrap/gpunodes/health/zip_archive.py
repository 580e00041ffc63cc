"""The members of a zip archive, read from its beginning to its end, so also from a pipe or from another archive.

Each member's own header precedes it; the directory at the end of the archive is not read. So no part of the archive can
be unpacked twice, as in bombs whose members overlap.
Source of the format: PKWARE, APPNOTE.TXT, 4.3 (general format) and 4.5.3 (zip64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from gpunodes.health import unpack
from gpunodes.health.unpack import PIECE, BrokenArchive, Pieces

MAGIC = b"PK\x03\x04"
_HEADER = struct.Struct("<4s5H3L2H")
_ENCRYPTED, _SIZES_FOLLOW = 1 << 0, 1 << 3
_STORED, _DEFLATED = 0, 8
_ZIP64 = 0xFFFFFFFF
_NEXT = (MAGIC, b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x08")
_DESCRIPTOR = b"PK\x07\x08"


def members(pieces: Pieces) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The name and the content of each file and folder; a content must be read to its end before the next member.

    Raises BrokenArchive for members that are encrypted or not compressed with deflate. Of a truncated archive, the part
    that exists is read.
    """
    while len(header := pieces.read(_HEADER.size)) == _HEADER.size and header.startswith(MAGIC):
        _, _, flags, method, _, _, _, packed, size, name_bytes, extra_bytes = _HEADER.unpack(header)
        name = pieces.read(name_bytes).decode("utf-8", "replace")
        extra = pieces.read(extra_bytes)
        if flags & _ENCRYPTED:
            raise BrokenArchive("it is encrypted")
        if method == _DEFLATED:
            content = unpack.deflated(pieces)
        elif method == _STORED and not (flags & _SIZES_FOLLOW and not packed):
            content = _stored(pieces, _zip64_size(extra) if size == _ZIP64 else size)
        else:
            raise BrokenArchive("it is not compressed with deflate")
        yield name, content
        if flags & _SIZES_FOLLOW:
            _skip_descriptor(pieces)


def _stored(pieces: Pieces, size: int) -> Iterator[bytes]:
    while size > 0 and (piece := pieces.read(min(size, PIECE))):
        size -= len(piece)
        yield piece


def _zip64_size(extra: bytes) -> int:
    """The size in a header's extra fields; each has a kind and a length of two bytes, zip64 is kind 1."""
    while len(extra) >= 4:  # noqa: PLR2004 - kind and length
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1 and length >= 8 and len(extra) >= 12:  # noqa: PLR2004 - 8 bytes after kind and length
            return int(struct.unpack_from("<Q", extra, 4)[0])
        extra = extra[4 + length :]
    raise BrokenArchive("the size of a member is missing")


def _skip_descriptor(pieces: Pieces) -> None:
    """Read the checksum and the sizes after a member: with or without a signature, of 4 bytes or of 8 (zip64)."""
    data = pieces.read(28)
    lengths = (16, 24) if data.startswith(_DESCRIPTOR) else (12, 20)
    for length in lengths:
        if data[length : length + 4] in _NEXT:
            pieces.unread(len(data) - length)
            return
    if len(data) > max(lengths):
        raise BrokenArchive("a member is followed by something else than its sizes")
