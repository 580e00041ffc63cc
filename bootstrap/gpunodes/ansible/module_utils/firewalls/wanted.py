"""What a firewall of a node must let through, checked: the text of rules is made of nothing else."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..problem import MachineProblem

MARK = "gpunodes"
"""The comment of every rule that gpunodes adds."""
FAMILIES = (4, 6)
VRRP = "vrrp 112"
"""The only protocol without ports that is opened (RFC 9568), by its name and its number."""
OPEN_VRRP = "112/vrrp"
"""The same among the open ports of a firewall."""
NAMES_OF_VRRP = ("vrrp", "112", 112)
"""How listings of rules name it."""


def check(ports: Mapping[str, Sequence[str]], devices: Iterable[str], *sources: Iterable[str]) -> None:
    """Raise MachineProblem unless these are ports, devices, addresses and networks."""
    wrong = [name for name in ports if name != VRRP and not re.fullmatch(r"(tcp|udp) [0-9]{1,5}(-[0-9]{1,5})?", name)]
    wrong += [name for name in devices if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}", name)]
    for each in (*ports.values(), *sources):
        wrong += [text for text in each if not _is_network(text)]
    if wrong:
        raise MachineProblem(f"{wrong[0]!r} cannot be opened in a firewall", "ports, devices, addresses and networks")


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def of_family(texts: Iterable[str], version: int) -> list[str]:
    """The addresses and networks of one IP version, in order, without those inside of another one.

    Neighbours are not joined: an address more must not change the rules of others.
    """
    given: set[Any] = {each for each in map(ipaddress.ip_network, texts) if each.version == version}
    large = [each for each in given if each.num_addresses > 1]
    found = [each for each in given if not any(each != other and each.subnet_of(other) for other in large)]
    return [str(each.network_address) if each.num_addresses == 1 else str(each) for each in sorted(found)]


def split(port: str) -> tuple[str, str]:
    """``tcp 6443``: protocol and number."""
    protocol, _, number = port.partition(" ")
    return protocol, number
