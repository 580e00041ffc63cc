"""Which firewalls are active on a machine, and what they let in, as far as their rules can be read. Changes nothing."""

from __future__ import annotations

import re
from typing import Any

from ..problem import MachineProblem
from . import firewalld, iptables, nftables, ufw

_MOST = 200
"""The most ports that are reported for a firewall."""


def read() -> list[dict[str, Any]]:
    """The firewalls that drop what nothing accepts.

    Each has its ``name``, the ports that it lets in from somewhere (``open``: ``6443/tcp``, ``22``, ``112/vrrp``, ``*``
    for all), and ``writable``, whether gpunodes can add rules that last. ``chains`` are those of nftables,
    ``inet filter input``.
    """
    found: list[dict[str, Any]] = []
    is_ufw = ufw.is_active()
    if is_ufw:
        try:
            ports = ufw.open_ports(ufw.added())
        except MachineProblem:
            ports = []
        found.append(_firewall("ufw", ports))
    if firewalld.is_active():
        found.append(_firewall("firewalld", firewalld.open_ports()))
    if chains := nftables.chains():
        ports = nftables.open_ports()
        found.append(_firewall("nftables", ports, nftables.is_persistent(), [str(chain) for chain in chains]))
    rules = iptables.rules()
    # ufw's rules are those of iptables.
    if not is_ufw and iptables.is_dropping(rules):
        found.append(_firewall("iptables", iptables.open_ports(rules), writable=False, chains=["INPUT"]))
    return found


def _firewall(name: str, ports: list[str], writable: bool = True, chains: list[str] | None = None) -> dict[str, Any]:
    # firewalld also knows ports of other protocols, such as sctp.
    known = [port for port in dict.fromkeys(ports) if re.fullmatch(r"\*|[0-9]+(-[0-9]+)?(/(tcp|udp|vrrp))?", port)]
    return {"name": name, "open": known[:_MOST], "writable": writable, "chains": chains or []}
