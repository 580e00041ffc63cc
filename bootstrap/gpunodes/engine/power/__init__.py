"""Out-of-band power control of a machine: its BMC over Redfish or IPMI, or a command that the user configures."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from gpunodes.errors import GpunodesError, WrongInput
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


class Power(Protocol):
    """Power control of one machine. All methods raise PowerProblem."""

    name: str
    """A name for messages: ``Redfish at ...``; never holds a password."""

    def state(self) -> PowerState:
        """The power state that the BMC reports."""

    def order(self, order: Order) -> None:
        """Start a power action; returns when the BMC has accepted it."""

    def identity(self) -> BmcIdentity | None:
        """The identity of the machine, as the BMC reports it; None for a command, which gets the machine's name."""


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


KINDS = ("redfish", "ipmi", "command")
CHANGE_S = 60.0
"""Time limit in seconds for a change of the power state."""
_PASSWORD_COMMAND_S = 30


def access(machine: str, settings: Mapping[str, Any]) -> Access | None:
    """The access to the BMC of a machine, from its settings; None when no BMC is configured.

    The password is from the inventory (Ansible vault works), an environment variable or a command; raises WrongInput.
    """
    kind = str(settings["gpunodes_bmc_type"] or "")
    if not kind:
        return None
    if kind not in KINDS:
        raise WrongInput(
            f"gpunodes_bmc_type of {machine} is {kind!r}", f"one of {', '.join(KINDS)}", "correct the inventory"
        )
    address, command = str(settings["gpunodes_bmc_address"] or ""), str(settings["gpunodes_bmc_command"] or "")
    required, name = (command, "gpunodes_bmc_command") if kind == "command" else (address, "gpunodes_bmc_address")
    if not required:
        raise WrongInput(f"{machine} has a BMC of type {kind}, but no {name}", name, "add it to the inventory")
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
    """Power control of a machine; sends no request to the BMC yet."""
    from gpunodes.engine.power import command, ipmi

    if access.kind == "ipmi":
        return ipmi.Ipmi(access)
    if access.kind == "command":
        return command.Command(machine, access)
    from gpunodes.engine.power import redfish

    return redfish.Redfish(access)


def change(power: Power, order: Order, limit_s: float = CHANGE_S, poll_s: float = 1.0) -> None:
    """Switch ON or OFF and verify the power state; raises PowerProblem, INCONSISTENT when the state does not change."""
    target = PowerState(order.value)
    if power.state() is target:
        return
    power.order(order)
    deadline = time.monotonic() + limit_s
    while (state := power.state()) is not target:
        if time.monotonic() > deadline:
            raise PowerProblem(
                Trouble.INCONSISTENT,
                f"{power.name} accepted the command {order.value}, but reports {state.value} {limit_s:.0f} s later",
                "check the machine on site",
            )
        time.sleep(poll_s)


def _verified(machine: str, value: Any) -> bool | str:
    """Whether the certificate is verified, or the path of the CA; only ``false`` disables the verification.

    An INI inventory has strings in place of booleans. Raises WrongInput for any other value that is not the path of a
    file.
    """
    text = str(value).strip().lower()
    if value is None or text in {"", "true"}:
        return True
    if text == "false":
        return False
    if isinstance(value, str) and (path := Path(value).expanduser()).exists():
        return str(path)
    raise WrongInput(
        f"gpunodes_bmc_verify of {machine} is {value!r}",
        "true, false, or the path of an existing CA file",
        "correct the inventory",
    )


def _password(machine: str, settings: Mapping[str, Any]) -> str:
    if value := settings["gpunodes_bmc_password"]:
        return str(value)
    if variable := str(settings["gpunodes_bmc_password_env"] or ""):
        if variable not in os.environ:
            raise WrongInput(
                f"the environment variable {variable}, named by gpunodes_bmc_password_env of {machine}, is not set",
                "a password",
                f"set {variable}",
            )
        return os.environ[variable]
    if command := str(settings["gpunodes_bmc_password_command"] or ""):
        return _from_command(machine, command)
    return ""


def _from_command(machine: str, command: str) -> str:
    """The first line that the user's command prints; the machine's name is in $GPUNODES_MACHINE."""
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
        failure = "" if done.returncode == 0 else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        failure, done = f"it did not end in {_PASSWORD_COMMAND_S} s", None
    if failure or done is None or not done.stdout.strip():
        # The output is not quoted: it may hold the password.
        raise GpunodesError(
            f"gpunodes_bmc_password_command of {machine} returned no password: {failure or 'no output'}",
            "a command that prints the password",
            "run it in a shell, with GPUNODES_MACHINE set",
        )
    return done.stdout.splitlines()[0]
