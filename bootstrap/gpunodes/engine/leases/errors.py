"""Errors of locks on machines."""

from __future__ import annotations

from gpunodes.engine.leases.holders import described
from gpunodes.errors import GpunodesError


class Held(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """Another command holds a lock: that of the machine ``what``, or of what it says."""

    def __init__(self, what: str, holder: str, since: str = "") -> None:
        self.what = what
        by = described(holder) + (f", since {since}" if since else "")
        super().__init__(f"{what} is locked by {by}", "one command or repair at a time", "wait for it to end")


class Lost(GpunodesError):  # noqa: N818 - as above
    """Another command took a lock of this command."""


class Unsure(Lost):
    """A lock of this command could not be renewed in time: another command may hold it now."""
