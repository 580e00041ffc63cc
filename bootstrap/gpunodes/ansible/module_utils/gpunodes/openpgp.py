"""Fingerprints of OpenPGP keys, without gpg: a minimal machine may not have it.

Source: RFC 4880, sections 4.2 (packets), 6.2 (armour) and 12.2 (fingerprints).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator

_PUBLIC_KEY = 6
_OLD_FORMAT_INDETERMINATE = 3
_V4 = 4


def fingerprints(key: str) -> list[str]:
    """The fingerprints, in capitals, of the primary keys in an armoured key file; none when it is no such file."""
    try:
        data = _dearmour(key)
    except (ValueError, binascii.Error):
        return []
    return [
        hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
        for tag, body in _packets(data)
        if tag == _PUBLIC_KEY and body[:1] == bytes([_V4])
    ]


def plain(fingerprint: str) -> str:
    """A fingerprint as people write it (blanks, small letters) in the form that ``fingerprints`` gives."""
    return "".join(fingerprint.split()).upper()


def _dearmour(text: str) -> bytes:
    data = b""
    inside = False
    body: list[str] = []
    for line in text.splitlines():
        if line.startswith("-----BEGIN PGP PUBLIC KEY BLOCK"):
            inside, body = True, []
        elif line.startswith("-----END PGP PUBLIC KEY BLOCK") and inside:
            # Headers end at the first empty line; the checksum line begins with "=".
            start = body.index("") + 1 if "" in body else 0
            data += base64.b64decode("".join(line for line in body[start:] if not line.startswith("=")), validate=True)
            inside = False
        elif inside:
            body.append(line.strip())
    return data


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        header = data[position]
        position += 1
        if not header & 0x80:
            return
        if header & 0x40:
            tag = header & 0x3F
            size, width = _new_length(data, position)
        else:
            tag = (header >> 2) & 0x0F
            kind = header & 0x03
            if kind == _OLD_FORMAT_INDETERMINATE:
                size, width = len(data) - position, 0
            else:
                width = 1 << kind
                size = int.from_bytes(data[position : position + width], "big")
        position += width
        yield tag, data[position : position + size]
        position += size


def _new_length(data: bytes, position: int) -> tuple[int, int]:
    """Length and width of a new-format length at ``position`` (RFC 4880, 4.2.2; no partial bodies in keys)."""
    first = data[position]
    if first < 192:  # noqa: PLR2004 - the standard's own bounds
        return first, 1
    if first < 224:  # noqa: PLR2004 - as above
        return ((first - 192) << 8) + data[position + 1] + 192, 2
    return int.from_bytes(data[position + 1 : position + 5], "big"), 5
