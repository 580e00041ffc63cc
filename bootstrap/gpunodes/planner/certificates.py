"""Certificates that end soon, or have ended: what is said about them, and who renews them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes.ansible.module_utils.certificates import SOON_DAYS
from gpunodes.ansible.module_utils.problem import Problem

_DAY_S = 86400
_REMEDIES = {
    "renew": "`gpunodes certs renew` renews it",
    "kubelet": "the kubelet renews it by itself: see `journalctl -u kubelet` on the machine",
    "none": "gpunodes never renews it: see the page certificates (`gpunodes help --page certificates`)",
}


def days_left(not_after: float, now: float) -> int:
    """Whole days until the end; negative after it."""
    return math.floor((not_after - now) / _DAY_S)


def shown(seconds: float) -> str:
    """A time in UTC, for people; "" for one that no calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return ""


def ending(certificates: Sequence[Mapping[str, Any]], now: float) -> list[Problem]:
    """The problems of a machine's certificates (module certificate_ends): those that end soon or cannot be read."""
    found = []
    for each in certificates:
        if each["not_after"] is None:
            found.append(Problem(f"{each['path']} cannot be read: {each['problem']}", "a certificate", "restore it"))
        elif (left := days_left(each["not_after"], now)) < SOON_DAYS:
            end = "ended" if each["not_after"] <= now else "ends"
            found.append(
                Problem(
                    f"the certificate {each['name']} {end} {shown(each['not_after'])}",
                    f"more than {SOON_DAYS} days" if left >= 0 else "one that is valid",
                    _REMEDIES[each["renewal"]],
                )
            )
    return found
