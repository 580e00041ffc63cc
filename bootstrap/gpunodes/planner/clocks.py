"""The clocks of machines: whether they agree with the controller's, and whether a time service sets them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.planner import tables, time_service


def disagreement(facts: Mapping[str, Any], asked_at: float | None, read_at: float | None) -> Iterator[Problem]:
    """The problem of a clock that certainly differs from the controller's by more than the limit.

    ``asked_at`` and ``read_at`` are the controller's clock, in seconds since 1970, when the module host_facts was
    started and when its result arrived; None if that is unknown.
    """
    limit = tables.read("limits")["clock_skew_s"]
    found, uncertainty = _offset(facts, asked_at, read_at)
    if abs(found) - uncertainty > limit:
        yield Problem(
            f"its clock is {_shown(found)} the controller's",
            f"at most {limit} s: certificates and tokens are not valid before their time",
            "set the clock that is wrong, and run a time service on the machine",
        )


def unattended(
    facts: Mapping[str, Any], asked_at: float | None, read_at: float | None, requested: str
) -> Iterator[Problem]:
    """The problem of a clock that no time service sets; ``requested`` is gpunodes_time_service."""
    clock = facts["clock"]
    offset = f"; its clock is {_shown(_offset(facts, asked_at, read_at)[0])} the controller's"
    known = "" if read_at is None else offset
    if not clock["services"]:
        install = "install one, or set gpunodes_time_service to install"
        yield Problem(
            f"no time service runs{known}",
            "chrony, systemd-timesyncd, ntpd or ptp4l: certificates and tokens fail when clocks drift apart",
            "nothing to do: gpunodes installs one" if requested == time_service.INSTALL else install,
        )
    elif clock["synchronised"] is False:
        yield Problem(
            f"its clock is not synchronised, although a time service runs ({', '.join(clock['services'])}){known}",
            "a synchronised clock",
            "check that its servers respond (`chronyc sources`, `timedatectl timesync-status`, `ntpq -p`)",
        )


def _offset(facts: Mapping[str, Any], asked_at: float | None, read_at: float | None) -> tuple[float, float]:
    """Seconds by which the machine's clock is ahead of the controller's, and their uncertainty; 0 if unknown.

    The time that the module itself took is no part of the round trip, and both ways are taken to be equally long
    (RFC 5905, section 8).
    """
    if read_at is None:
        return 0.0, 0.0
    elapsed = max(0.0, read_at - (read_at if asked_at is None else asked_at))
    worked = min(max(0.0, facts["time"] - facts["clock"]["began"]), elapsed)
    uncertainty = (elapsed - worked) / 2
    return facts["time"] + uncertainty - read_at, uncertainty


def _shown(offset: float) -> str:
    size = abs(offset)
    return f"{size:.{0 if size >= 1 else 1}f} s {'ahead of' if offset > 0 else 'behind'}"
