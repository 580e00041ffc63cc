"""A node that a person keeps for themselves: why, who, until when, as it stands on the node. Pure."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpunodes.errors import WrongInput

_UNITS = {"m": 60, "h": 3600, "d": 86400}
_LONGEST = 1 << 16
"""Longest annotation, in characters, that is read; who may write to a node may write much more."""
_SHOWN = 1000
"""How much of a text that is not ours is taken for a reason."""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Times are seconds since 1970."""

    reason: str
    by: str = ""
    since: float | None = None
    until: float | None = None
    """When it ends by itself; None: when somebody ends it."""
    cordoned: bool = False
    """The node's cordon was made for it, and goes with it."""

    def holds(self, now: float) -> bool:
        """Whether it goes on; after its time it keeps nobody from the node any more."""
        return self.until is None or now < self.until

    def described(self) -> str:
        """It in one line, for people."""
        parts = [self.reason]
        parts += [f"by {self.by}"] if self.by else []
        parts += [f"since {_shown(self.since)}"] if self.since is not None else []
        parts += [f"until {_shown(self.until)}"] if self.until is not None else []
        return ", ".join(parts)

    def text(self) -> str:
        """It as the node's annotation."""
        times = {"since": self.since, "until": self.until}
        stamps = {name: _stamp(moment) for name, moment in times.items() if moment is not None}
        return json.dumps({"reason": self.reason, "by": self.by, **stamps, "cordoned": self.cordoned})


def parse(text: str) -> Maintenance | None:
    """What an annotation holds; None for an empty one.

    Whoever wrote it by hand meant what they wrote: text that is not ours is the reason of a maintenance without end.
    """
    if not text.strip():
        return None
    if len(text) > _LONGEST:
        return Maintenance(text[:_SHOWN])
    try:
        return _read(json.loads(text))
    except (ValueError, RecursionError):
        return Maintenance(text[:_SHOWN])


def _read(read: object) -> Maintenance:
    if not isinstance(read, Mapping):
        return Maintenance(str(read))
    reason, by = str(read.get("reason") or "no reason was given"), str(read.get("by") or "")
    return Maintenance(reason, by, _moment(read.get("since")), _moment(read.get("until")), read.get("cordoned") is True)


def end(text: str, now: float) -> float:
    """When a maintenance ends: ``4h``, ``1d12h``, ``90m``, or an ISO 8601 time, local where it names no zone.

    Raises WrongInput for what is no time, and for one that is over.
    """
    if re.fullmatch(r"([0-9]{1,5}[mhd])+", text):
        found = _showable(now + sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"([0-9]+)([mhd])", text)))
    else:
        found = _moment(text)
    if found is None:
        raise WrongInput(
            f"{text!r} is no time", "a duration such as 4h or 1d12h, or a time such as 2030-01-31T18:00", "correct it"
        )
    if found <= now:
        raise WrongInput(f"{text!r} is over: it is {_shown(now)} now", "a time that is to come", "correct it")
    return float(int(found))


def _moment(stamp: object) -> float | None:
    try:
        return _showable(dt.datetime.fromisoformat(str(stamp)).timestamp()) if stamp else None
    except (ValueError, OverflowError, OSError):
        return None


def _showable(moment: float) -> float | None:
    """A moment; None for one whose year has no four digits in UTC, which cannot be written or shown."""
    try:
        dt.datetime.fromtimestamp(moment, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment


def _stamp(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _shown(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
