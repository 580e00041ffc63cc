"""The ports of a cluster: what listens where and who must reach it, and what else holds a port. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import Role
from gpunodes.planner import tables

PODS = "pods"
"""The unit of programs that run in pods."""


@dataclass(frozen=True, slots=True)
class Port:
    """A row of the table ports.toml, which explains the fields."""

    port: str
    """A number, or a range ``30000-32767``."""
    protocol: str
    on: str
    from_: str
    purpose: str
    listener: str = ""
    unit: str = ""
    device: str = ""
    network: str = ""

    @property
    def first(self) -> int:
        return int(self.port.partition("-")[0])

    @property
    def last(self) -> int:
        return int(self.port.rpartition("-")[2])

    @property
    def text(self) -> str:
        """``tcp 6443``."""
        return f"{self.protocol} {self.port}"

    def is_held_by(self, socket: Mapping[str, Any]) -> bool:
        """Whether a socket, as host_facts reports it, is that of the cluster's own listener."""
        if self.device:
            return bool(socket["interface"] == self.device)
        return bool(self.listener and socket["program"] == self.listener and socket["unit"] == self.unit)


@functools.cache
def all_ports() -> Sequence[Port]:
    """All rows of the table."""
    rows = tables.read("ports")["port"]
    return tuple(Port(**{"from_" if key == "from" else key: value for key, value in row.items()}) for row in rows)


def of(role: Role, *, network: str = "flannel", storage: bool = False) -> Sequence[Port]:
    """The ports of a machine with this role; a control plane is a node too.

    ``network``: the value of gpunodes_network. ``storage``: it serves shares.
    """
    own = {"node": True, "control_plane": role is Role.CONTROL_PLANE, "storage": storage}
    return [port for port in all_ports() if own[port.on] and port.network in {"", network}]


def taken(facts: Mapping[str, Any], role: Role, network: str) -> Iterator[Problem]:
    """The ports of the role that something else than the cluster's own listener holds, in one problem."""
    rows = [port for port in of(role, network=network) if port.listener != "sshd" and port.from_ != "clients"]
    if found := _held(facts, rows):
        port, socket = found[0]
        yield Problem(
            "; ".join(f"{port.text} is in use by {holder(socket)}" for port, socket in found),
            f"free ports: {', '.join(dict.fromkeys(f'{port.text} is for {port.purpose}' for port, _ in found))}",
            _remedy(port, socket),
        )


def taken_node_ports(facts: Mapping[str, Any], role: Role) -> Iterator[Problem]:
    """The ports in the range of services that a program holds, unless it runs in a pod: a service may get them."""
    found = _held(facts, [port for port in of(role) if port.from_ == "clients"])
    if found := [(port, socket) for port, socket in found if socket["unit"] != PODS]:
        yield Problem(
            "; ".join(f"{port.protocol} {socket['port']} is in use by {holder(socket)}" for port, socket in found),
            f"no listener on {found[0][0].port}: the cluster gives these ports to services of type NodePort, "
            "whose traffic then no longer reaches the program",
            "move the program to another port",
        )


def _held(facts: Mapping[str, Any], rows: Sequence[Port]) -> list[tuple[Port, Mapping[str, Any]]]:
    """Each port in ``rows`` that a foreign socket holds; each holder of a port once, though it may have several."""
    found: dict[tuple[str, int, str], tuple[Port, Mapping[str, Any]]] = {}
    for port in rows:
        for socket in facts["sockets"]:
            matches = socket["protocol"] == port.protocol and port.first <= socket["port"] <= port.last
            if matches and not port.is_held_by(socket):
                found.setdefault((port.protocol, socket["port"], holder(socket)), (port, socket))
    return list(found.values())


def holder(socket: Mapping[str, Any]) -> str:
    """Who holds a socket, in words: ``nginx (pid 812, nginx.service)``."""
    if socket["interface"]:
        return f"the kernel, for the network interface {socket['interface']}"
    if not socket["program"]:
        return "the kernel"
    unit = {"": "", PODS: ", in a pod"}.get(socket["unit"] or "", f", {socket['unit']}")
    return f"{socket['program']} (pid {socket['pid']}{unit})"


def _remedy(port: Port, socket: Mapping[str, Any]) -> str:
    if socket["interface"]:
        return f"if nothing needs it, remove it with `ip link delete {socket['interface']}`"
    if not socket["program"]:
        flags = "-lunp" if port.protocol == "udp" else "-ltnp"
        return f"see `ss {flags} 'sport = :{socket['port']}'`"
    if socket["unit"] and socket["unit"] != PODS:
        return f"if nothing needs it, `systemctl disable --now {socket['unit']}`; else move it to another port"
    return "stop it, or move it to another port"
