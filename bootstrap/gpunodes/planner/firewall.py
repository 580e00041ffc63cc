"""What the firewall of a node must let through, and what active firewalls seem to keep closed. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpunodes.ansible.module_utils.host.spec import Firewall
from gpunodes.model import Role
from gpunodes.planner import networks, ports, tables

LABEL = "gpunodes.dev/firewall"
"""Node label: the active firewalls in which gpunodes opened the node's ports, joined by dots. Others that join must be
added to them."""
OPEN, LEAVE = "open", "leave"
"""The choices of gpunodes_firewall."""
_OPENED = ("users", "cluster", "nodes")
"""Who must reach the ports that are opened on every machine of a role; services of type NodePort are opened by those
who decide for whom."""


def wanted(
    role: Role,
    addresses: Iterable[str],
    pods: str,
    controls: Iterable[str] = (),
    shared: Iterable[str] = (),
    *,
    network: str = "flannel",
    storage: bool = False,
) -> Firewall:
    """What the firewall of a machine with this role lets through.

    ``addresses`` are those of the cluster's machines; what is no address, such as a name, is left out. ``pods``: the
    range of pods. ``controls``: the addresses of the control planes, if there are several; ``shared``: of those that
    share a virtual address. ``network``: the value of gpunodes_network. ``storage``: it serves shares.
    """
    machines = usable(addresses)
    ranges = [str(each) for each in networks.ranges_of(pods)]
    sources = {
        "users": [],
        "cluster": [*machines, *ranges],
        "nodes": machines,
        "control_planes": usable(controls),
        "virtual_address": usable(shared),
    }
    return Firewall(
        # A port without sources would be open to everyone.
        ports={
            port.text: sources[port.from_]
            for port in ports.of(role, network=network, storage=storage)
            if port.from_ in sources and (port.from_ == "users" or sources[port.from_])
        },
        devices=tables.read("networks")["pods"]["devices"],
        sources=machines,
        pods=ranges,
    )


def narrowed(rules: Firewall, texts: Collection[str]) -> Firewall:
    """The same for some ports only, such as ``tcp 6443``."""
    return replace(rules, ports={port: sources for port, sources in rules.ports.items() if port in texts})


def usable(addresses: Iterable[str]) -> list[str]:
    """The addresses among these texts that a machine can have, each once and in order."""
    found: set[Any] = set()
    for text in addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if not (address.is_unspecified or address.is_loopback or address.is_multicast or address.is_link_local):
            found.add(address)
    return [str(address) for address in sorted(found, key=lambda each: (each.version, each))]


def label_of(facts: Mapping[str, Any]) -> str:
    """The value of the label: the firewalls in which gpunodes opens ports, "" for none."""
    return ".".join(sorted(each["name"] for each in facts["firewalls"] if each["writable"]))


def labels(facts: Mapping[str, Any], setting: str) -> dict[str, str]:
    """The label by which later joins find the machines whose firewalls must let the new ones in, if it has one."""
    value = label_of(facts) if setting == OPEN else ""
    return {LABEL: value} if value else {}


def closed(
    firewall: Mapping[str, Any],
    role: Role,
    network: str,
    *,
    controls: bool = False,
    shared: bool = False,
    storage: bool = False,
) -> list[ports.Port]:
    """The ports that must be open and that no rule of a firewall mentions; whom its rules let in is not examined.

    ``controls``: there are other control planes; ``shared``: they share a virtual address. ``storage``: the machine
    serves shares.
    """
    opened = {*_OPENED, *(["control_planes"] if controls else []), *(["virtual_address"] if shared else [])}
    needed = [port for port in ports.of(role, network=network, storage=storage) if port.from_ in opened]
    return [port for port in needed if not any(_covers(text, port) for text in firewall["open"])]


def _covers(text: str, port: ports.Port) -> bool:
    if text == "*":
        return True
    numbers, _, protocol = text.partition("/")
    if not protocol and port.protocol not in {"tcp", "udp"}:
        return False
    first, _, last = numbers.partition("-")
    return protocol in {"", port.protocol} and int(first) <= port.first and port.last <= int(last or first)


def who(port: ports.Port) -> str:
    """Who must reach a port, in words."""
    return WHO[port.from_]


WHO: Mapping[str, str] = {
    "controller": "the controller",
    "users": "all machines, pods, and users of kubectl",
    "cluster": "all machines of the cluster, and pods",
    "nodes": "all machines of the cluster",
    "control_planes": "the other control planes",
    "virtual_address": "control planes with the same virtual address",
    "clients": "clients of these services",
    "machine": "only the machine itself",
}
"""Who must reach a port, by the table's `from`."""


def commands(firewall: Mapping[str, Any], rules: Firewall) -> list[str]:
    """The commands that open the ports in a firewall to which gpunodes cannot add rules that last."""
    chains: Sequence[str] = firewall["chains"]
    found = []
    for port, sources in rules.ports.items():
        protocol, _, number = port.partition(" ")
        old = [each for each in sources if ":" not in each]
        has_ports = protocol in {"tcp", "udp"}
        if firewall["name"] == "iptables":
            source = f" -s {','.join(old)}" if old else ""
            target = f" --dport {number}" if has_ports else ""
            found.append(f"iptables -I INPUT -p {protocol}{source}{target} -j ACCEPT")
            continue
        source = f" ip saddr {{ {', '.join(old)} }}" if old else ""
        match = f"{protocol} dport {number}" if has_ports else f"meta l4proto {number}"
        found += [f"nft insert rule {chain}{source} {match} accept" for chain in chains if "forward" not in chain]
    return found
