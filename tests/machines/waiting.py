"""Waits until something is seen."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(what: str, seen: Callable[[], object], limit_s: float = 300.0) -> float:
    """Seconds until ``seen`` is true, which are printed; an assertion fails after ``limit_s`` of them.

    A question that fails is repeated: an API server under load refuses some. A command that fails prints a document of
    its error, which lacks what is looked for.
    """
    began, failure = time.monotonic(), ""
    while True:
        try:
            if seen():
                break
        except (AssertionError, LookupError, ValueError, subprocess.TimeoutExpired) as error:
            failure = f"; at {time.monotonic() - began:.0f} s: {error!r}"
        assert time.monotonic() - began < limit_s, f"not within {limit_s:.0f} s: {what}{failure}"
        time.sleep(3)
    print(f"{what}: {time.monotonic() - began:.0f} s{failure}")
    return time.monotonic() - began


def got(what: str, read: Callable[[], T], limit_s: float = 300.0) -> T:
    """The first value of ``read`` that is true, waited for as in ``until``: another question may fail again."""
    found: list[T] = []

    def look() -> object:
        found[:] = [read()]
        return found[0]

    until(what, look, limit_s)
    return found[0]
