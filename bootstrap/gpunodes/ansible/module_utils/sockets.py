"""The sockets on which a machine listens, and who holds them. Reads /proc, changes nothing."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import disk

PROC = "/proc"
PODS = "pods"
"""The unit of programs in pods: the kubelet makes a cgroup below kubepods for each pod."""
_EPHEMERAL = (32768, 60999)
"""The first and last port that the kernel gives to outgoing connections, unless it is configured otherwise."""
UDP = frozenset({8472})
"""The cluster's UDP ports (planner/tables/ports.toml), which count also among those of outgoing connections."""
# States of include/net/tcp_states.h: TCP_LISTEN, and for UDP TCP_CLOSE, a socket without a peer.
_WAITING = {"tcp": "0A", "udp": "07"}
_ESTABLISHED = "01"
_MOST = 1000
"""The most sockets that are reported."""
_NO_PEER = "0000"


def read(devices: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The listening sockets with their holders, by port.

    ``devices`` are the machine's network devices (network.py): for a tunnel the kernel itself listens, and no process.
    """
    tunnels = {device["udp_port"]: device["name"] for device in devices if device["udp_port"]}
    first, last = _ephemeral()
    fixed = UDP | tunnels.keys()
    found = []
    for protocol in ("tcp", "udp"):
        for suffix in ("", "6"):
            table = disk.read(f"{PROC}/net/{protocol}{suffix}") or ""
            # An outgoing UDP query looks like a service; the kernel gives these their port.
            found += [
                each
                for each in parse(table, protocol)
                if protocol == "tcp" or not first <= each["port"] <= last or each["port"] in fixed
            ]
    holders = _holders({each["inode"] for each in found})
    sockets: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in found:
        holder = holders.get(each.pop("inode"), {"pid": None, "program": None, "unit": None})
        interface = tunnels.get(each["port"]) if each["protocol"] == "udp" and holder["pid"] is None else None
        socket = {**each, **holder, "interface": interface}
        sockets.setdefault(tuple(socket.values()), socket)
    return sorted(sockets.values(), key=lambda each: (each["port"], each["protocol"], each["address"]))[:_MOST]


def parse(table: str, protocol: str) -> list[dict[str, Any]]:
    """The waiting sockets of /proc/net/tcp, tcp6, udp or udp6: protocol, address, port and inode."""
    found = []
    for line in table.splitlines():
        fields = line.split()
        # number, local and remote address, state, queues, timer, retransmits, user, timeout, inode
        if len(fields) < 10 or fields[3] != _WAITING[protocol] or fields[2].rpartition(":")[2] != _NO_PEER:  # noqa: PLR2004 - the fields above
            continue
        address, _, port = fields[1].rpartition(":")
        found.append(
            {"protocol": protocol, "address": _address(address), "port": int(port, 16), "inode": int(fields[9])}
        )
    return found


def peers(port: int) -> set[str]:
    """The addresses that are connected to a TCP port of this machine."""
    found = set()
    for suffix in ("", "6"):
        for line in (disk.read(f"{PROC}/net/tcp{suffix}") or "").splitlines():
            fields = line.split()
            if len(fields) > 3 and fields[3] == _ESTABLISHED and int(fields[1].rpartition(":")[2], 16) == port:  # noqa: PLR2004 - the fields above
                address = ipaddress.ip_address(_address(fields[2].rpartition(":")[0]))
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def _address(text: str) -> str:
    """An address in /proc/net: words of 32 bits in the machine's byte order."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _ephemeral() -> tuple[int, int]:
    text = disk.read(f"{PROC}/sys/net/ipv4/ip_local_port_range") or ""
    first, last = map(int, text.split()) if text.split() else _EPHEMERAL
    return first, last


def _holders(inodes: set[int]) -> dict[int, dict[str, Any]]:
    """The process that holds each socket; none for sockets of the kernel.

    Several processes may share one, such as a service's workers: the oldest counts.
    """
    wanted = {f"socket:[{inode}]": inode for inode in inodes if inode}
    found: dict[int, dict[str, Any]] = {}
    for pid in sorted(int(name) for name in os.listdir(PROC) if name.isdigit()):
        if not wanted:
            break
        holder: dict[str, Any] = {}
        # A process may end meanwhile.
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"{PROC}/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inode = wanted.pop(os.readlink(f"{PROC}/{pid}/fd/{descriptor}"), None)
                    if inode is not None:
                        holder = holder or _process(pid)
                        found[inode] = holder
    return found


def _process(pid: int) -> dict[str, Any]:
    program = ""
    with contextlib.suppress(OSError):
        program = os.path.basename(os.readlink(f"{PROC}/{pid}/exe").replace(" (deleted)", ""))
    cgroup = ""
    with contextlib.suppress(OSError):
        program = program or (disk.read(f"{PROC}/{pid}/comm") or "").strip()
        cgroup = disk.read(f"{PROC}/{pid}/cgroup") or ""
    return {"pid": pid, "program": program or "an unknown program", "unit": unit_of(cgroup.splitlines())}


def unit_of(lines: Sequence[str]) -> str | None:
    """The systemd unit of a process by its /proc/PID/cgroup, ``pods`` in a pod, None outside of services."""
    for line in lines:
        parts = line.rpartition(":")[2].split("/")
        if any(part.startswith("kubepods") for part in parts):
            return PODS
    for line in lines:
        for part in reversed(line.rpartition(":")[2].split("/")):
            if re.fullmatch(r"[A-Za-z0-9:_.\\@-]{1,240}\.(service|scope)", part):
                return part
    return None
