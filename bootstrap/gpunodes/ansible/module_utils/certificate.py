"""The names in a server's certificate. The machines' Python has no library for certificates."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Iterator

# DER: tags, and an object identifier in its encoded form. Source: RFC 5280, 4.1 and 4.2.1.6.
_SEQUENCE, _OID, _OCTETS, _EXTENSIONS = 0x30, 0x06, 0x04, 0xA3
_DNS, _IP = 0x82, 0x87
_ALTERNATIVE_NAMES = bytes.fromhex("551d11")
_LONG_FORM = 0x80


def names(der: bytes) -> list[str]:
    """The DNS names and IP addresses for which a certificate is valid; empty if it is damaged."""
    try:
        ((_, certificate),) = _elements(der)
        body = next(_elements(certificate))[1]
        for tag, content in _elements(body):
            if tag == _EXTENSIONS:
                return _names(content)
    except (ValueError, IndexError, StopIteration):
        return []
    return []


def names_of_pem(pem: str) -> list[str]:
    """The same for a certificate in PEM, the first one in the text."""
    found = re.search(r"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", pem, re.DOTALL)
    try:
        return names(base64.b64decode(found.group(1))) if found else []
    except binascii.Error:
        return []


def _names(extensions: bytes) -> list[str]:
    found = []
    for _, extension in _elements(next(_elements(extensions))[1]):
        parts = list(_elements(extension))
        if parts[0] == (_OID, _ALTERNATIVE_NAMES) and parts[-1][0] == _OCTETS:
            for tag, content in _elements(next(_elements(parts[-1][1]))[1]):
                if tag == _DNS:
                    found.append(content.decode("ascii"))
                elif tag == _IP:
                    found.append(str(ipaddress.ip_address(content)))
    return found


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The tags and contents of consecutive DER elements; raises ValueError if one ends too early."""
    position = 0
    while position < len(data):
        tag, length, position = data[position], data[position + 1], position + 2
        if length & _LONG_FORM:
            width = length & ~_LONG_FORM
            length, position = int.from_bytes(data[position : position + width], "big"), position + width
        if position + length > len(data):
            raise ValueError("an element ends behind its data")
        yield tag, data[position : position + length]
        position += length
