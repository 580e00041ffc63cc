"""Rules of iptables that an administrator wrote. gpunodes only reads them: no common place keeps them at a reboot."""

from __future__ import annotations

import re

from ..process import run
from .wanted import OPEN_VRRP


def drops() -> bool:
    """Whether the chain INPUT drops what nothing accepts; rules of ufw count too."""
    return is_dropping(run(["iptables-save"]).out)


def is_dropping(rules: str) -> bool:
    """The same for the output of iptables-save."""
    if re.search(r"^:INPUT DROP\b", rules, re.MULTILINE):
        return True
    return re.search(r"^-A INPUT -j (DROP|REJECT)\b", rules, re.MULTILINE) is not None


def open_ports(rules: str) -> list[str]:
    """The ports that rules of the chain INPUT accept, ``6443/tcp``, ``112/vrrp``, ``*`` for all."""
    found = []
    for line in rules.splitlines():
        if not re.match(r"-A INPUT .*-j ACCEPT\b", line):
            continue
        protocol = re.search(r" -p (tcp|udp)\b", line)
        ports = re.search(r" --dports? ([0-9:,]+)", line)
        if ports and protocol:
            found += [f"{number.replace(':', '-')}/{protocol[1]}" for number in ports[1].split(",")]
        elif re.search(r" -p (vrrp|112)\b", line):
            found.append(OPEN_VRRP)
        elif re.fullmatch(r"-A INPUT -s \S+ -j ACCEPT", line):
            found.append("*")
    return found


def rules() -> str:
    """The output of iptables-save, "" without iptables."""
    return run(["iptables-save"]).out
