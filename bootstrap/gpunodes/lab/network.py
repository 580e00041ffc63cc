"""The lab's network: a namespace with a bridge, DNS and DHCP server, and one link to the host."""

from __future__ import annotations

import json
from collections.abc import Iterable
from ipaddress import IPv4Network
from pathlib import Path

from gpunodes.lab.host import run
from gpunodes.lab.layout import BRIDGE, SECOND_BRIDGE, LabMachine, LabRecord, Layout, host_address, second_network

_NAMESPACES = Path("/run/netns")
_MOUNTS = Path("/proc/self/mountinfo")
_LISTENING, _FORWARDING = "1", "3"
"""States of a bridge's port (ip-link(8), "bridge_slave"). A listening port passes no frames; the kernel leaves it so,
while it soon enables a disabled one again."""


def exists(layout: Layout) -> bool:
    """Whether the lab's namespace exists."""
    return (_NAMESPACES / layout.namespace).exists()


def inside(layout: Layout, command: Iterable[str | Path]) -> list[str | Path]:
    """The command that runs ``command`` in the namespace (and in a mount namespace of its own: ip-netns(8))."""
    return ["ip", "netns", "exec", layout.namespace, *command]


def ensure(layout: Layout, record: LabRecord) -> None:
    """Create the namespace, the bridges and the link to the host, where they are missing.

    Raises:
        GpunodesError: the kernel refused.
    """
    subnet = IPv4Network(record.subnet)
    if not exists(layout):
        run(["ip", "netns", "add", layout.namespace])
    within = ["ip", "-n", layout.namespace]
    run([*within, "link", "set", "lo", "up"])
    # A fixed hardware address: otherwise a bridge takes that of a machine, and changes it with the machines.
    _ensure_bridge(within, BRIDGE, "52:54:00:ff:ff:01", subnet)
    if record.second_subnet:
        _ensure_bridge(within, SECOND_BRIDGE, "52:54:00:ff:ff:02", second_network(subnet))
    if layout.link not in _links(["ip"]):
        peer = ["peer", "name", "host", "netns", layout.namespace]
        run(["ip", "link", "add", layout.link, "type", "veth", *peer])
    run([*within, "link", "set", "host", "master", BRIDGE, "up"])
    run(["ip", "addr", "replace", f"{host_address(subnet)}/{subnet.prefixlen}", "dev", layout.link])
    run(["ip", "link", "set", layout.link, "up"])


def _ensure_bridge(within: list[str], name: str, address: str, subnet: IPv4Network) -> None:
    if name not in _links(within):
        run([*within, "link", "add", name, "address", address, "type", "bridge", "forward_delay", "0"])
        run([*within, "addr", "add", f"{subnet[1]}/{subnet.prefixlen}", "dev", name])
        run([*within, "link", "set", name, "up"])


def connect(layout: Layout, machine: LabMachine, *, connected: bool) -> None:
    """Let frames of all links of a running machine pass in both directions, or none.

    Its links stay up: the machine sees silence, as behind a switch that fails, and no lost carrier. A machine that is
    switched off and on, or restored, gets new links, which are connected.

    Raises:
        GpunodesError: the machine has no links, as it is off.
    """
    for tap in taps(machine):
        state = _FORWARDING if connected else _LISTENING
        run(["ip", "-n", layout.namespace, "link", "set", "dev", tap, "type", "bridge_slave", "state", state])


def disconnected(layout: Layout) -> set[str]:
    """The links in the lab's namespace that pass no frames, by name."""
    links = json.loads(run(["ip", "-n", layout.namespace, "-d", "-j", "link", "show"]) or "[]")
    states = {link["ifname"]: link.get("linkinfo", {}).get("info_slave_data", {}).get("state") for link in links}
    return {str(name) for name, state in states.items() if state == "listening"}


def taps(machine: LabMachine) -> list[str]:
    """The host's ends of a machine's links."""
    return [f"{prefix}-{machine.name}" for prefix in ("tap", *(("tap2",) if machine.second_link else ()))]


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
    """Fixed addresses by MAC, the machines' names, and ``mirror.lab``; no other name resolves (dnsmasq(8)).

    The second network, where there is one, has the default route, and the first has none.
    """
    lines = [
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
        f"dhcp-leasefile={layout.state}/dnsmasq.leases",
        "dhcp-authoritative",
        "no-ping",
        *_dhcp(BRIDGE, IPv4Network(record.subnet), routes=record.second_subnet is None),
        *(_dhcp(SECOND_BRIDGE, IPv4Network(record.second_subnet), routes=True) if record.second_subnet else ()),
        f"dhcp-option=option:dns-server,{record.gateway}",
        f"host-record=mirror.lab,{record.gateway}",
    ]
    for machine in record.machines:
        lines.append(f"dhcp-host={machine.mac},{machine.address},{machine.name},infinite")
        lines.append(f"host-record={machine.name}.lab,{machine.name},{machine.address}")
        if machine.second_link:
            lines.append(f"dhcp-host={machine.second_link.mac},{machine.second_link.address},infinite")
    return "\n".join(lines) + "\n"


def _dhcp(bridge: str, subnet: IPv4Network, *, routes: bool) -> list[str]:
    # Without a value dnsmasq does not send the option; by default it names itself as the router.
    router = f",{subnet[1]}" if routes else ""
    return [
        f"interface={bridge}",
        f"dhcp-range=set:{bridge},{subnet.network_address},static,{subnet.netmask},infinite",
        f"dhcp-option=tag:{bridge},option:router{router}",
    ]
