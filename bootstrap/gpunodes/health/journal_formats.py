"""A journal's formats with fields (``journalctl -o export``, ``json-pretty``, ``verbose``), made into ``-o json``.

They are read from beginning to end, and not searched: a program can log a message that contains the lines of an entry.
Source: journalctl(1), systemd.journal-fields(7), systemd.io/JOURNAL_EXPORT_FORMATS; systemd, src/shared/logs-show.c.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

from gpunodes.health.journal import LINE_BYTES, is_fabric_manager
from gpunodes.health.unpack import PIECE

_VERBOSE = re.compile(rb"(?:-- [^\n]*\n)?[A-Z][a-z]{2} \d{4}-\d\d-\d\d [^\n\[]{0,40} \[s=[0-9a-f]+;i=")
_PRETTY = re.compile(rb'\s*\{[ \t\r]*\n\s+"')
_FIELDS = {
    name.encode(): name
    for name in (
        "MESSAGE",
        "SYSLOG_FACILITY",
        "SYSLOG_IDENTIFIER",
        "_BOOT_ID",
        "_SYSTEMD_UNIT",
        "_TRANSPORT",
        "_UID",
        "__MONOTONIC_TIMESTAMP",
        "__REALTIME_TIMESTAMP",
    )
}
"""The fields that `journal` needs."""
_INDENT = b"    "
"""Before each field of ``verbose``; the further lines of a field have more blanks."""

Fields = dict[str, str]


def as_json(head: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """A text that begins with ``head``, in pieces; a journal with fields in the format of ``journalctl -o json``."""
    if _PRETTY.match(head):
        return _joined(pieces)
    if _VERBOSE.match(head):
        return _lines(_verbose(_file(pieces)))
    if head.startswith(b"__CURSOR="):
        return _lines(_exported(_file(pieces)))
    return pieces


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Entries of ``json-pretty``, each as one line: no string of JSON contains a line break."""
    rest = b""
    for piece in pieces:
        lines, newline, rest = (rest + piece).rpartition(b"\n")
        yield _without_breaks(lines)
        rest = newline + rest
        if len(rest) > LINE_BYTES:
            yield rest
            rest = b""
    yield _without_breaks(rest) + b"\n"


def _without_breaks(entries: bytes) -> bytes:
    return re.sub(rb"\r?\n(?:[ \t]+|(?=\}))", b" ", re.sub(rb"\{\r?\n[ \t]*", b"{", entries))


def _lines(entries: Iterable[Fields]) -> Iterator[bytes]:
    """The entries of the kernel and of Fabric Manager as lines of JSON, many in a piece."""
    import json

    size, lines = 0, []
    for fields in entries:
        if fields.get("_TRANSPORT") == "kernel" or is_fabric_manager(fields):
            lines.append(json.dumps(fields))
            size += len(lines[-1])
        if size > PIECE:
            yield ("\n".join(lines) + "\n").encode()
            size, lines = 0, []
    yield ("\n".join(lines) + "\n").encode()


def _exported(file: io.BufferedReader) -> Iterator[Fields]:
    """Entries of ``export``: lines ``NAME=VALUE``, or name, length in eight bytes, value; then an empty line."""
    fields: Fields = {}
    while line := file.readline(LINE_BYTES):
        name, equals, value = line.rstrip(b"\n").partition(b"=")
        if line == b"\n":
            yield fields
            fields = {}
            continue
        if not equals:
            value = _binary(file)
        elif not line.endswith(b"\n"):
            _skip_line(file)
        if name in _FIELDS:
            fields[_FIELDS[name]] = value.decode("utf-8", "replace")
    yield fields


def _binary(file: io.BufferedReader) -> bytes:
    """The value of a binary field, as much of it as is read of a message; and the line break after it."""
    length = int.from_bytes(file.read(8), "little")
    value = file.read(min(length, LINE_BYTES))
    left = length - len(value) + 1
    while left > 0 and (skipped := file.read(min(left, PIECE))):
        left -= len(skipped)
    return value


def _verbose(file: io.BufferedReader) -> Iterator[Fields]:
    """Entries of ``verbose``: a line with the time and the cursor, then a line ``    NAME=VALUE`` for each field."""
    fields: Fields = {}
    while line := file.readline(LINE_BYTES):
        if not line.endswith(b"\n"):
            _skip_line(file)
        if line[:1] > b" ":
            yield fields
            fields = _cursor(line)
        elif line.startswith(_INDENT):
            name, _, value = line[len(_INDENT) :].rstrip(b"\r\n").partition(b"=")
            if name in _FIELDS:
                fields[_FIELDS[name]] = value.decode("utf-8", "replace")
    yield fields


def _cursor(line: bytes) -> Fields:
    """The fields in an entry's cursor: the boot, and the times as hexadecimal numbers of microseconds."""
    found = re.search(rb";b=([0-9a-f]{32});m=([0-9a-f]{1,13});t=([0-9a-f]{1,13});", line)
    if found is None:
        return {}
    return {
        "_BOOT_ID": found[1].decode(),
        "__MONOTONIC_TIMESTAMP": str(int(found[2], 16)),
        "__REALTIME_TIMESTAMP": str(int(found[3], 16)),
    }


def _skip_line(file: io.BufferedReader) -> None:
    """Read the rest of a line."""
    while (rest := file.readline(PIECE)) and not rest.endswith(b"\n"):
        pass


class _Raw(io.RawIOBase):
    """Pieces of bytes as an unbuffered file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer)
        while not self._rest and (piece := next(self._pieces, None)) is not None:
            self._rest = piece
        taken, self._rest = self._rest[: len(target)], self._rest[len(target) :]
        target[: len(taken)] = taken
        return len(taken)


def _file(pieces: Iterator[bytes]) -> io.BufferedReader:
    return io.BufferedReader(_Raw(pieces), PIECE)
