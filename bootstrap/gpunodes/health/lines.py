"""Parses the lines of a log that concern an NVIDIA GPU: `ANCHORS` are the markers by which they are found."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpunodes.health import catalog, patterns
from gpunodes.health.evidence import clean
from gpunodes.health.line_match import Anchor, LineMatch, match_at, rest_of_line, text_before
from gpunodes.health.model import LineKind
from gpunodes.health.stuck import STUCK_ANCHORS


def nvrm(window: bytes, position: int) -> Iterator[LineMatch]:
    """A line of the driver: an Xid, or one of the messages about the start of the driver and of GPUs."""
    found = patterns.XID.match(window, position, position + _MESSAGE)
    if found:
        code = int(found[2])
        yield LineMatch(
            LineKind.XID,
            rest_of_line(window, position),
            found[1],
            code,
            _xid_detail(window, found, code),
            found[3] or b"",
        )
        return
    for kind, pattern in _NVRM_KINDS:
        found = pattern.match(window, position, position + _MESSAGE)
        if found:
            gpu = found[1] if pattern.groups == 1 and found[1] else b""
            detail = _mismatch_detail(found) if kind is LineKind.MISMATCH else ""
            if kind is LineKind.INIT_FAILED and patterns.NO_INTERRUPT.search(found[0]):
                detail = OVERCOME
            yield LineMatch(kind, rest_of_line(window, position), gpu, detail=detail)
            return
    found = patterns.NOT_PROBED.match(window, position, position + _MESSAGE)
    if found:
        none = patterns.NONE_PROBED.search(window, found.end(), found.end() + 2048)
        yield LineMatch(LineKind.NOT_PROBED, rest_of_line(window, position), detail="all" if none else "some")
        return
    found = patterns.OFF_BUS.match(window, position + len(b"NVRM: "), position + _MESSAGE)
    if found:
        yield LineMatch(LineKind.OFF_BUS, rest_of_line(window, position), found[1] or found[2])


_NVRM_KINDS = (
    (LineKind.MISMATCH, patterns.MISMATCH),
    (LineKind.INIT_CAUSE, patterns.INIT_CAUSE),
    (LineKind.INIT_FAILED, patterns.INIT_FAILED),
    (LineKind.GSP_TIMEOUT, patterns.GSP_TIMEOUT),
    (LineKind.RESET_REQUIRED, patterns.RESET_REQUIRED),
)
_MESSAGE = 1024
"""The most bytes of a message of the driver that are read, with the blanks of a wrapped one."""


def _xid_detail(window: bytes, found: re.Match[bytes], code: int) -> str:
    """The data that decides about an Xid in addition to its code: the number of 154, the registers of NVLink 5."""
    if code == catalog.RECOVERY_CHANGED:
        number = patterns.RECOVERY.match(window, found.end(), found.end() + _MESSAGE)
        return str(int(number[1], 16)) if number else ""
    if code in catalog.NVLINK5:
        registers = patterns.REGISTERS.match(window, found.end())
        fatal = "fatal" if patterns.FATAL.match(window, found.end()) else ""
        return f"{registers[1].decode()} {registers[2].decode()} {fatal}" if registers else fatal
    return ""


def _mismatch_detail(found: re.Match[bytes]) -> str:
    """The client, its version and the module's version."""
    return " ".join((part or b"-").decode("ascii", "replace").replace(" ", "_") for part in found.groups())


OVERCOME = "the driver may continue without it"
"""The detail of a start-up failure that some drivers overcome: they use other interrupts, or no firmware."""
SMI_OUTPUT = "nvidia-smi output"
DATA = "data"
"""The detail of a line that continues the report of an SXid, and so has no severity."""


def _sxid(window: bytes, position: int) -> Iterator[LineMatch]:
    found = match_at(patterns.SXID, window, position)
    if found:
        severity = (found[3] or b"").decode().lower()
        if found[4]:
            # The driver's numbers: 0 non-fatal, 1 fatal.
            severity = "fatal" if found[4] == b"1" else "non-fatal"
        elif found[5]:
            severity = DATA
        begin = found.start()
        yield LineMatch(
            LineKind.SXID,
            rest_of_line(window, begin),
            found[1],
            int(found[2]),
            severity,
            header=text_before(window, begin),
        )


def _aer(window: bytes, position: int) -> Iterator[LineMatch]:
    found = match_at(patterns.AER, window, position)
    if not found:
        return
    driver, device, severity, fatal = found.groups()
    header = text_before(window, found.start())
    text = rest_of_line(window, found.start())
    detail = "corrected" if severity == b"Corrected" else "fatal" if fatal == b"Fatal" else "non-fatal"
    unhandled = patterns.AER_UNHANDLED.search(window, found.end(), found.end() + 4096) if detail == "fatal" else None
    if driver != b"nvidia" and unhandled:
        device, driver = unhandled[1], b"nvidia"
    yield LineMatch(LineKind.AER if driver == b"nvidia" else None, text, device, detail=detail, header=header)


def _contained(window: bytes, position: int) -> Iterator[LineMatch]:
    """A port that cut off the devices below it: a fatal error of a GPU if its driver could not recover."""
    found = match_at(patterns.CONTAINED, window, position)
    if found:
        lost = patterns.AER_UNHANDLED.search(window, found.end(), found.end() + 4096)
        header, text = text_before(window, found.start()), rest_of_line(window, found.start())
        kind = LineKind.AER if lost else None
        yield LineMatch(kind, text, lost[1] if lost else b"", detail="fatal", header=header)


def _firmware(window: bytes, position: int) -> Iterator[LineMatch]:
    found = match_at(patterns.FIRMWARE, window, position)
    if found:
        header, text = text_before(window, found.start()), rest_of_line(window, found.start())
        yield LineMatch(LineKind.INIT_CAUSE, text, found[1], detail=OVERCOME, header=header)


def _nvswitch_error(window: bytes, position: int) -> Iterator[LineMatch]:
    """An SXid in the words of Fabric Manager."""
    found = match_at(patterns.NVSWITCH_ERROR, window, position)
    header = text_before(window, found.start()) if found else b""
    if found and patterns.FABRIC_MANAGER_HEADER.fullmatch(header):
        text = rest_of_line(window, found.start())
        severity, code, gpu = found[1].decode(), int(found[2]), found[3] or b""
        yield LineMatch(LineKind.SXID, text, gpu, code, severity, header=header, program="Fabric Manager log")


def _uvm(window: bytes, position: int) -> Iterator[LineMatch]:
    found = match_at(patterns.UVM_FATAL, window, position)
    if found:
        yield LineMatch(
            LineKind.UVM_FATAL, rest_of_line(window, found.start()), header=text_before(window, found.start())
        )


def _off_bus(window: bytes, position: int) -> Iterator[LineMatch]:
    found = match_at(patterns.OFF_BUS, window, position)
    if found and not text_before(window, found.start()).rstrip().endswith(b"NVRM:"):
        text = rest_of_line(window, found.start())
        yield LineMatch(LineKind.OFF_BUS, text, found[1] or found[2], header=text_before(window, found.start()))


def _gpu_found(window: bytes, position: int) -> Iterator[LineMatch]:
    found = match_at(patterns.GPU_FOUND, window, position)
    if found:
        header, text = text_before(window, found.start()), rest_of_line(window, found.start())
        yield LineMatch(LineKind.GPU_FOUND, text, found[1], header=header)


def _smi_listed(window: bytes, position: int) -> Iterator[LineMatch]:
    line = text_before(window, position) + rest_of_line(window, position)
    found = patterns.SMI_LISTED.match(line)
    if found:
        yield LineMatch(LineKind.GPU_LISTED, line, code=int(found[1]), header=b"", program=SMI_OUTPUT)


def _smi_message(window: bytes, position: int) -> Iterator[LineMatch]:
    found = match_at(patterns.SMI_MESSAGE, window, position)
    if found and not text_before(window, found.start()).strip():
        # The beginning identifies the message; the text after the GPU comes from the driver.
        message = found["message"] or b"device handle: " + found["problem"]
        detail = clean(b" ".join(message.split()))
        yield LineMatch(
            LineKind.SMI_MESSAGE,
            rest_of_line(window, found.start()),
            found["gpu"] or b"",
            detail=detail,
            program=SMI_OUTPUT,
        )


def _smi_value(window: bytes, position: int) -> Iterator[LineMatch]:
    found = patterns.SMI_VALUE.match(window, position)
    if found:
        line = text_before(window, position) + rest_of_line(window, position)
        yield LineMatch(LineKind.SMI_MESSAGE, line, detail=found[1].decode(), program=SMI_OUTPUT)


def _query_row(window: bytes, position: int) -> Iterator[LineMatch]:
    """A row of nvidia-smi's query with values that it could not read."""
    before = text_before(window, position)
    line = before + rest_of_line(window, position)
    if b"," in line:
        # Only few texts have such rows.
        from gpunodes.health import smi_table

        begin = position - len(before)
        earlier = window[max(0, begin - 4096) : begin].decode("utf-8", "replace").splitlines()
        unread = smi_table.unread_of_query(line.decode("utf-8", "replace"), earlier)
        if unread:
            detail = f"cannot read: {unread}"
            yield LineMatch(LineKind.SMI_MESSAGE, line, detail=detail, header=b"", program=SMI_OUTPUT)


ANCHORS = (
    Anchor(b"NVRM: ", nvrm),
    Anchor(b"SXid (", _sxid),
    Anchor(b"detected NVSwitch ", _nvswitch_error),
    *STUCK_ANCHORS,
    Anchor(b"[10de:", _gpu_found),
    Anchor(b"PCIe Bus Error:", _aer, reads_on=True),
    Anchor(b"DPC: containment event", _contained, reads_on=True),
    Anchor(b"EDR: EDR event received", _contained, reads_on=True),
    Anchor(b"firmware load for nvidia/", _firmware),
    Anchor(b"failed to load nvidia/", _firmware),
    Anchor(b"global fatal error", _uvm),
)
# In a log, these would be a program's message about another time, or a quotation.
TEXT_ANCHORS = (
    Anchor(b"fallen off the bus", _off_bus),
    Anchor(b"Failed to initialize NVML", _smi_message),
    Anchor(b"NVIDIA-SMI has failed", _smi_message),
    Anchor(b"NVIDIA-SMI couldn't", _smi_message),
    Anchor(b"Unable to determine the device", _smi_message),
    Anchor(b"No devices were found", _smi_message),
    Anchor(b"(UUID: GPU-", _smi_listed),
    Anchor(b"GPU is lost", _smi_value),
    Anchor(b"GPU requires reset", _smi_value),
    Anchor(b"ERR!", _smi_value),
    Anchor(b"[Unknown Error]", _query_row),
)
