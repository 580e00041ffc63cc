"""Whether a Lease that looks expired is held: the clocks of two control planes, or an odd time in it, may say so.

As in client-go's leader election, only what its holder does counts then: it renews the Lease, or it does not.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from gpunodes.engine.leases.objects import ObservedLease
from gpunodes.engine.locks import clock

WATCHED = 1 / 3
"""The part of a Lease's duration for which one that looks expired is watched; a holder renews it after a quarter."""


class Expiry:
    """The Leases that look expired, since they were first read."""

    def __init__(self, read_all: Callable[[], Sequence[ObservedLease]], duration_s: float) -> None:
        self._read_all = read_all
        self._duration_s = duration_s
        self._first: dict[str, tuple[str, float]] = {}
        """The version of each one, and ``clock`` after it was read."""

    def held(self, seen: ObservedLease) -> bool:
        """Whether a Lease that was just read is held; one that looks expired is watched before.

        All are watched from the first one on: Leases that are taken together cost one wait.
        """
        if seen.live or not seen.expired:
            return seen.live
        if not self._is_first(seen):
            self._first |= {
                each.name: (each.version, clock())
                for each in self._read_all()
                if each.expired and not self._is_first(each)
            }
        version, since = self._first.get(seen.name, ("", 0.0))
        time.sleep(max(0.0, since + self._duration_s * WATCHED - clock()))
        now = next((each for each in self._read_all() if each.name == seen.name), None)
        return now is not None and now.version != version and (now.live or now.expired)

    def watched(self, found: Sequence[ObservedLease]) -> list[ObservedLease]:
        """The Leases, those live that look expired and are held."""
        return [
            dataclasses.replace(seen, live=True, expired=False) if seen.expired and self.held(seen) else seen
            for seen in found
        ]

    def _is_first(self, seen: ObservedLease) -> bool:
        return self._first.get(seen.name, ("", 0.0))[0] == seen.version
