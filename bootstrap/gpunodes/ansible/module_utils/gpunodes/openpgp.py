"""OpenPGP key files, without gpg: a minimal machine may not have it.

A file may hold several keys, and whoever reads it later (apt, rpm) trusts them all. ``only`` gives the one that is
wanted, written anew from its packets: what another reader might see in the original, and this one does not, is gone.

Subkeys come along unverified, and somebody on the way could add one: gpgv, sqv and rpm (4.14.3-19 and 4.16.1.3-9 of
the RHEL family and newer, CVE-2021-3521) use none that its primary key has not signed.

Source: RFC 4880 and RFC 9580, sections 4.2 (packets), 6 (armour) and 12.2 / 5.5.4 (fingerprints).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator

_SIGNATURE, _PUBLIC_KEY, _USER_ID, _PUBLIC_SUBKEY, _PICTURE = 2, 6, 13, 14, 17
_OLD_FORMAT_INDETERMINATE = 3
_BEGIN, _END = "-----BEGIN PGP PUBLIC KEY BLOCK-----", "-----END PGP PUBLIC KEY BLOCK-----"


def fingerprints(key: str) -> list[str]:
    """The fingerprints, in capitals, of the primary keys in an armoured key file; none when it is no such file."""
    return [name for tag, body in _read(key) if tag == _PUBLIC_KEY and (name := _fingerprint(body))]


def only(key: str, fingerprint: str) -> str:
    """The armoured key of this fingerprint out of a key file, with its user ids, signatures and subkeys; "" for none.

    One without a user id that is followed by a signature is none: it has the fingerprint, and nobody can use it. The
    text depends on nothing else in the file: the same key gives the same text.
    """
    kept: list[tuple[int, bytes]] = []
    wanted = plain(fingerprint)
    inside = picture = False
    for tag, body in _read(key):
        # The signatures of a user's picture are left out with it.
        picture = tag == _PICTURE or (picture and tag == _SIGNATURE)
        if tag == _PUBLIC_KEY and not kept:
            inside = bool(wanted) and _fingerprint(body) == wanted
        elif tag not in {_USER_ID, _SIGNATURE, _PUBLIC_SUBKEY, _PICTURE}:
            inside = False  # here begins something else
        if inside and not picture:
            kept.append((tag, body))
    tags = [tag for tag, _ in kept]
    whole = (_USER_ID, _SIGNATURE) in zip(tags, tags[1:])
    return _armour(b"".join(_written(tag, body) for tag, body in kept)) if whole else ""


def plain(fingerprint: str) -> str:
    """A fingerprint as people write it (blanks, small letters) in the form that ``fingerprints`` gives."""
    return "".join(fingerprint.split()).upper()


def _fingerprint(body: bytes) -> str:
    """That of a public key; "" for a version that has none of these."""
    if body[:1] == b"\4":
        return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
    if body[:1] in {b"\5", b"\6"}:
        lead = b"\x9a" if body[:1] == b"\5" else b"\x9b"
        return hashlib.sha256(lead + len(body).to_bytes(4, "big") + body).hexdigest().upper()
    return ""


def _read(key: str) -> list[tuple[int, bytes]]:
    """The packets of an armoured file; none where any of it cannot be read."""
    try:
        return list(_packets(_dearmour(key)))
    except (ValueError, IndexError, OverflowError, binascii.Error):
        return []


def _dearmour(text: str) -> bytes:
    data = b""
    inside = False
    body: list[str] = []
    for line in text.splitlines():
        if line.startswith(_BEGIN.rstrip("-")):
            inside, body = True, []
        elif line.startswith(_END.rstrip("-")) and inside:
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
            raise ValueError("no packet")
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
        if position + size > len(data):
            raise ValueError("a packet is cut")
        yield tag, data[position : position + size]
        position += size


def _new_length(data: bytes, position: int) -> tuple[int, int]:
    """Length and width of a new-format length at ``position`` (RFC 4880, 4.2.2; keys have no partial bodies)."""
    first = data[position]
    if first < 192:  # noqa: PLR2004 - the standard's own bounds
        return first, 1
    if first < 224:  # noqa: PLR2004 - as above
        return ((first - 192) << 8) + data[position + 1] + 192, 2
    if first < 255:  # noqa: PLR2004 - as above
        raise ValueError("a partial body")
    return int.from_bytes(data[position + 1 : position + 5], "big"), 5


def _written(tag: int, body: bytes) -> bytes:
    """A packet as gpg writes it: in the old format, with the shortest length that it can have."""
    kind = next(kind for kind in (0, 1, 2) if len(body) < 1 << (8 << kind))
    return bytes([0x80 | tag << 2 | kind]) + len(body).to_bytes(1 << kind, "big") + body


def _armour(data: bytes) -> str:
    text = base64.b64encode(data).decode("ascii")
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    # Old versions of rpm want the checksum.
    checksum = base64.b64encode(_crc24(data).to_bytes(3, "big")).decode("ascii")
    return "\n".join([_BEGIN, "", *lines, f"={checksum}", _END, ""])


def _crc24(data: bytes) -> int:
    """RFC 4880, 6.1."""
    crc = 0xB704CE
    for each in data:
        crc ^= each << 16
        for _ in range(8):
            crc <<= 1
            if crc & 0x1000000:
                crc ^= 0x1864CFB
    return crc
