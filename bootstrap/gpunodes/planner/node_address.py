"""The address of a machine in its cluster: that of its kubelet, and on a control plane also that of the API. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem

SETTING = "gpunodes_node_address"
_ONLY_IPV4 = "clusters with IPv6 are not supported"
_MOST = 8
"""Addresses of a machine that a message names."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """What the address of a machine follows from."""

    machine: str
    requested: str
    """The setting gpunodes_node_address: an address, a network, or "" for neither."""
    reached: str
    """The address or name by which the inventory reaches the machine."""
    facts: Mapping[str, Any]
    """A result of the module host_facts."""
    node: Mapping[str, Any]
    """The machine's node in the cluster (from cluster_info), {} if it has none."""

    @property
    def own(self) -> Sequence[str]:
        """The IPv4 addresses of the machine's interfaces."""
        return self.facts.get("addresses") or ()

    @property
    def joined(self) -> Sequence[str]:
        """The addresses with which the machine joined its cluster, that of its API first; empty outside of a cluster.

        A node that an interrupted join left does not count: it is deleted before the machine joins again.
        """
        kubernetes = self.facts["kubernetes"]
        if not kubernetes["role"]:
            return ()
        found = (kubernetes.get("advertised"), self.node.get("address"))
        return [address for address in dict.fromkeys(found) if address and is_ipv4(address)]


def chosen(given: Addresses) -> str | Problem:
    """The address of the machine in the cluster, or why it cannot have the requested one.

    Without a request a machine keeps the address with which it joined. A machine outside of a cluster gets the address
    by which it is reached, if it is its own, else that of its default route.
    """
    if given.requested.strip():
        return _requested(given)
    if given.joined:
        return given.joined[0]
    if given.reached in given.own:
        return given.reached
    default = given.facts["default_address"] or ""
    if is_ipv4(default):
        return str(default)
    return Problem(
        f"it has no IPv4 default route, and is not reached by an IPv4 address of its own ({_listed(given.own)})",
        f"an IPv4 address of it in the cluster: {_ONLY_IPV4}",
        f"set {SETTING} to one of its addresses",
    )


def of_all(
    names: Collection[str],
    facts: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    reached: Mapping[str, str],
) -> list[str]:
    """The addresses that those of these machines have, or get, in the cluster of which there are facts.

    Facts, settings and the addresses by which machines are reached are by the machines' names. A machine without an
    address is left out: preflight reports it.
    """
    found = [
        chosen(Addresses(name, str(settings[name][SETTING]), reached[name], facts[name], {}))
        for name in names
        if facts.get(name)
    ]
    return [address for address in found if isinstance(address, str)]


def problems(given: Addresses, nodes: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    """Why the machine cannot have its address in the cluster with these nodes (from cluster_info)."""
    if isinstance(found := chosen(given), Problem):
        yield found
    if given.facts["kubernetes"]["role"]:
        return
    # Only of control planes: a worker could report any address, and so stop all joins.
    controls = [node for node in nodes if node.get("role") == "control_plane"]
    ipv6 = [address for node in controls for address in node.get("addresses", ()) if is_ipv6(address)]
    if ipv6:
        yield Problem(
            f"the control plane of its cluster has the address {ipv6[0]}",
            f"a cluster with IPv4 addresses only: {_ONLY_IPV4}",
            "join it to another cluster",
        )


def lost(given: Addresses) -> Iterator[Problem]:
    """The problem of a machine that no longer has the address with which it joined, if its addresses are known."""
    missing = [address for address in given.joined if address not in {*given.own, given.facts["default_address"]}]
    if missing and given.own:
        yield Problem(
            f"it joined with the address {missing[0]}, which it no longer has ({_listed(given.own)})",
            "the address with which it joined",
            f"give it that address again, or {_rejoin(given)}",
        )


def is_ipv4(text: str) -> bool:
    """Whether a text is an IPv4 address."""
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def is_usable(given: ipaddress.IPv4Address | ipaddress.IPv4Network) -> bool:
    """Whether machines of a network may have this address, or the addresses of this network."""
    first = given.network_address if isinstance(given, ipaddress.IPv4Network) else given
    special = given.is_loopback or given.is_multicast or given.is_link_local or given.is_reserved
    return not special and first.packed[0] != 0


def is_ipv6(text: str) -> bool:
    """Whether a text is an IPv6 address."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _network(text: str) -> ipaddress.IPv4Network | None:
    """The IPv4 network in CIDR notation, or that of a single address; None for anything else."""
    try:
        return ipaddress.IPv4Network(text.strip(), strict=False)
    except ValueError:
        return None


def _requested(given: Addresses) -> str | Problem:
    wanted = _network(given.requested)
    if wanted is None:
        return Problem(
            f"{SETTING} is {given.requested!r}",
            f"an IPv4 address of the machine, or a network such as 10.0.0.0/24; {_ONLY_IPV4}",
            "correct it in the inventory",
        )
    matching = [address for address in given.own if ipaddress.IPv4Address(address) in wanted]
    kept = [address for address in given.joined if address in matching]
    if not matching:
        one = "the address" if wanted.num_addresses == 1 else "an address in the network"
        return Problem(
            f"it does not have {one} {given.requested.strip()} of {SETTING} ({_listed(given.own)})",
            "one of its addresses, or a network that contains one of them",
            f"correct {SETTING} in the inventory",
        )
    if len(matching) > 1 and not kept:
        return Problem(
            f"it has {len(matching)} addresses in the network {given.requested.strip()} of {SETTING} "
            f"({', '.join(matching[:_MOST])})",
            "one address in it",
            f"set {SETTING} to one of them, or to a smaller network",
        )
    found = (kept or matching)[0]
    if others := [address for address in given.joined if address != found]:
        return Problem(
            f"{SETTING} selects {found}, but it joined with the address {others[0]}",
            "the address with which it joined: an address cannot be changed in a cluster",
            f"correct {SETTING}, or {_rejoin(given)}",
        )
    return found


def _rejoin(given: Addresses) -> str:
    rejoins = f"run `gpunodes remove {given.machine}`, then join it again"
    if given.facts["kubernetes"]["role"] == "control_plane":
        alone = f"make a new cluster after `gpunodes reset {given.machine}`, which destroys this one"
        return f"{rejoins}; if it is the only control plane, {alone}"
    return rejoins


def _listed(own: Sequence[str]) -> str:
    more = f" and {len(own) - _MOST} more" if len(own) > _MOST else ""
    return f"it has {', '.join(own[:_MOST])}{more}" if own else "it has no IPv4 address"
