"""Names, addresses and patterns of machines: which texts are valid."""

from __future__ import annotations

import ipaddress
import re

from gpunodes.errors import WrongInput

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""A name that is valid in a shell, in a path and (in lower case) as a Kubernetes node name; RFC 1123."""
MOST = 200
"""Characters of a name, which becomes that of a file."""
_GROUP = re.compile(r"\w[\w .:@+-]*")
"""A group's name; Ansible makes paths of it (``group_vars/NAME``). Ansible itself allows anything."""
_HOST = re.compile(r"[\w:][\w.:%@\[\]-]*")
"""What ssh may get as the destination: a name, an address, an alias of ssh_config; never an option.

ssh takes an IPv6 address in brackets for a host name."""
_PATTERN = re.compile(r"~?[A-Za-z0-9_.:,*?!&\[\]-]+")
"""The characters of a pattern: names, shell globs, ranges and Ansible's operators."""


def check_pattern(pattern: str) -> None:
    """Raise WrongInput if ``pattern`` has characters that are invalid in names and patterns."""
    if is_address(pattern) or _PATTERN.fullmatch(pattern):
        return
    raise WrongInput(
        f"{pattern!r} is not the name, address or pattern of a machine",
        "letters, digits, dots, dashes and the characters * ? [ ] : , & !",
        "quote patterns, as in 'worker-*'",
    )


def is_address(text: str) -> bool:
    """Whether ``text`` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def canonical(text: str) -> str:
    """An IP address in its one normal form (RFC 5952), and any other text unchanged."""
    return str(ipaddress.ip_address(text)) if is_address(text) else text


def machine_name(address: str) -> str:
    """The name of a machine of which only the address is known: the address, with dashes for the colons of IPv6."""
    if ":" not in address:
        return address
    number, _, zone = address.partition("%")
    # The long form begins and ends with a digit, as a name must.
    return re.sub(r"[^0-9A-Za-z]+", "-", ipaddress.ip_address(number).exploded + (f"-{zone}" if zone else ""))


def check_address(text: str) -> None:
    """Raise WrongInput unless ``text`` can be the address of a machine: an IP address or a host name."""
    if is_address(text):
        return
    if re.fullmatch(r"[0-9.]+", text) or not NAME.fullmatch(text) or ".." in text:
        raise WrongInput(f"{text!r} is not an address", "an IP address such as 10.0.0.1, or a host name", "correct it")


def check_machine(path: object, name: str) -> None:
    """Raise WrongInput unless ``name`` of the inventory ``path`` can be the name of a machine."""
    if len(name) > MOST or not NAME.fullmatch(name):
        raise WrongInput(
            f"{path}: {_shown(name)} is not a machine name",
            f"letters, digits, dots, dashes and underscores, at most {MOST}",
            "rename it, and give the address in ansible_host",
        )


def check_group(path: object, name: str) -> None:
    """Raise WrongInput unless ``name`` of the inventory ``path`` can be the name of a group."""
    if len(name) > MOST or not _GROUP.fullmatch(name):
        raise WrongInput(
            f"{path}: {_shown(name)} is not a group name",
            f"letters, digits, spaces, dots, dashes and underscores, at most {MOST}",
            "rename the group, or what its plugin makes it from",
        )


def check_destination(name: str, variable: str, value: str) -> None:
    """Raise WrongInput unless ``value`` of a machine's variable can be what ssh connects to."""
    if len(value) > MOST or not _HOST.fullmatch(value):
        raise WrongInput(
            f"{variable} of {name} is {_shown(value)}",
            "an IP address without brackets, or a host name",
            "correct it in the inventory",
        )


def _shown(text: str) -> str:
    return repr(text if len(text) <= MOST else f"{text[:40]}...")
