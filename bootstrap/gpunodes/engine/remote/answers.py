"""The output of programs on a machine: after the mark, which comes after the banner of the login shell.

The probe's output is its length in a line, then the compressed document.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from gpunodes.ansible.module_utils.sent import MARK
from gpunodes.engine.remote.reach import LostError, Reach

if TYPE_CHECKING:
    import paramiko

PACKED_BYTES = 2 << 20
UNPACKED_BYTES = 8 << 20
ITEMS = 1_000_000
"""Maximum number of values in a document: many brackets fit into few bytes and use much memory when parsed."""
MAX_BANNER_BYTES = 64 << 10
"""Maximum size of a login shell's banner, which comes before the output of a program."""
TOO_LONG = f"the login shell printed more than {MAX_BANNER_BYTES} bytes before the output of the program"
_LENGTH_DIGITS = 18
_MARK_LINE = f"{MARK}\n"


def unframed(out: bytes | bytearray) -> bytes | None:
    """The output of a program, without the banner of the login shell; None until the program has started."""
    _, mark, output = bytes(out).partition(f"\n{_MARK_LINE}".encode())
    return output if mark else None


def skip_banner(out: IO[str]) -> None:
    """Read up to the output of a program, or to the end; raises LostError for a banner that is too long."""
    left = MAX_BANNER_BYTES
    # The limit is for a line, too: a machine may print without a line break.
    while (line := out.readline(left + len(_MARK_LINE))) and line != _MARK_LINE:
        left -= len(line)
        if left < 0:
            raise LostError(Reach.PROBE_FAILED, TOO_LONG)


def length(output: bytes) -> tuple[int | None, bytes]:
    """The length of the document in the probe's output, and the data after it; None until the line is complete.

    Raises LostError for another output.
    """
    line, end, data = output.partition(b"\n")
    if not end and len(line) <= _LENGTH_DIGITS:
        return None, output
    if not line.isdigit() or len(line) > _LENGTH_DIGITS:
        raise LostError(Reach.PROBE_FAILED, "the probe's output has no length")
    return int(line), data


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
        return TOO_LONG
    stderr = channel.recv_stderr(4096) if channel.recv_stderr_ready() else b""
    lines = (stderr or data[-4096:]).decode("utf-8", "replace").strip().splitlines()
    status = channel.recv_exit_status() if channel.exit_status_ready() else -1
    return lines[-1] if lines else f"the probe printed no output; exit status {status}"
