"""The cluster's endpoint, at which all machines reach the API, and the virtual address of its control planes. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.ansible.module_utils.host.spec import File, Service, Spec
from gpunodes.ansible.module_utils.packages import RequestedPackage
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.planner import networks, node_address

ENDPOINT = "gpunodes_control_plane_endpoint"
VIP = "gpunodes_control_plane_vip"
ROUTER_ID = "gpunodes_control_plane_vip_router_id"
INTERVAL = "gpunodes_control_plane_vip_interval"
SETTINGS = (ENDPOINT, VIP, ROUTER_ID, INTERVAL, "gpunodes_pod_subnet", "gpunodes_service_subnet")
"""All that ``settings_of`` reads."""
PORT = 6443
CONFIG = "/etc/keepalived/keepalived.conf"
PEERS = "/etc/keepalived/gpunodes-peers.conf"
PROGRAM = "/usr/local/lib/gpunodes/api_check.py"
CHECK_INTERVALS, CHECK_LIMIT_INTERVALS = 2, 5
"""VRRP intervals between two checks of the API server, and the most that a check may take."""
FALL, RISE = 3, 2
"""Failed checks until a machine gives the address up, and successful ones until it may have it."""
MULTICAST_GROUP = "224.0.0.254"
"""Where a control plane without others sends its messages: keepalived uses multicast then. In VRRP's own group routers
with the same router id would take its address away. This one is for experiments, and never forwarded (RFC 4727)."""
_LONGEST_NAME = 253


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """The settings of a machine that concern the endpoint."""

    endpoint: str = ""
    """HOST:PORT of an endpoint that gpunodes does not provide, "" for none."""
    vip: str = ""
    """The virtual address, "" for none."""
    router_id: int = 0
    """The VRRP router id; 0: the last byte of the address."""
    interval_s: int = 1
    pods: str = ""
    services: str = ""

    @property
    def requested(self) -> str:
        """HOST:PORT that the settings request, "" if they leave it to the first control plane's address."""
        return with_port(self.vip or self.endpoint)

    @property
    def last_byte(self) -> int:
        return int(self.vip.rpartition(".")[2] or 0)


def settings_of(settings: Mapping[str, Any]) -> EndpointSettings:
    """The endpoint's settings by the names of settings; those that are missing have their defaults."""
    return EndpointSettings(
        endpoint=str(settings.get(ENDPOINT) or "").strip(),
        vip=str(settings.get(VIP) or "").strip(),
        router_id=int(settings.get(ROUTER_ID) or 0),
        interval_s=int(settings.get(INTERVAL) or 1),
        pods=str(settings.get("gpunodes_pod_subnet") or ""),
        services=str(settings.get("gpunodes_service_subnet") or ""),
    )


def with_port(endpoint: str) -> str:
    """HOST:PORT, with the API's usual port if the text has none; "" stays empty."""
    return endpoint if not endpoint or ":" in endpoint else f"{endpoint}:{PORT}"


def host_of(endpoint: str) -> str:
    """The host of HOST:PORT."""
    return endpoint.rpartition(":")[0] or endpoint


def conflicts(settings: EndpointSettings) -> Iterator[Problem]:
    """What is wrong with the virtual address itself, and with it beside other settings."""
    if not settings.vip:
        return
    if not node_address.is_ipv4(settings.vip):
        yield Problem(f"{VIP} is {settings.vip!r}", "an IPv4 address", "correct it in the inventory")
        return
    if settings.endpoint and with_port(settings.endpoint) != settings.requested:
        yield Problem(
            f"{ENDPOINT} is {settings.endpoint}, but {VIP} is {settings.vip}",
            f"one of them: with the virtual address the endpoint is {settings.requested}",
            f"remove {ENDPOINT} from the inventory, or {VIP}",
        )
    address = ipaddress.ip_address(settings.vip)
    for setting, ranges in (("gpunodes_pod_subnet", settings.pods), ("gpunodes_service_subnet", settings.services)):
        if any(address in each for each in networks.ranges_of(ranges)):
            yield Problem(
                f"{VIP} is {settings.vip}, which is in {setting} {ranges}",
                "a free address in the network of the control planes",
                f"correct {VIP} in the inventory",
            )
    if not (settings.router_id or settings.last_byte):
        yield Problem(
            f"{VIP} is {settings.vip}, whose last byte is 0", "a VRRP router id, 1 to 255", f"set {ROUTER_ID} to one"
        )


def control_planes(
    names: Collection[str],
    facts: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    reached: Mapping[str, str],
    nodes: Sequence[Mapping[str, Any]],
) -> list[str]:
    """The addresses of all control planes in the cluster: those of its nodes, and of the machines of this run.

    ``names`` are the control planes of the inventory; facts, settings and the addresses by which the machines are
    reached are those of this run's machines, by name.
    """
    found = {str(node["address"]) for node in nodes if node.get("role") == "control_plane" and node.get("address")}
    found |= set(node_address.of_all(names, facts, settings, reached))
    return sorted((each for each in found if node_address.is_ipv4(each)), key=ipaddress.IPv4Address)


def interface(facts: Mapping[str, Any], address: str, vip: str) -> str:
    """The network device with a machine's ``address``, if its network contains the virtual address too; else ""."""
    for device in (facts["network"] or {"devices": ()})["devices"]:
        for each in device["addresses"]:
            own = _interface(each)
            if own and str(own.ip) == address and ipaddress.ip_address(vip) in own.network:
                return str(device["name"])
    return ""


def _interface(text: str) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface | None:
    try:
        return ipaddress.ip_interface(text)
    except ValueError:
        # A machine may report any digits and dots.
        return None


def outside(facts: Mapping[str, Any], address: str, vip: str) -> Problem:
    """The problem of a machine with ``address`` whose network does not contain the virtual address."""
    own = [
        f"{each} on {device['name']}"
        for device in (facts["network"] or {"devices": ()})["devices"]
        for each in device["addresses"]
        if each.startswith(f"{address}/")
    ]
    return Problem(
        f"the network of its address in the cluster ({', '.join(own) or address}) does not contain {vip}",
        "a virtual address in the network of each control plane: VRRP works inside of one network",
        f"correct {VIP}, or use a load balancer and set {ENDPOINT}",
    )


def keepalived(
    settings: EndpointSettings, device: str, address: str, peers: Sequence[str], program: str, *, first: bool
) -> Spec:
    """keepalived on the control plane with this device and ``address``; ``peers`` are all control planes.

    ``program`` is the source of the check of the API server (module_utils/api_check.py). The ``first`` control plane
    has the virtual address while no API server is ready, so that kubeadm can create the cluster there.
    """
    interval_s = settings.interval_s
    return Spec(
        packages=(RequestedPackage("keepalived"),),
        files=(
            File(PROGRAM, program),
            peers_file(address, peers),
            File(
                CONFIG,
                _CONFIG.format(
                    group=MULTICAST_GROUP,
                    vip=settings.vip,
                    device=device,
                    address=address,
                    router_id=settings.router_id or settings.last_byte,
                    interval=interval_s,
                    check=f"{PROGRAM}{' first' if first else ''}",
                    check_interval=CHECK_INTERVALS * interval_s,
                    check_limit=CHECK_LIMIT_INTERVALS * interval_s,
                    fall=FALL,
                    rise=RISE,
                    peers=PEERS,
                ),
                mode="0600",
            ),
        ),
        directories=("/etc/keepalived",),
        services=(Service("keepalived"),),
    )


def settle_s(settings: EndpointSettings) -> int:
    """Seconds after a restart of keepalived until the machine may take the address over again."""
    return (RISE + 1) * CHECK_INTERVALS * settings.interval_s


def peers_file(address: str, control_planes: Sequence[str]) -> File:
    """The file with the addresses of the control planes other than the one with ``address``."""
    listed = "".join(f"{each}\n" for each in control_planes if each != address)
    return File(PEERS, f"# Managed by gpunodes.\n{listed}")


# Each machine starts as BACKUP, and one that comes back does not take the address from another one (nopreempt). Until
# its check has succeeded, it does not take the address at all (init_fail). VRRP version 3 takes the interval from the
# messages, so that it can be changed on one machine after the other. No password: the messages are sent to the other
# control planes only, and VRRP's password is sent as plain text; only theirs count (check_unicast_src). Source:
# keepalived.conf(5), keepalived 2.1 to 2.3.
_CONFIG = """\
# Managed by gpunodes.
global_defs {{
    enable_script_security
    script_user nobody
    vrrp_version 3
    vrrp_mcast_group4 {group}
}}

vrrp_script api {{
    script "/usr/bin/python3 -IS {check}"
    interval {check_interval}
    timeout {check_limit}
    fall {fall}
    rise {rise}
    init_fail
}}

vrrp_instance gpunodes {{
    state BACKUP
    nopreempt
    interface {device}
    virtual_router_id {router_id}
    priority 100
    advert_int {interval}
    unicast_src_ip {address}
    check_unicast_src
    unicast_peer {{
        include {peers}
    }}
    virtual_ipaddress {{
        {vip}/32 dev {device}
    }}
    track_script {{
        api
    }}
}}
"""
