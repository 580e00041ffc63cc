"""A window of a log as the kernel wrote it: the order of its entries, without those of programs between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from gpunodes.health import patterns

IsKernels = Callable[[bytes], bool | None]
"""Whether the kernel can have written an entry; None if the entry does not tell."""


class Written:
    """The entries of a window that the kernel can have written, the oldest first, so that reports are read in one way.

    An entry's further lines, which have no time, stay after its first one. So do indented lines that do not tell their
    writer, whatever they begin with: journalctl indents the further lines of a message.
    """

    def __init__(self, window: bytes, is_kernels: IsKernels | None, *, newest_first: bool) -> None:
        """``is_kernels`` is None if all entries are wanted."""
        window = window if window.endswith(b"\n") else window + b"\n"
        self._starts = [0, *(found.start() + 1 for found in patterns.ENTRY.finditer(window))]
        entries, is_kept = [], True
        for begin, end in zip(self._starts, [*self._starts[1:], len(window)], strict=True):
            entry = window[begin:end]
            known = is_kernels(entry) if is_kernels else True
            is_kept = known if known is not None else is_kept or not entry[:1].isspace()
            if is_kept:
                entries.append((begin, entry))
        self._places: dict[int, int] = {}
        """Where an entry is in ``text``, by its start in the window."""
        if newest_first:
            entries.reverse()
        length = 0
        for begin, entry in entries:
            self._places[begin] = length
            length += len(entry)
        self.text = b"".join([entry for _, entry in entries])

    def position(self, position: int) -> int | None:
        """Where the byte at a position of the window is in ``text``; None if its entry is not there."""
        begin = self._starts[bisect_right(self._starts, position) - 1]
        place = self._places.get(begin)
        return None if place is None else place + position - begin
