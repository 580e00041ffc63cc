"""Machines that a user switched off with `gpunodes power NAME off`, and that the power server leaves off. Pure.

They are in a ConfigMap of their own, which commands write: the states are the power server's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpunodes import shape
from gpunodes.ansible.module_utils.scaling import REMOVED, entry
from gpunodes.errors import GpunodesError
from gpunodes.model import printable

_SHAPE = {"by": str, "since": float, "boot_id": str}
_LONGEST = 1000
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class KeptOff:
    """Who switched a machine off, and when, in seconds since 1970."""

    by: str
    since: float
    boot_id: str = ""
    """The boot of its node then, "" without a node: a node that is ready in another one was switched on since."""

    @property
    def reason(self) -> str:
        if self.by == REMOVED:
            return f"`{REMOVED}` took it out of the cluster: it is left alone until it joins again"
        return f"switched off by {self.by} with `gpunodes power`: it stays off until it is switched on"

    def text(self) -> str:
        """As it is stored."""
        return entry(self.by, self.since, self.boot_id)


class StaysOff(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """A user switched a machine off that was to be switched on."""

    def __init__(self, made: KeptOff) -> None:
        super().__init__(made.reason)
        self.made = made


def parse(data: object) -> dict[str, KeptOff]:
    """The entries of the ConfigMap by node; those of another form are left out."""
    if not isinstance(data, Mapping):
        return {}
    found = {str(name): _parsed(text) for name, text in data.items()}
    return {name: made for name, made in found.items() if made}


def _parsed(text: object) -> KeptOff | None:
    document: Any = None
    try:
        document = json.loads(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    except (ValueError, RecursionError):
        return None
    if shape.wrong(document, _SHAPE):
        return None
    return KeptOff(printable(document["by"])[:_SHOWN], float(document["since"]), document["boot_id"])
