"""Finds byte strings in blocks of bytes; fast if a block mostly does not contain them.

The C library's memmem searches a block three times as fast as Python does. Without memmem, Python's search is used.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator

_SMALL = 64 << 10
"""Block size in bytes below which loading ctypes takes longer than the search."""
_MESSAGE = 256
"""Bytes in which one line has at most one message."""


_PLACES, _BYTES_PER_PLACE = 10_000, 32
"""How often each marker is read: so often, and once more for so many bytes. A line with a header is longer."""


class Places:
    """Counts where the markers of a text are read. One that is made of markers would take minutes: its rest is not."""

    def __init__(self) -> None:
        self._left = _PLACES * _BYTES_PER_PLACE
        self._read: Counter[bytes] = Counter()

    def add(self, size: int) -> None:
        """The text has so many bytes more."""
        self._left += size

    def take(self, marker: bytes) -> bool:
        """Whether the next place of a marker is read, too."""
        self._read[marker] += _BYTES_PER_PLACE
        return self._read[marker] <= self._left


def holds(block: bytes, word: bytes) -> bool:
    """Whether ``block`` contains ``word``."""
    return word in block if len(block) < _SMALL else _search()(block, word)


@functools.cache
def _search() -> Callable[[bytes, bytes], bool]:
    import ctypes

    try:
        memmem = ctypes.CDLL(None).memmem
    except (AttributeError, OSError, TypeError):
        return lambda block, word: word in block
    memmem.restype = ctypes.c_void_p
    memmem.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    return lambda block, word: memmem(block, len(block), word, len(word)) is not None


def positions(window: bytes, marker: bytes, begin: int, end: int) -> Iterator[int]:
    """The positions of a marker from ``begin`` to before ``end``; of several close together on a line, the first."""
    stop = end + len(marker) - 1
    position = window.find(marker, begin, stop)
    while position >= 0:
        yield position
        position = window.find(marker, next_position(window, position), stop)


def next_position(window: bytes, position: int) -> int:
    """Where the next message can start; a line that repeats a marker is so parsed only once."""
    newline = window.find(b"\n", position, position + _MESSAGE)
    return newline if newline >= 0 else position + _MESSAGE
