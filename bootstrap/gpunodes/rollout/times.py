"""Durations, and the hours in which a roll-out may begin with a machine. Pure."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpunodes.errors import WrongInput

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DAY = 24 * 60


def duration(text: str) -> float:
    """Seconds of a duration such as ``90s``, ``10m`` or ``1d12h``; raises WrongInput."""
    if not re.fullmatch(r"([0-9]{1,5}[smhd])+", text):
        raise WrongInput(f"{text!r} is not a duration", "one such as 90s, 10m, 2h or 1d12h", "correct it")
    return float(sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"([0-9]+)([smhd])", text)))


@dataclass(frozen=True, slots=True)
class Window:
    """Hours of each day, in minutes since midnight of the controller's local time; over midnight if end < begin."""

    begin: int
    end: int

    def contains(self, minute: int) -> bool:
        """Whether a minute of the day is inside; the end is not."""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        return f"{_clock(self.begin)}-{_clock(self.end)}"


def window(text: object) -> Window:
    """The window of a text such as ``22:00-05:00``; raises WrongInput."""
    found = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", str(text).strip())
    made = Window(int(found[1]) * 60 + int(found[2]), int(found[3]) * 60 + int(found[4])) if found else None
    if made is None or made.begin == made.end:
        raise WrongInput(f"{text!r} is not a window", "hours of a day such as 22:00-05:00", "correct it")
    return made


def is_open(windows: Sequence[Window], now: dt.datetime) -> bool:
    """Whether a machine may be begun now; always without windows."""
    minute = now.hour * 60 + now.minute
    return not windows or any(each.contains(minute) for each in windows)


def opens(windows: Sequence[Window], now: dt.datetime) -> str:
    """The time of day at which the next window opens."""
    minute = now.hour * 60 + now.minute
    return _clock(min((each.begin for each in windows), key=lambda begin: (begin - minute) % _DAY))


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
