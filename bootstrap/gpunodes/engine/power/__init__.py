"""A machine's power from outside: its BMC by Redfish or IPMI, or a command of the user's own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from gpunodes.ansible.module_utils.gpunodes.identity import BmcIdentity
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import printable


class PowerState(StrEnum):
    """What a BMC says of its machine."""

    ON = "on"
    OFF = "off"
    CHANGING = "changing"
    UNKNOWN = "unknown"


class Order(StrEnum):
    """What a BMC is told."""

    ON = "on"
    OFF = "off"
    """At once, without asking the system."""
    RESET = "reset"
    """A warm reset: main power stays."""


class Trouble(StrEnum):
    """Why a BMC did not do what it was told."""

    DOWN = "down"
    """It does not answer."""
    REFUSED = "refused"
    """It answers and says no."""
    LOGIN = "login"
    TLS = "tls"
    """Its certificate is not to be trusted."""
    LIED = "lied"
    """It said yes, and the power did not change."""
    FOREIGN = "foreign"
    """It is another machine's, or nothing tells whose it is."""


class PowerProblem(GpunodesError):  # noqa: N818 - reads as the sentence it makes
    """A BMC did not do what it was told."""

    def __init__(self, trouble: Trouble, found: str, remedy: str = "") -> None:
        # What a BMC answers may be in it.
        super().__init__(printable(found), remedy=remedy)
        self.trouble = trouble


class Power(Protocol):
    """One machine's power. All raise PowerProblem."""

    name: str
    """What it is, for people: ``Redfish at ...``; never a password."""

    def state(self) -> PowerState:
        """What the BMC says."""

    def order(self, order: Order) -> None:
        """Tell it; returns when it accepted."""

    def identity(self) -> BmcIdentity | None:
        """Which machine it is the BMC of, as it reports; None where it is told the machine's name with each order."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a BMC is reached. The password is in no text that this makes."""

    kind: str
    address: str
    user: str
    password: str = field(repr=False)
    system: str = ""
    """The Redfish system's id; needed only where a BMC has several."""
    verify: bool | str = True
    """Whether its TLS certificate is verified; a path names the CA."""
    command: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """Host and port of the address, "" for none; an IPv6 address stands in brackets where a port follows it."""
        if self.address.startswith("["):
            host, _, rest = self.address[1:].partition("]")
            return host, rest.removeprefix(":")
        if self.address.count(":") > 1:
            return self.address, ""
        host, _, port = self.address.partition(":")
        return host, port


KINDS = ("redfish", "ipmi", "command")
CHANGE_S = 60.0
"""Seconds in which the power must really change."""
_PASSWORD_COMMAND_S = 30


def access(machine: str, settings: Mapping[str, Any]) -> Access | None:
    """How the BMC of a machine is reached, by its settings; None when it has none.

    The password comes from the inventory (its vault), an environment variable, or a command. Raises WrongInput.
    """
    kind = str(settings["gpunodes_bmc_type"] or "")
    if not kind:
        return None
    if kind not in KINDS:
        raise WrongInput(
            f"gpunodes_bmc_type of {machine} is {kind!r}", f"one of {', '.join(KINDS)}", "correct the inventory"
        )
    address, command = str(settings["gpunodes_bmc_address"] or ""), str(settings["gpunodes_bmc_command"] or "")
    needed, name = (command, "gpunodes_bmc_command") if kind == "command" else (address, "gpunodes_bmc_address")
    if not needed:
        raise WrongInput(f"{machine} has a BMC of type {kind} and no {name}", name, "add it to the inventory")
    return Access(
        kind=kind,
        address=address,
        user=str(settings["gpunodes_bmc_user"] or ""),
        password="" if kind == "command" else _password(machine, settings),
        system=str(settings["gpunodes_bmc_system"] or ""),
        verify=_verified(machine, settings["gpunodes_bmc_verify"]),
        command=command,
    )


def connect(machine: str, access: Access) -> Power:
    """The machine's power; nothing is asked of the BMC yet."""
    from gpunodes.engine.power import command, ipmi

    if access.kind == "ipmi":
        return ipmi.Ipmi(access)
    if access.kind == "command":
        return command.Command(machine, access)
    from gpunodes.engine.power import redfish

    return redfish.Redfish(access)


def change(power: Power, order: Order, limit_s: float = CHANGE_S, poll_s: float = 1.0) -> None:
    """Order ON or OFF and see that it happens; raises PowerProblem, ``LIED`` when it does not."""
    wanted = PowerState(order.value)
    if power.state() is wanted:
        return
    power.order(order)
    deadline = time.monotonic() + limit_s
    while (message := power.state()) is not wanted:
        if time.monotonic() > deadline:
            raise PowerProblem(
                Trouble.LIED,
                f"{power.name} took the order {order.value} and says {message.value} {limit_s:.0f} s later",
                "look at the machine itself",
            )
        time.sleep(poll_s)


def _verified(machine: str, value: Any) -> bool | str:
    """Whether a certificate is verified, or the CA to verify it against: nothing but ``false`` turns that off.

    An INI inventory has words where YAML has booleans. Raises WrongInput for what is neither nor the path of a file.
    """
    word = str(value).strip().lower()
    if value is None or word in {"", "true"}:
        return True
    if word == "false":
        return False
    if isinstance(value, str) and (path := Path(value).expanduser()).exists():
        return str(path)
    raise WrongInput(
        f"gpunodes_bmc_verify of {machine} is {value!r}",
        "true, false, or the file of a CA that is there",
        "correct the inventory",
    )


def _password(machine: str, settings: Mapping[str, Any]) -> str:
    if value := settings["gpunodes_bmc_password"]:
        return str(value)
    if variable := str(settings["gpunodes_bmc_password_env"] or ""):
        if variable not in os.environ:
            raise WrongInput(
                f"the environment has no {variable}, which gpunodes_bmc_password_env of {machine} names",
                "a password in it",
                f"set {variable}",
            )
        return os.environ[variable]
    if command := str(settings["gpunodes_bmc_password_command"] or ""):
        return _from_command(machine, command)
    return ""


def _from_command(machine: str, command: str) -> str:
    """The first line that the user's command prints; it finds the machine's name in $GPUNODES_MACHINE."""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            env={**os.environ, "GPUNODES_MACHINE": machine},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PASSWORD_COMMAND_S,
            check=False,
        )
        message = "" if done.returncode == 0 else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        message, done = f"no end in {_PASSWORD_COMMAND_S} s", None
    if message or done is None or not done.stdout.strip():
        # What it printed may be the password.
        raise GpunodesError(
            f"gpunodes_bmc_password_command of {machine} gave no password: {message or 'it printed nothing'}",
            "a command that prints the password",
            "try it in a shell, with GPUNODES_MACHINE set",
        )
    return done.stdout.splitlines()[0]
