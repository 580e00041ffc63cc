"""Waits until something is seen."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(what: str, seen: Callable[[], object], limit_s: float = 300.0) -> None:
    """Wait until ``seen`` is true, and print how long that took; an assertion fails after ``limit_s`` seconds."""
    began = time.monotonic()
    while not seen():
        assert time.monotonic() - began < limit_s, f"not within {limit_s:.0f} s: {what}"
        time.sleep(3)
    print(f"{what}: {time.monotonic() - began:.0f} s")
