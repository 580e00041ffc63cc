"""Compares the identifiers that machines, nodes and BMCs report; placeholders of vendors count as unknown."""

from __future__ import annotations

import re
from collections.abc import Sequence

# UUIDs of boards whose vendor did not set one: AMI's default in both byte orders, a sample of the SMBIOS documents, and
# those that osquery lists (osquery/core/system.cpp, kPlaceholderHardwareUUIDList).
_PLACEHOLDERS = frozenset(
    {
        "03000200040005000006000700080009",
        "00020003000400050006000700080009",
        "030201000504070608090a0b0c0d0e0f",
        "10000000000080000040000000000000",
        "12345678123456781234567812345678",
        "123456781234567890abcddeefaabbcc",
    }
)
_NO_SERIALS = frozenset(
    {
        "0123456789",
        "123456789",
        "1234567890",
        "default string",
        "none",
        "not applicable",
        "not available",
        "not present",
        "not specified",
        "null",
        "o.e.m.",
        "system serial number",
        "to be filled by o.e.m.",
        "unknown",
        "n/a",
    }
)


def same_uuid(one: str, other: str) -> bool | None:
    """Whether two UUIDs are the same, in any byte order; None where one is unknown or a placeholder.

    SMBIOS stores the first three fields little-endian, and vendors differ in whether they display them so (SMBIOS 2.6,
    7.2.1); IPMI sends all bytes in reverse (IPMI 2.0, 20.8).
    """
    first, second = uuid(one), uuid(other)
    if not first or not second:
        return None
    return first in byte_orders(second)


def same_machine_id(one: str, other: str) -> bool | None:
    """Whether both are equal (machine-id(5)); None where one is unknown: empty, "uninitialized" or a repeated digit."""
    first, second = (text.strip().lower().replace("-", "") for text in (one, other))
    if any(not text or text == "uninitialized" or len(set(text)) == 1 for text in (first, second)):
        return None
    return first == second


def same_serial(one: str, other: str) -> bool | None:
    """Whether two serial numbers are equal; None where one is unknown or a placeholder."""
    first, second = serial(one), serial(other)
    return first == second if first and second else None


def uuid(text: str) -> str:
    """32 hexadecimal digits; "" for a text that is not a UUID, and for a placeholder."""
    digits = text.strip().lower().replace("-", "")
    if not re.fullmatch(r"[0-9a-f]{32}", digits) or digits == digits[:2] * 16 or digits in _PLACEHOLDERS:
        return ""
    return digits


def byte_orders(digits: str) -> set[str]:
    """A UUID's digits in each byte order in which it may be displayed; empty for ""."""
    reverse = bytes.fromhex(digits)[::-1].hex()
    return {digits, _swapped(digits), reverse, _swapped(reverse)} if digits else set()


def _swapped(digits: str) -> str:
    """A UUID with its first three fields in the other byte order."""
    data = bytes.fromhex(digits)
    return (data[3::-1] + data[5:3:-1] + data[7:5:-1] + data[8:]).hex()


def serial(text: str) -> str:
    """A serial number in lower case; "" for a placeholder."""
    value = text.strip().lower()
    return "" if value in _NO_SERIALS or len(set(value)) < 2 else value  # noqa: PLR2004 - one repeated character


def macs(addresses: Sequence[str]) -> set[str]:
    """MAC addresses that are unique to one interface: not all zeros, and not locally administered."""
    found = set()
    for address in addresses:
        digits = re.sub(r"[^0-9a-f]", "", address.lower())
        # The second bit of the first byte: locally administered (IEEE 802).
        if len(digits) == 12 and len(set(digits)) > 1 and not int(digits[:2], 16) & 2:  # noqa: PLR2004 - 48 bits
            found.add(":".join(digits[index : index + 2] for index in range(0, 12, 2)))
    return found


def is_address(name: str) -> bool:
    """Whether a name is an IP address."""
    return bool(re.fullmatch(r"[0-9.]+|[0-9a-f:]*:[0-9a-f:.]*", name))
