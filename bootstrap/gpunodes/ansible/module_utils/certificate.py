"""The names in a server's certificate."""

from __future__ import annotations

import ipaddress

from .der import Invalid, elements, of_pem

# DER: tags, and an object identifier in its encoded form. Source: RFC 5280, 4.1 and 4.2.1.6.
_OID, _OCTETS, _EXTENSIONS = 0x06, 0x04, 0xA3
_DNS, _IP = 0x82, 0x87
_ALTERNATIVE_NAMES = bytes.fromhex("551d11")


def names(der: bytes) -> list[str]:
    """The DNS names and IP addresses for which a certificate is valid; empty if it is damaged."""
    try:
        ((_, certificate),) = elements(der)
        body = next(elements(certificate))[1]
        for tag, content in elements(body):
            if tag == _EXTENSIONS:
                return _names(content)
    except (ValueError, IndexError, StopIteration):
        return []
    return []


def names_of_pem(pem: str) -> list[str]:
    """The same for a certificate in PEM, the first one in the text."""
    try:
        return names(of_pem(pem))
    except Invalid:
        return []


def _names(extensions: bytes) -> list[str]:
    found = []
    for _, extension in elements(next(elements(extensions))[1]):
        parts = list(elements(extension))
        if parts[0] == (_OID, _ALTERNATIVE_NAMES) and parts[-1][0] == _OCTETS:
            for tag, content in elements(next(elements(parts[-1][1]))[1]):
                if tag == _DNS:
                    found.append(content.decode("ascii"))
                elif tag == _IP:
                    found.append(str(ipaddress.ip_address(content)))
    return found
