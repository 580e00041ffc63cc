"""Reads OpenPGP key files without gpg: a minimal machine may not have it.

A file may contain several keys, and apt and rpm trust all of them. ``only`` returns the requested key, rebuilt from its
packets: data that this parser ignores and another parser might read is removed.

Subkeys are kept without verification, and an attacker on the network could add one: gpgv, sqv and rpm (4.14.3-19 and
4.16.1.3-9 of the RHEL family and newer, CVE-2021-3521) use only subkeys that the primary key has signed.

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
    """The fingerprints, in upper case, of the primary keys in an armoured key file; empty for an invalid file."""
    return [found for tag, body in _read(key) if tag == _PUBLIC_KEY and (found := _fingerprint(body))]


def only(key: str, fingerprint: str) -> str:
    """The armoured key with this fingerprint from a key file, with its user ids, signatures and subkeys; "" if missing.

    A key without a user id followed by a signature counts as missing: no program can use it. The same key always gives
    the same text, whatever else is in the file.
    """
    packets: list[tuple[int, bytes]] = []
    requested = plain(fingerprint)
    inside = picture = False
    for tag, body in _read(key):
        # A user's picture is removed together with its signatures.
        picture = tag == _PICTURE or (picture and tag == _SIGNATURE)
        if tag == _PUBLIC_KEY and not packets:
            inside = bool(requested) and _fingerprint(body) == requested
        elif tag not in {_USER_ID, _SIGNATURE, _PUBLIC_SUBKEY, _PICTURE}:
            inside = False  # another key or another kind of data begins
        if inside and not picture:
            packets.append((tag, body))
    tags = [tag for tag, _ in packets]
    is_usable = (_USER_ID, _SIGNATURE) in zip(tags, tags[1:])
    return _armour(b"".join(_encoded(tag, body) for tag, body in packets)) if is_usable else ""


def plain(fingerprint: str) -> str:
    """A fingerprint with blanks or in lower case in the format that ``fingerprints`` returns."""
    return "".join(fingerprint.split()).upper()


def _fingerprint(body: bytes) -> str:
    """The fingerprint of a public key; "" for an unknown key version."""
    if body[:1] == b"\4":
        return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
    if body[:1] in {b"\5", b"\6"}:
        prefix = b"\x9a" if body[:1] == b"\5" else b"\x9b"
        return hashlib.sha256(prefix + len(body).to_bytes(4, "big") + body).hexdigest().upper()
    return ""


def _read(key: str) -> list[tuple[int, bytes]]:
    """The packets of an armoured file; empty if any of them is invalid."""
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
            raise ValueError("not an OpenPGP packet")
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
            raise ValueError("a packet is truncated")
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
        raise ValueError("a partial body length")
    return int.from_bytes(data[position + 1 : position + 5], "big"), 5


def _encoded(tag: int, body: bytes) -> bytes:
    """A packet in the encoding of gpg: the old format, with the shortest possible length field."""
    kind = next(kind for kind in (0, 1, 2) if len(body) < 1 << (8 << kind))
    return bytes([0x80 | tag << 2 | kind]) + len(body).to_bytes(1 << kind, "big") + body


def _armour(data: bytes) -> str:
    text = base64.b64encode(data).decode("ascii")
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    # Old versions of rpm require the checksum.
    checksum = base64.b64encode(_crc24(data).to_bytes(3, "big")).decode("ascii")
    return "\n".join([_BEGIN, "", *lines, f"={checksum}", _END, ""])


def _crc24(data: bytes) -> int:
    """The armour checksum (RFC 4880, 6.1)."""
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _ in range(8):
            crc <<= 1
            if crc & 0x1000000:
                crc ^= 0x1864CFB
    return crc
