"""Counts the kernel's lines of a text, and finds a sign of NVIDIA's driver in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from gpunodes.health import journal, patterns
from gpunodes.health.find import holds
from gpunodes.health.line_match import text_before
from gpunodes.health.patterns import Writer, writer_of

_TRIES = 32
"""Lines per block that are checked for a sign of the driver."""
_SYSLOG = b"kernel: "
_JSON = tuple(b'"_TRANSPORT"' + colon + b'"kernel"' for colon in (b":", b": ", b" : "))
_JSON_DRIVER = re.compile(rb'"MESSAGE"\s*:\s*"(?:NVRM: |nvidia)')


class LineCount:
    """What the blocks of a text, given one after another, contain."""

    def __init__(self, lines: Sequence[bytes], *, is_json: bool, is_log: bool) -> None:
        """``lines`` are the first ones of the text."""
        self.kernel_lines = 0
        self.has_driver = False
        self._is_json, self._is_log = is_json, is_log
        self.names_writers = False
        """It is a log whose lines name their writers, as in a syslog."""
        self._markers: tuple[bytes, ...] = (b"\n",)
        if is_json:
            self._markers = _JSON
        elif any(patterns.names_writer(line) for line in lines):
            self._markers = (_SYSLOG,)
            self.names_writers = is_log

    def add(self, window: bytes, begin: int, end: int, *, has_nvrm: bool) -> None:
        """Count the lines from ``begin`` to before ``end``; ``has_nvrm``: one of them contains ``NVRM: ``."""
        if self._is_log:
            self.kernel_lines += sum(window.count(marker, begin, end + len(marker) - 1) for marker in self._markers)
        else:
            self.kernel_lines += sum(1 for _ in patterns.KERNEL_LINE.finditer(window, begin, end))
        if not self.has_driver and (has_nvrm or holds(window[begin:end], b"nvidia")):
            self.has_driver = self._driver_in(window, begin, end)

    def finish(self, window: bytes) -> None:
        """Count the last line, if no line break follows it."""
        if self._is_log and self._markers == (b"\n",) and window and not window.endswith(b"\n"):
            self.kernel_lines += 1

    def _driver_in(self, window: bytes, begin: int, end: int) -> bool:
        block = window[begin:end]
        if self._is_json:
            found = islice(_JSON_DRIVER.finditer(block), _TRIES)
            return any(journal.entry_of(_line_at(block, each.start())) is not None for each in found)
        if patterns.DRIVER_MODULE.search(block):
            return True
        found = islice(patterns.DRIVER_MESSAGE.finditer(window, begin, end), _TRIES)
        return any(writer_of(text_before(window, each.start())) is Writer.KERNEL for each in found)


def _line_at(block: bytes, position: int) -> bytes:
    begin, end = block.rfind(b"\n", 0, position) + 1, block.find(b"\n", position)
    return block[begin : end if end >= 0 else len(block)]
