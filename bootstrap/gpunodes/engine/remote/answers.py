"""The output of the probe: its frame, its limits, and the reason where it is missing."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpunodes.engine.remote.reach import LostError, Reach

if TYPE_CHECKING:
    import paramiko

PACKED_BYTES = 2 << 20
UNPACKED_BYTES = 8 << 20
ITEMS = 1_000_000
"""Maximum number of values in a document: many brackets fit into few bytes and use much memory when parsed."""
MAX_BANNER_BYTES = 64 << 10
"""Maximum size of a login shell's banner, which comes before the output of the probe."""
FRAME_MARK = b"gpunodes.probe/1 "


def parse_frame(data: bytes) -> tuple[int | None, bytes]:
    """The announced length of the document, and the data after it; None until the announcement is complete."""
    start = 0
    while (start := data.find(FRAME_MARK, start)) >= 0:
        end = data.find(b"\n", start)
        if end < 0:
            break
        length = data[start + len(FRAME_MARK) : end]
        if length.isdigit() and len(length) < len(str(1 << 63)):
            return int(length), data[end + 1 :]
        start = end
    return None, data


def unpacked(packed: bytes) -> Mapping[str, Any]:
    """The document; raises LostError unless it is a JSON object within the size limits."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, UNPACKED_BYTES)
        if not unpacker.eof:
            raise LostError(
                Reach.PROBE_FAILED, f"the probe's output unpacks to more than {UNPACKED_BYTES} bytes, or is incomplete"
            )
        if sum(data.count(character) for character in b"[{,") > ITEMS:
            raise LostError(Reach.PROBE_FAILED, f"the probe's output holds more than {ITEMS} values")
        document = json.loads(data)
    except (zlib.error, ValueError, RecursionError) as error:
        raise LostError(Reach.PROBE_FAILED, f"the probe's output cannot be parsed: {type(error).__name__}") from error
    if not isinstance(document, dict):
        raise LostError(Reach.PROBE_FAILED, "the probe's output is not a JSON object")
    return document


def failure_message(channel: paramiko.Channel, data: bytes, *, too_long: bool) -> str:
    """The reason for missing output of the probe: the last line that the machine printed."""
    if too_long:
        return f"the login shell printed more than {MAX_BANNER_BYTES} bytes before the output of the probe"
    stderr = channel.recv_stderr(4096) if channel.recv_stderr_ready() else b""
    lines = (stderr or data[-4096:]).decode("utf-8", "replace").strip().splitlines()
    status = channel.recv_exit_status() if channel.exit_status_ready() else -1
    return lines[-1] if lines else f"the probe printed no output; exit status {status}"
