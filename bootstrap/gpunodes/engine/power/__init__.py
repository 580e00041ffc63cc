"""Out-of-band power control of a machine: what every kind of BMC offers. The kinds are listed in kinds.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from gpunodes.engine.remote.targets import Target
from gpunodes.errors import GpunodesError
from gpunodes.identity.model import BmcIdentity
from gpunodes.model import printable


class PowerState(StrEnum):
    """The power state of a machine, as its BMC reports it."""

    ON = "on"
    OFF = "off"
    CHANGING = "changing"
    UNKNOWN = "unknown"


class Order(StrEnum):
    """A power action for a BMC."""

    ON = "on"
    OFF = "off"
    """Immediately, without a shutdown of the operating system."""
    SHUTDOWN = "shutdown"
    """Ask the operating system to shut down; the power goes off when it has."""
    RESET = "reset"
    """A warm reset: main power stays on."""


class Trouble(StrEnum):
    """Why a power action failed."""

    UNREACHABLE = "unreachable"
    """The BMC does not respond."""
    REFUSED = "refused"
    """The BMC responds with an error."""
    LOGIN = "login"
    """The BMC refuses the user or the password."""
    TLS = "tls"
    """The certificate of the BMC cannot be verified."""
    INCONSISTENT = "inconsistent"
    """The BMC accepted the action, but the power state did not change."""
    WRONG_MACHINE = "wrong-machine"
    """The BMC belongs to another machine, or its identity cannot be verified."""


class PowerProblem(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """A power action failed."""

    def __init__(self, trouble: Trouble, found: str, remedy: str = "") -> None:
        # It may quote the response of a BMC.
        super().__init__(printable(found), remedy=remedy)
        self.trouble = trouble


class Uncertain(PowerProblem):
    """An order was sent, and its effect was not seen: it may have been carried out, or may be later."""


class Power(Protocol):
    """Power control of one machine. All methods raise PowerProblem, ``order`` also Uncertain."""

    name: str
    """A name for messages: ``Redfish at ...``; never holds a password."""

    def state(self) -> PowerState:
        """The power state that the BMC reports."""

    def order(self, order: Order) -> None:
        """Start a power action; returns when the BMC has accepted it. Uncertain: it was sent, its response is lost."""

    def identity(self) -> BmcIdentity | None:
        """The identity of the machine, as the BMC reports it; None for a command, which gets the machine's name."""

    def change_password(self, new: str, /) -> None:
        """Change the password of this login at the BMC; WrongInput for a command, which has none.

        ``new`` matches ``passwords.PATTERN``. It is in no argument of a program, and in no message.
        """


@runtime_checkable
class Slow(Protocol):
    """Power control whose effect is seen late."""

    change_s: float
    """The time limit for a change, in seconds, in place of ``CHANGE_S``."""


@dataclass(frozen=True, slots=True)
class Access:
    """The address and the login of a BMC. ``repr`` does not show the password."""

    kind: str
    address: str
    user: str
    password: str = field(repr=False)
    system: str = ""
    """The id of the Redfish system; required only where a BMC has several systems."""
    verify: bool | str = True
    """Whether the TLS certificate is verified; a string is the path of the CA."""
    command: str = ""
    macs: tuple[str, ...] = ()
    """For Wake-on-LAN: the addresses of the machine's network interfaces."""
    shared: str = ""
    """For Wake-on-LAN: why none of the addresses that the machine reported may be woken, "" if ``macs`` has one."""
    reached: tuple[str, int] = ("", 0)
    """For Wake-on-LAN: where the machine's SSH server listens."""
    jump: tuple[Target, ...] = ()
    """For Redfish: the SSH jump hosts before the BMC, the first hop first."""

    @property
    def place(self) -> tuple[str, str]:
        """Host and port of the address, "" for no port; an IPv6 address with a port is in brackets."""
        if self.address.startswith("["):
            host, _, rest = self.address[1:].partition("]")
            return host, rest.removeprefix(":")
        if self.address.count(":") > 1:
            return self.address, ""
        host, _, port = self.address.partition(":")
        return host, port


Confirm = Callable[[], None]
"""Confirms the lock on the machine; raises if another command may hold it.

A BMC may need minutes before it can be given an order: so the lock is confirmed right before each one.
"""
CHANGE_S = 60.0
"""Time limit in seconds for a change of the power state."""


def change(power: Power, order: Order, confirm: Confirm, limit_s: float | None = None, poll_s: float = 1.0) -> None:
    """Switch ON or OFF and verify the power state; an order whose response is lost may have been carried out.

    Raises PowerProblem, which is Uncertain once an order was sent: INCONSISTENT when the state does not change.
    """
    target = PowerState(order.value)
    limit_s = limit_s or (power.change_s if isinstance(power, Slow) else CHANGE_S)
    if power.state() is target:
        return
    confirm()
    lost: Uncertain | None = None
    try:
        power.order(order)
    except Uncertain as problem:
        lost = problem
    deadline = time.monotonic() + limit_s
    while (state := _state_after_order(power, deadline)) is not target:
        if time.monotonic() > deadline:
            raise lost or Uncertain(
                Trouble.INCONSISTENT,
                f"{power.name} accepted the command {order.value}, but reports {state.value} {limit_s:.0f} s later",
                "check the machine on site",
            )
        time.sleep(poll_s)


def _state_after_order(power: Power, deadline: float) -> PowerState:
    """The power state, unknown while the BMC does not respond before the deadline; raises Uncertain."""
    try:
        return power.state()
    except PowerProblem as problem:
        if problem.trouble is Trouble.UNREACHABLE and time.monotonic() <= deadline:
            return PowerState.UNKNOWN
        raise Uncertain(problem.trouble, problem.problem.fact, problem.problem.remedy) from problem


_OFF_SEEN = 2
"""A BMC may report a state of before the order once."""


def off_within(power: Power, limit_s: float, poll_s: float) -> bool:
    """Whether a machine that shuts down is off in time; raises PowerProblem."""
    deadline, seen = time.monotonic() + limit_s, 0
    while seen < _OFF_SEEN:
        seen = seen + 1 if power.state() is PowerState.OFF else 0
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
