"""Reads DER and PEM, as far as certificates need it. Machines' Python has no parser for X.509.

The reader takes what RFC 5280 and X.690 allow in a certificate and nothing else: definite lengths in their shortest
form, and elements that end where their parent ends.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")


class Invalid(ValueError):  # noqa: N818 - reads as the sentence it makes
    """Data that is no certificate."""


def of_pem(text: str) -> bytes:
    """The first certificate of a PEM text, in DER; raises Invalid."""
    found = _PEM.search(text)
    if not found:
        raise Invalid("it contains no certificate")
    try:
        return base64.b64decode("".join(found.group(1).split()), validate=True)
    except binascii.Error as error:
        raise Invalid("its certificate is not in base64") from error


def elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements that ``data`` consists of: tag and content; raises Invalid."""
    position = 0
    while position < len(data):
        tag, rest = data[position], data[position + 1 :]
        if tag & 0x1F == 0x1F or not rest:  # noqa: PLR2004 - tags of several bytes are not used in certificates
            raise Invalid("its certificate is not DER")
        length, width = rest[0], 0
        if length & 0x80:
            width = length & 0x7F
            digits = rest[1 : 1 + width]
            if not 1 <= width <= 3 or len(digits) != width:  # noqa: PLR2004 - three bytes are enough for any certificate
                raise Invalid("its certificate is not DER")
            length = int.from_bytes(digits, "big")
            if length < 0x80 or not digits[0]:  # noqa: PLR2004 - DER: the shortest form
                raise Invalid("its certificate is not DER")
        content = rest[1 + width : 1 + width + length]
        if len(content) != length:
            raise Invalid("its certificate is cut off")
        yield tag, content
        position += 2 + width + length
