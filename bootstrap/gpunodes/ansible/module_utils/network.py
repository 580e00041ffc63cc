"""The addresses and routes of a machine, as iproute2 lists them. Changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from . import disk
from .problem import MachineProblem
from .process import must

_NO_ROUTES = ("local", "broadcast", "multicast", "anycast", "throw")
_DROPS = ("blackhole", "prohibit", "unreachable")
_TABLE = re.compile(r"[A-Za-z0-9_.-]{0,32}")
"""Numbers, and names of /etc/iproute2/rt_tables."""
DOCKER_CONFIG = "/etc/docker/daemon.json"


def read() -> dict[str, Any] | None:
    """Devices with their addresses, and the routes of all tables; None without iproute2."""
    try:
        devices = json.loads(must(["ip", "-json", "-details", "address", "show"]) or "[]")
        routes = [
            route
            for family in ("-4", "-6")
            for route in json.loads(must(["ip", "-json", family, "route", "show", "table", "all"]) or "[]")
        ]
    except (MachineProblem, ValueError):
        return None
    return {
        "devices": parse_devices(devices),
        "routes": parse_routes(routes),
        "docker_bridge": docker_bridge(disk.read(DOCKER_CONFIG) or ""),
    }


def parse_devices(listed: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Name, addresses with their prefix lengths, and the UDP port of a VXLAN device, of ``ip -json -details address``.

    Link-local addresses are left out: they are the same on every link.
    """
    return [
        {
            "name": device["ifname"],
            "addresses": [
                f"{address['local']}/{address['prefixlen']}"
                for address in device.get("addr_info", ())
                if "local" in address and address.get("scope") != "link"
            ],
            "udp_port": _udp_port(device.get("linkinfo") or {}),
        }
        for device in listed
        if "ifname" in device
    ]


def _udp_port(info: Mapping[str, Any]) -> int | None:
    """The port on which the kernel listens for a tunnel: VXLAN and Geneve have one."""
    port = (info.get("info_data") or {}).get("port") if info.get("info_kind") in {"vxlan", "geneve"} else None
    return port if isinstance(port, int) else None


def parse_routes(listed: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Destination, device, gateway and table of each route of ``ip -json route``; default routes are left out.

    A route with several gateways has the first one; one that drops packets (blackhole) has no device. The main table is
    "". The machine's own addresses, and routes that only end a table (throw), lead nowhere. Tables for policy routing
    repeat routes of the main one: each is listed once. What they drop says nothing of other packets.
    """
    routes: dict[tuple[str, ...], dict[str, Any]] = {}
    for route in sorted(listed, key=lambda each: str(each.get("table", ""))):
        to = str(route.get("dst", ""))
        if to in {"", "default"} or to.startswith(("fe80:", "ff00:")):
            continue
        if route.get("table") == "local" or route.get("type") in _NO_ROUTES:
            continue
        if route.get("table") and route.get("type") in _DROPS:
            continue
        hop = next(iter(route.get("nexthops") or [route]))
        gateway = hop.get("gateway") or (hop.get("via") or {}).get("host") or ""
        found = {"to": to, "device": str(hop.get("dev") or route.get("type") or ""), "gateway": str(gateway)}
        table = str(route.get("table", ""))
        routes.setdefault(tuple(found.values()), {**found, "table": table if _TABLE.fullmatch(table) else "?"})
    return list(routes.values())


def docker_bridge(config: str) -> str:
    """The address and prefix length of Docker's bridge in its daemon.json (``bip``), "" if it is not set."""
    try:
        found = json.loads(config or "{}").get("bip")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""
