"""What a finding shows of a machine's data: lines as evidence, and PCI addresses in Linux's notation."""

from __future__ import annotations

from gpunodes.model import printable

EVIDENCE_LINES = 3
EVIDENCE_CHARACTERS = 400


def clean(line: bytes) -> str:
    """A line as evidence: bounded, and without control characters for a terminal."""
    text = line[: 4 * EVIDENCE_CHARACTERS].decode("utf-8", "replace")
    return printable(text).strip()[:EVIDENCE_CHARACTERS]


def address(text: bytes) -> str:
    """A PCI address in Linux's notation, ``0000:3b:00.0``, from any notation that drivers use."""
    slot_address, _, function = text.decode().lower().partition(".")
    parts = slot_address.split(":")
    domain, bus, slot = (int(part, 16) for part in ["0", *parts][-3:])
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function or 0}"
