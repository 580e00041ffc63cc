"""The lab's network: a namespace with a bridge, DNS and DHCP server, and one link to the host."""

from __future__ import annotations

import json
from collections.abc import Iterable
from ipaddress import IPv4Network
from pathlib import Path

from gpunodes.lab.host import run
from gpunodes.lab.layout import BRIDGE, LabRecord, Layout, host_address

_NAMESPACES = Path("/run/netns")
_MOUNTS = Path("/proc/self/mountinfo")


def exists(layout: Layout) -> bool:
    """Whether the lab's namespace exists."""
    return (_NAMESPACES / layout.namespace).exists()


def inside(layout: Layout, command: Iterable[str | Path]) -> list[str | Path]:
    """The command that runs ``command`` in the namespace (and in a mount namespace of its own: ip-netns(8))."""
    return ["ip", "netns", "exec", layout.namespace, *command]


def ensure(layout: Layout, subnet: IPv4Network) -> None:
    """Create the namespace, the bridge and the link to the host, where they are missing.

    Raises:
        GpunodesError: the kernel refused.
    """
    if not exists(layout):
        run(["ip", "netns", "add", layout.namespace])
    within = ["ip", "-n", layout.namespace]
    if BRIDGE not in _links(within):
        gateway = f"{subnet[1]}/{subnet.prefixlen}"
        run([*within, "link", "set", "lo", "up"])
        # A fixed hardware address: otherwise the bridge takes that of a machine, and changes it with the machines.
        address = "52:54:00:ff:ff:01"
        run([*within, "link", "add", BRIDGE, "address", address, "type", "bridge", "forward_delay", "0"])
        run([*within, "addr", "add", gateway, "dev", BRIDGE])
        run([*within, "link", "set", BRIDGE, "up"])
    if layout.link not in _links(["ip"]):
        peer = ["peer", "name", "host", "netns", layout.namespace]
        run(["ip", "link", "add", layout.link, "type", "veth", *peer])
    run([*within, "link", "set", "host", "master", BRIDGE, "up"])
    run(["ip", "addr", "replace", f"{host_address(subnet)}/{subnet.prefixlen}", "dev", layout.link])
    run(["ip", "link", "set", layout.link, "up"])


def remove(layout: Layout) -> None:
    """Remove the namespace and the link, where they exist."""
    if layout.link in _links(["ip"]):
        run(["ip", "link", "delete", layout.link])
    if exists(layout):
        run(["ip", "netns", "delete", layout.namespace])
    # `ip netns add` mounts the folder of namespaces, and nothing unmounts it.
    if _NAMESPACES.is_dir() and not any(_NAMESPACES.iterdir()):
        if any(line.split()[4] == str(_NAMESPACES) for line in _MOUNTS.read_text().splitlines()):
            run(["umount", "--no-mtab", _NAMESPACES])
        _NAMESPACES.rmdir()


def _links(ip: list[str]) -> set[str]:
    return {str(link["ifname"]) for link in json.loads(run([*ip, "-j", "link", "show"]) or "[]")}


def dnsmasq_config(layout: Layout, record: LabRecord) -> str:
    """Fixed addresses by MAC, the machines' names, and ``mirror.lab``; no other name resolves (dnsmasq(8))."""
    network = IPv4Network(record.subnet)
    lines = [
        f"interface={BRIDGE}",
        "bind-interfaces",
        "keep-in-foreground",
        "user=root",
        "group=root",
        "pid-file=",
        "log-facility=-",
        "no-resolv",
        "no-hosts",
        "local=/lab/",
        "domain=lab",
        f"dhcp-range={network.network_address},static,{network.netmask},infinite",
        f"dhcp-leasefile={layout.state}/dnsmasq.leases",
        "dhcp-authoritative",
        "no-ping",
        f"dhcp-option=option:router,{record.gateway}",
        f"dhcp-option=option:dns-server,{record.gateway}",
        f"host-record=mirror.lab,{record.gateway}",
    ]
    for machine in record.machines:
        lines.append(f"dhcp-host={machine.mac},{machine.address},{machine.name},infinite")
        lines.append(f"host-record={machine.name}.lab,{machine.name},{machine.address}")
    return "\n".join(lines) + "\n"
