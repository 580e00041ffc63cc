"""The address ranges of a cluster, and what in the machines' networks overlaps them. Pure."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.planner import tables

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAMED = 4
"""Overlaps that a message names."""


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """The settings of a machine that concern its network."""

    pods: str = ""
    """One range, or several with commas; "" if it is not known."""
    services: str = ""
    runtime: str = "containerd"
    firewall: str = "open"
    network: str = "flannel"
    storage: bool = False
    """The machine serves shares of gpunodes_storage."""


@dataclass(frozen=True, slots=True)
class _Range:
    title: str
    network: Network
    setting: str
    devices: Sequence[str]
    """The devices that the cluster's software makes for it."""


@dataclass(frozen=True, slots=True)
class _Overlap:
    range: _Range
    what: str
    """The address or route, with its device."""
    device: str
    is_wider: bool = False
    """It is a route through a gateway to a larger network, in which the range is a hole."""

    def __str__(self) -> str:
        return f"{self.range.title} {self.range.network} overlaps {self.what}"


def settings_of(settings: Mapping[str, Any], *, storage: bool = False) -> NetworkSettings:
    """The network's settings by the names of settings; those that are missing have defaults that check nothing.

    ``storage``: the machine serves shares.
    """
    return NetworkSettings(
        pods=str(settings.get("gpunodes_pod_subnet") or ""),
        services=str(settings.get("gpunodes_service_subnet") or ""),
        runtime=str(settings.get("gpunodes_runtime") or "containerd"),
        firewall=str(settings.get("gpunodes_firewall") or "open"),
        network=str(settings.get("gpunodes_network") or "flannel"),
        storage=storage,
    )


def ranges_of(text: str) -> list[Network]:
    """The networks of a setting; what is no network is left out, because the settings have their own check."""
    found = []
    for part in text.split(","):
        try:
            found.append(ipaddress.ip_network(part.strip(), strict=False))
        except ValueError:
            continue
    return found


def is_node(facts: Mapping[str, Any]) -> bool:
    """Whether the machine is a node, or its join was interrupted: the cluster's software may have made its devices."""
    return bool(facts["kubernetes"]["role"] or facts["kubernetes"].get("unfinished"))


def among_themselves(facts: Mapping[str, Any], settings: NetworkSettings) -> Iterator[Problem]:
    """The ranges that overlap each other, in one problem."""
    found = [
        f"{a.title} {a.network} overlaps {b.title} {b.network}"
        for a, b in itertools.combinations(_ranges(facts, settings), 2)
        if a.network.overlaps(b.network)
    ]
    if found:
        names = dict.fromkeys(each.setting for each in _ranges(facts, settings))
        yield Problem("; ".join(found), "ranges without a common address", f"change one of {', '.join(names)}")


def overlaps(
    facts: Mapping[str, Any],
    settings: NetworkSettings,
    others: Mapping[str, str],
    unread: Mapping[str, str],
    *,
    in_cluster: bool,
) -> Iterator[Problem]:
    """What of the machine's network overlaps a range, in one problem; routes to larger networks are not among it.

    ``others`` are the addresses of the other machines by name, which check their own networks; ``unread`` those of
    machines that may join later. ``in_cluster``: the cluster exists, its ranges are fixed.
    """
    found = [each for each in _all(facts, settings, others, unread) if not each.is_wider]
    if found:
        yield Problem(_shown(found), "ranges that nothing else uses", _remedy(found, facts, in_cluster=in_cluster))


def holes(facts: Mapping[str, Any], settings: NetworkSettings) -> Iterator[Problem]:
    """Routes through a gateway to networks that contain a range, in one problem: they work around the range."""
    if found := [each for each in _all(facts, settings, {}, {}) if each.is_wider]:
        yield Problem(
            _shown(found),
            "ranges that no route leads to",
            "check that no machine that the nodes or pods must reach has an address in that range",
        )


def _ranges(facts: Mapping[str, Any], settings: NetworkSettings) -> list[_Range]:
    table = tables.read("networks")
    pods, services, docker = (table[name]["devices"] for name in ("pods", "services", "docker"))
    found = [_Range("gpunodes_pod_subnet", each, "gpunodes_pod_subnet", pods) for each in ranges_of(settings.pods)]
    found += [
        _Range("gpunodes_service_subnet", each, "gpunodes_service_subnet", services)
        for each in ranges_of(settings.services)
    ]
    network = facts["network"] or {"devices": (), "docker_bridge": ""}
    # A bridge that exists is a device like others, with an address of its own.
    if settings.runtime == "docker" and not any(each["name"] in docker for each in network["devices"]):
        bridge = network["docker_bridge"] or table["docker"]["bridge"]
        title, setting = "the range of Docker's bridge", '"bip" in /etc/docker/daemon.json of the machine'
        found += [_Range(title, each, setting, docker) for each in ranges_of(bridge)]
    return found


def _all(
    facts: Mapping[str, Any], settings: NetworkSettings, others: Mapping[str, str], unread: Mapping[str, str]
) -> list[_Overlap]:
    network = facts["network"]
    if network is None:
        return []
    made = {*itertools.chain(*(each["devices"] for each in tables.read("networks").values()))}
    own = made if is_node(facts) else set()
    devices = [device for device in network["devices"] if device["name"] not in own]
    routes = [route for route in network["routes"] if route["device"] not in own]
    found: list[_Overlap] = []
    for each in _ranges(facts, settings):
        found += [*_of_addresses(each, devices), *_of_routes(each, routes, devices)]
        # Docker avoids the networks of its machine, and knows no other machine.
        further = {**others, **unread} if each.setting.startswith('"bip"') else unread
        found += [
            _Overlap(each, f"the address {address} of {name}", "")
            for name, address in further.items()
            if any(each.network.overlaps(other) for other in ranges_of(address))
        ]
    return found


def _of_addresses(each: _Range, devices: Sequence[Mapping[str, Any]]) -> Iterator[_Overlap]:
    for device in devices:
        for address in device["addresses"]:
            if any(each.network.overlaps(linked) for linked in _without_loopback(address)):
                yield _Overlap(each, f"the address {address} of {device['name']}", device["name"])


def _of_routes(
    each: _Range, routes: Sequence[Mapping[str, Any]], devices: Sequence[Mapping[str, Any]]
) -> Iterator[_Overlap]:
    """The routes, without those that an address implies."""
    implied = {
        (device["name"], linked)
        for device in devices
        for address in device["addresses"]
        for linked in _without_loopback(address)
    }
    for route in routes:
        for target in _without_loopback(route["to"]):
            if each.network.overlaps(target) and (route["device"], target) not in implied:
                via = f" through {route['gateway']}" if route["gateway"] else ""
                table = f" (table {route['table']})" if route.get("table") else ""
                is_wider = bool(route["gateway"]) and target.prefixlen < each.network.prefixlen
                what = f"the route to {target}{via} of {route['device']}{table}"
                yield _Overlap(each, what, route["device"], is_wider)


def _without_loopback(text: str) -> list[Network]:
    return [each for each in ranges_of(text) if not each.is_loopback]


def _shown(found: Sequence[_Overlap]) -> str:
    more = len(found) - _NAMED
    return "; ".join(map(str, found[:_NAMED])) + (f"; and {more} more" if more > 0 else "")


def _remedy(found: Sequence[_Overlap], facts: Mapping[str, Any], *, in_cluster: bool) -> str:
    made = [each for values in tables.read("networks").values() for each in values["devices"]]
    left = list(dict.fromkeys(each.device for each in found if each.device in made))
    if left and not is_node(facts):
        commands = "; ".join(f"ip link delete {device}" for device in left)
        return f"if another cluster or Docker left {' and '.join(left)} behind, `{commands}`"
    settings = " and ".join(dict.fromkeys(each.range.setting for each in found))
    if in_cluster and "subnet" in settings:
        return "change that address or route, or use another machine: the ranges of a cluster cannot be changed"
    return f"set {settings} to a range that is free on all machines, or change that address or route"
