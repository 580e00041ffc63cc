"""The addresses of Services of type LoadBalancer: the setting gpunodes_load_balancer_addresses. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Any

from gpunodes.planner import node_address

SETTING = "gpunodes_load_balancer_addresses"
WANTED = "IPv4 addresses, networks or ranges of your network, such as [10.0.0.200-10.0.0.220], 1,024 at most"
_MOST = 1024


def blocks(given: Any) -> list[str]:
    """The addresses as networks in CIDR notation, in order, without overlaps; raises ValueError for others."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(WANTED)
    found: list[ipaddress.IPv4Network] = []
    for each in given:
        first, is_range, last = str(each).partition("-")
        if is_range:
            ends = (ipaddress.IPv4Address(end.strip()) for end in (first, last))
            found += ipaddress.summarize_address_range(*ends)
        else:
            found.append(ipaddress.IPv4Network(str(each).strip()))
    merged = list(ipaddress.collapse_addresses(found))
    if sum(each.num_addresses for each in merged) > _MOST or not all(map(node_address.is_usable, merged)):
        raise ValueError(WANTED)
    return [str(each) for each in merged]


def is_valid(given: Any) -> bool:
    """Whether ``blocks`` accepts it."""
    try:
        blocks(given)
    except ValueError:
        return False
    return True


def clash(given: Any, addresses: Iterable[str], networks: Iterable[str]) -> str:
    """The first of the cluster's own addresses or networks that is among the given ones, "" for none.

    What is no IPv4 address or network is passed over. Two machines that answer for one address cut each other off.
    """
    ours = [ipaddress.ip_network(each) for each in blocks(given)]
    for text in [*addresses, *networks]:
        try:
            other = ipaddress.ip_network(text.strip(), strict=False)
        except ValueError:
            continue
        if any(each.version == other.version and each.overlaps(other) for each in ours):
            return text
    return ""
