"""A node's maintenance as its annotation stores it: reason, user, start and end. Pure."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpunodes.errors import WrongInput

_UNITS = {"m": 60, "h": 3600, "d": 86400}
_LONGEST = 1 << 16
"""Longest annotation, in characters, that is parsed; a longer one is taken for free text."""
_SHOWN = 1000
"""How many characters of free text are taken for the reason."""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Times are seconds since 1970."""

    reason: str
    by: str = ""
    since: float | None = None
    until: float | None = None
    """When it expires; None: never, it lasts until a user ends it."""
    cordoned: bool = False
    """The node was cordoned for it, and is uncordoned when it ends."""

    def holds(self, now: float) -> bool:
        """Whether it is still in force; expired maintenance blocks no repair."""
        return self.until is None or now < self.until

    def described(self) -> str:
        """One line for people."""
        parts = [self.reason]
        parts += [f"by {self.by}"] if self.by else []
        parts += [f"since {_shown(self.since)}"] if self.since is not None else []
        parts += [f"until {_shown(self.until)}"] if self.until is not None else []
        return ", ".join(parts)

    def text(self) -> str:
        """The text of the node's annotation."""
        times = {"since": self.since, "until": self.until}
        stamps = {name: _stamp(moment) for name, moment in times.items() if moment is not None}
        return json.dumps({"reason": self.reason, "by": self.by, **stamps, "cordoned": self.cordoned})


def parse(text: str) -> Maintenance | None:
    """The maintenance that an annotation describes; None for an empty annotation.

    Text that gpunodes did not write is a reason that a user wrote by hand: maintenance with that reason and no end.
    """
    if not text.strip():
        return None
    if len(text) > _LONGEST:
        return Maintenance(text[:_SHOWN])
    try:
        return _read(json.loads(text))
    except (ValueError, RecursionError):
        return Maintenance(text[:_SHOWN])


def _read(document: object) -> Maintenance:
    if not isinstance(document, Mapping):
        return Maintenance(str(document))
    reason, by = str(document.get("reason") or "no reason given"), str(document.get("by") or "")
    since, until = _moment(document.get("since")), _moment(document.get("until"))
    return Maintenance(reason, by, since, until, document.get("cordoned") is True)


def end(text: str, now: float) -> float:
    """When a maintenance ends: ``4h``, ``1d12h``, ``90m``, or an ISO 8601 time, local where it names no zone.

    Raises WrongInput for an invalid time, and for one in the past.
    """
    if re.fullmatch(r"([0-9]{1,5}[mhd])+", text):
        found = _showable(now + sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"([0-9]+)([mhd])", text)))
    else:
        found = _moment(text)
    if found is None:
        raise WrongInput(
            f"{text!r} is not a time",
            "a duration such as 4h or 1d12h, or a time such as 2030-01-31T18:00",
            "correct it",
        )
    if found <= now:
        raise WrongInput(f"{text!r} is in the past: it is {_shown(now)} now", "a time in the future", "correct it")
    return float(int(found))


def _moment(stamp: object) -> float | None:
    try:
        return _showable(dt.datetime.fromisoformat(str(stamp)).timestamp()) if stamp else None
    except (ValueError, OverflowError, OSError):
        return None


def _showable(moment: float) -> float | None:
    """The moment, or None if its year in UTC does not have four digits and so cannot be formatted."""
    try:
        dt.datetime.fromtimestamp(moment, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment


def _stamp(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _shown(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def kept_by(found: Maintenance | None, now: float) -> str:
    """Why a node must be left alone, "" without a maintenance that holds."""
    return f"it is in maintenance: {found.described()}" if found and found.holds(now) else ""
