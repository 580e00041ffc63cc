"""The virtual address of the control planes, on this machine and in its network."""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from . import addresses, disk, endpoints, network
from .host.changes import Changes
from .host.converge import converge
from .host.spec import Spec
from .problem import MachineProblem
from .process import must
from .report import Difference, Report, of_file

CONFIG = "/etc/keepalived/keepalived.conf"
_SELINUX = "/sys/fs/selinux"
_BOOLEAN = "keepalived_connect_any"
MARK = "# Managed by gpunodes."
_SERVICE = "keepalived"
_ADDRESS = re.compile(r"^ +([0-9.]{7,15})/32 dev ", re.MULTILINE)
"""An address in the configuration of gpunodes (planner/endpoint.py)."""
_ETHERNET = "1"
"""ARPHRD_ETHER in /sys/class/net/DEVICE/type."""
_ARP = 0x0806
_REPLY = 2
_FRAME = struct.Struct("!6s6sH HHBBH 6s4s6s4s")
"""An Ethernet frame with an ARP packet for IPv4 (RFC 826)."""
_PROBES, _PROBE_S = 2, 0.5
_POLL_S = 0.5
_TRIES, _PAUSE_S = 6, 5.0
"""How often the endpoint is asked after keepalived was stopped: a load balancer notices the end of a server later."""


def read(address: str) -> dict[str, Any] | None:
    """What this machine knows of the virtual address; None without one.

    ``held``: the machine has it; ``managed``: by a keepalived of gpunodes; ``foreign``: keepalived has a configuration
    that gpunodes did not write; ``others``: other addresses in one that it wrote. ``mac``: the MAC address of the
    network interface for it, "" without one; ``answers``: the MAC addresses of other hosts that answer for the address.
    ``confined``: SELinux keeps keepalived's programs from connecting to the API server.
    """
    if not address:
        return None
    config = disk.read(CONFIG) or ""
    managed = config.startswith(MARK)
    held = is_held(address)
    device = device_for(address)
    mac = _mac(device)
    return {
        "held": held,
        "managed": held and managed,
        "foreign": bool(config) and not managed,
        "others": [each for each in _ADDRESS.findall(config) if each != address] if managed else [],
        "mac": mac,
        "answers": [] if held or not mac else answers(device, mac, address),
        "confined": is_confined(),
    }


def is_confined() -> bool:
    """Whether SELinux enforces a policy that lets keepalived connect to no port, unless its boolean is on."""
    enforces = (disk.read(f"{_SELINUX}/enforce") or "").strip() == "1"
    # "0 1": the present value, and the one that is pending.
    boolean = (disk.read(f"{_SELINUX}/booleans/{_BOOLEAN}") or "").split()
    return enforces and boolean[:1] == ["0"]


def is_held(address: str) -> bool:
    """Whether this machine has the address."""
    return address in addresses.own()


def device_for(address: str) -> str:
    """The network device in whose network the address is, "" for none."""
    wanted = ipaddress.ip_address(address)
    for device in (network.read() or {"devices": ()})["devices"]:
        for each in device["addresses"]:
            own = ipaddress.ip_interface(each)
            # keepalived gives the address to a device without its network.
            if own.network.num_addresses > 1 and wanted in own.network:
                return str(device["name"])
    return ""


def _mac(device: str) -> str:
    if not device or (disk.read(f"/sys/class/net/{device}/type") or "").strip() != _ETHERNET:
        return ""
    return (disk.read(f"/sys/class/net/{device}/address") or "").strip().lower()


def answers(device: str, mac: str, address: str) -> list[str]:
    """The MAC addresses of the hosts that answer an ARP probe for the address (RFC 5227); takes about a second."""
    found = []
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ARP)) as link:
        link.bind((device, _ARP))
        for _ in range(_PROBES):
            link.send(probe(mac, address))
            deadline = time.monotonic() + _PROBE_S
            while (left := deadline - time.monotonic()) > 0:
                link.settimeout(left)
                try:
                    frame = link.recv(2048)
                except OSError:
                    break
                if (sender := answer(frame, address)) and sender != mac:
                    found.append(sender)
    return list(dict.fromkeys(found))


def probe(mac: str, address: str) -> bytes:
    """The frame that asks who has the address. Its sender's address is empty, so that it changes no host's table."""
    own = bytes.fromhex(mac.replace(":", ""))
    nobody, empty = b"\xff" * 6, b"\0" * 6
    packet = (1, 0x0800, 6, 4, 1, own, b"\0" * 4, empty, socket.inet_aton(address))
    return _FRAME.pack(nobody, own, _ARP, *packet)


def answer(frame: bytes, address: str) -> str:
    """The MAC address in an answer for the address, "" for any other frame."""
    if len(frame) < _FRAME.size:
        return ""
    _, _, kind, _, protocol, _, _, operation, mac, sender, _, _ = _FRAME.unpack(frame[: _FRAME.size])
    if (kind, protocol, operation) != (_ARP, 0x0800, _REPLY) or sender != socket.inet_aton(address):
        return ""
    return ":".join(f"{byte:02x}" for byte in mac)


def keep(spec: Spec, address: str, settle_s: float, limit_s: float, *, here: bool, check: bool) -> Changes:
    """Bring keepalived into its desired state, and wait until a machine has the address.

    A restarted keepalived may take the address over only after ``settle_s``: this waits so long, so that the next
    machine is restarted only then. ``limit_s``: how long to wait for the address, 0 for not at all; ``here``: this
    machine must have it. Raises MachineProblem if it is not there in time.
    """
    changes = converge(spec, check)
    if check or not limit_s:
        return changes
    if any(action.partition(" ")[0] in {"start", "restart"} for action in changes.actions):
        time.sleep(settle_s)
    deadline = time.monotonic() + limit_s
    while not (is_held(address) or (not here and _has_owner(address))):
        if time.monotonic() > deadline:
            raise MachineProblem(
                f"{'this machine does not have' if here else 'no control plane has'} the virtual address {address}",
                "keepalived on a control plane that has it",
                f"see `journalctl -u {_SERVICE}` there",
            )
        time.sleep(_POLL_S)
    return changes


def give_up(endpoint: str, check: bool) -> Report:
    """Stop the keepalived of gpunodes and remove its configuration, if ``endpoint``, HOST:PORT, works without it.

    A reset removes the rest. Raises MachineProblem, and leaves keepalived running, if the endpoint leads to its
    address: others need not show it, such as a load balancer, so the endpoint is asked when the address is gone.
    """
    report, config = Report(), disk.read(CONFIG) or ""
    if not config.startswith(MARK):
        return report
    own = _ADDRESS.findall(config)
    if {*own} & {*endpoints.read([endpoint])[0]["resolved"]}:
        raise _needed(endpoint, own, "it resolves to that")
    report.add(f"stop {_SERVICE}", Difference(f"service {_SERVICE}", {"enabled": True}, {"enabled": False}))
    report.add(f"remove {CONFIG}", *of_file(CONFIG, None))
    if not check:
        must(["systemctl", "stop", _SERVICE])
        if error := _error(endpoint):
            must(["systemctl", "start", _SERVICE])
            raise _needed(endpoint, own, f"without that: {error}")
        # While the file is there, a run that was interrupted is continued.
        must(["systemctl", "disable", _SERVICE])
        disk.remove(CONFIG)
    return report


def _needed(endpoint: str, own: Sequence[str], why: str) -> MachineProblem:
    return MachineProblem(
        f"{endpoint} leads to the virtual address {', '.join(own)} of keepalived ({why})",
        "an endpoint that leads to the control planes' own addresses",
        "correct what the name or the load balancer leads to, then run the same command again; or request the virtual "
        "address again by gpunodes_control_plane_vip",
    )


def _error(endpoint: str) -> str:
    """Why the endpoint does not respond, "" as soon as it does."""
    for attempt in range(_TRIES):
        time.sleep(_PAUSE_S if attempt else 0)
        if not (error := str(endpoints.read([endpoint])[0]["error"])):
            return ""
    return error


def _has_owner(address: str) -> bool:
    device = device_for(address)
    mac = _mac(device)
    return bool(mac and answers(device, mac, address))
