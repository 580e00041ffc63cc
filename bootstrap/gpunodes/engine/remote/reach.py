"""How far a session with a machine came, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Reach(StrEnum):
    """How far a session with a machine came."""

    ANSWERED = "answered"
    NO_ROUTE = "no_route"
    """No connection: unknown host name, no route to the host, or timeout."""
    REFUSED = "refused"
    """The machine refuses the connection, or closes it before the login."""
    KEY_CHANGED = "key_changed"
    KEY_UNKNOWN = "key_unknown"
    """The host key is unknown, and the user's SSH configuration does not allow new keys."""
    LOGIN_REFUSED = "login_refused"
    SHELL_HANGS = "shell_hangs"
    """Connected, but the SSH banner, the login or the shell times out: the kernel runs, user space may hang."""
    PROBE_FAILED = "probe_failed"
    """Logged in, but the output is not a probe document."""
    TIMEOUT = "timeout"
    """The probe started and did not end in time."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result for one machine; ``message`` is the reason when there are no facts."""

    name: str
    reach: Reach
    message: str = ""
    facts: Mapping[str, Any] | None = None


class LostError(Exception):
    """A session failed: how far it came, and the reason."""

    def __init__(self, reach: Reach, message: str) -> None:
        super().__init__(message)
        self.reach = reach
        self.message = message
