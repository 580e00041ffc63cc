"""The kinds of BMCs: Redfish, IPMI, a user's command, or Wake-on-LAN; the access to one from the settings."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpunodes.engine.power import Access, Power, jumping
from gpunodes.engine.remote.targets import Target
from gpunodes.errors import GpunodesError, WrongInput

WOL = "wol"
"""It only switches on."""
KINDS = ("redfish", "ipmi", "command", WOL)
_WITHOUT_PASSWORD = frozenset({"command", WOL})
_PASSWORD_COMMAND_S = 30
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_UNBRACKETED = re.compile(r"[A-Za-z]+://([^/\[\]:]*:[^/\[\]:]*:[^/\[\]]*)")
"""A URL whose host has several colons: it is unclear where the port begins (RFC 3986, 3.2.2)."""


def access(
    machine: str,
    settings: Mapping[str, Any],
    reached: tuple[str, int] = ("", 0),
    macs: Sequence[str] = (),
    jump: tuple[Target, ...] | None = None,
    others: Mapping[str, str] = MappingProxyType({}),
) -> Access | None:
    """The access to the BMC of a machine, from its settings; None when no BMC is configured.

    For Wake-on-LAN, ``reached`` is where its SSH server listens, ``macs`` the addresses that it reported. ``jump`` are
    its jump hosts, where they are not to be read from the settings and from ssh_config. ``others`` are the MAC
    addresses of other machines, each with the machine's name: what the machine reported of these does not count.
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
    # A machine may report anything.
    own = tuple(each for each in macs if _MAC.fullmatch(each))
    known = (str(settings["gpunodes_bmc_mac"]),) if settings["gpunodes_bmc_mac"] else own
    used = known if settings["gpunodes_bmc_mac"] else tuple(each for each in own if each not in others)
    required, name = {
        "command": (command, "gpunodes_bmc_command"),
        WOL: (known, "gpunodes_bmc_mac, and the machine never reported one"),
    }.get(kind, (address, "gpunodes_bmc_address"))
    if not required:
        raise WrongInput(
            f"{machine} has a BMC of type {kind}, but no {name}", name.partition(",")[0], "add it to the inventory"
        )
    _check_address(machine, address)
    return Access(
        kind=kind,
        address=address,
        user=str(settings["gpunodes_bmc_user"] or ""),
        password="" if kind in _WITHOUT_PASSWORD else _password(machine, settings),
        system=str(settings["gpunodes_bmc_system"] or ""),
        verify=_verified(machine, settings["gpunodes_bmc_verify"]),
        command=command,
        macs=used if kind == WOL else (),
        shared=_shared(machine, own[0], others[own[0]]) if kind == WOL and not used else "",
        reached=reached,
        jump=jumping.hops(machine, kind, settings) if jump is None else jump,
    )


def _check_address(machine: str, address: str) -> None:
    if "@" in address:
        # Messages name the address. So this one does not.
        raise WrongInput(
            f"gpunodes_bmc_address of {machine} contains a user name or a password",
            "an address without them",
            "move them to gpunodes_bmc_user and gpunodes_bmc_password, in a vault",
        )
    if unbracketed := _UNBRACKETED.match(address):
        raise WrongInput(
            f"gpunodes_bmc_address of {machine} is a URL with the host {unbracketed[1]!r}",
            "an IPv6 address in brackets, such as https://[2001:db8::1]",
            "correct the inventory",
        )


def _shared(machine: str, mac: str, other: str) -> str:
    return f"{machine} reported no MAC address of its own to wake: {mac} is one of {other}, too"


def connect(machine: str, access: Access) -> Power:
    """Power control of a machine; sends no request to the BMC yet."""
    from gpunodes.engine.power import command, ipmi, wol

    if access.kind == "ipmi":
        return ipmi.Ipmi(access)
    if access.kind == "command":
        return command.Command(machine, access)
    if access.kind == WOL:
        return wol.WakeOnLan(machine, access)
    from gpunodes.engine.power import redfish

    return redfish.Redfish(access)


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
