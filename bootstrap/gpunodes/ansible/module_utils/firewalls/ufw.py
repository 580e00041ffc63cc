"""ufw, by its own commands. Rules are compared in the form in which `ufw show added` prints them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence

from .. import disk
from ..host.spec import Firewall
from ..problem import MachineProblem
from ..process import must, run
from .wanted import FAMILIES, MARK, OPEN_VRRP, VRRP, of_family, split

PROGRAM = "/usr/sbin/ufw"
CONFIG = "/etc/ufw/ufw.conf"
DEFAULTS = "/etc/default/ufw"


def is_installed() -> bool:
    """Whether its rules can be changed; its configuration stays when the package is removed."""
    return os.path.exists(PROGRAM)


def is_active() -> bool:
    """Whether ufw is enabled; a disabled one filters nothing."""
    return (
        is_installed()
        and re.search(r"^ENABLED=[\"']?yes\b", disk.read(CONFIG) or "", re.MULTILINE | re.IGNORECASE) is not None
    )


def added() -> dict[str, str]:
    """The administrator's rules, ``allow 22/tcp``, with their comments."""
    return parse(must(["ufw", "show", "added"]))


def parse(listing: str) -> dict[str, str]:
    """``ufw show added``: lines of ``ufw RULE comment 'TEXT'``."""
    found = {}
    for line in listing.splitlines():
        if line.startswith("ufw "):
            rule, _, comment = line[len("ufw ") :].strip().partition(" comment ")
            found[rule.strip()] = "".join(shlex.split(comment)) if comment.count("'") % 2 == 0 else comment
    return found


def rules(wanted: Firewall) -> list[str]:
    """The rules that open the ports and forward the packets of pods."""
    versions = FAMILIES if _has_ipv6() else FAMILIES[:1]
    found = []
    for port, sources in wanted.ports.items():
        protocol, number = split(port)
        number = number.replace("-", ":")
        if not sources:
            found.append(f"allow {number}/{protocol}")
        for version in versions:
            for source in of_family(sources, version):
                target = "" if port == VRRP else f" to any port {number}"
                found.append(f"allow from {source}{target} proto {protocol}")
    for device in wanted.devices:
        found.append(f"route allow in on {device}")
        for version in versions:
            for source in of_family(wanted.sources, version):
                found.append(f"route allow out on {device} from {source}")
    return found


def _has_ipv6() -> bool:
    return re.search(r"^IPV6=[\"']?no\b", disk.read(DEFAULTS) or "", re.MULTILINE | re.IGNORECASE) is None


def check_vrrp(missing: Iterable[str]) -> None:
    """Raise MachineProblem if a rule to add is for VRRP, which ufw knows since 0.36.2 (its ChangeLog)."""
    found = re.search(r"(\d+(\.\d+)+)", run(["ufw", "version"]).out)
    version = found[1] if found else "0"
    needed = [rule for rule in missing if rule.endswith(" proto vrrp")]
    if needed and tuple(map(int, version.split("."))) < (0, 36, 2):
        source = needed[0].split()[2]
        raise MachineProblem(
            f"ufw {version} has no rules for VRRP, which the virtual address of the control planes needs",
            "ufw 0.36.2 or newer",
            f"add `-A ufw-before-input -p vrrp -s {source} -j ACCEPT` to /etc/ufw/before.rules for each other control "
            "plane, and set gpunodes_firewall to leave",
        )


def opposed(rule: str, present: Iterable[str]) -> str:
    """The administrator's rule that refuses the same packets, "" for none: ufw then skips the new one."""
    others = {rule.replace("allow ", f"{action} ", 1) for action in ("deny", "reject")}
    return next((each for each in present if each in others), "")


def is_limited(rule: str, present: Iterable[str]) -> bool:
    """Whether the administrator allows the same packets up to a rate."""
    return rule.replace("allow ", "limit ", 1) in present


def add(rule: str) -> None:
    """Add a rule before the others: it only accepts, and one behind an administrator's `deny` has no effect."""
    kind, words = _words(rule)
    must(["ufw", *kind, "prepend", *words, "comment", MARK])


def delete(listed: Iterable[str]) -> None:
    """Delete rules; nothing for those that do not exist."""
    for rule in listed:
        kind, words = _words(rule)
        must(["ufw", "--force", *kind, "delete", *words])


def _words(rule: str) -> tuple[Sequence[str], Sequence[str]]:
    words = rule.split()
    return (words[:1], words[1:]) if words[0] == "route" else ((), words)


def open_ports(listed: Iterable[str]) -> list[str]:
    """The ports that rules allow from somewhere, ``6443/tcp``, ``22`` for both protocols, ``*`` for all."""
    found = []
    for rule in listed:
        if not re.match(r"(allow|limit) ", rule) or " out " in f" {rule} ":
            continue
        protocol = re.search(r" proto (tcp|udp|vrrp)\b", rule)
        port = re.search(r" port ([0-9:,]+)", rule) or re.search(
            r"^\w+ (?:in )?(?:on \S+ )?([0-9:,]+)(?:/(tcp|udp))?$", rule
        )
        if protocol and protocol[1] == "vrrp":
            found.append(OPEN_VRRP)
        elif port:
            kind = protocol[1] if protocol else (*port.groups(), None)[1]
            found += [f"{number.replace(':', '-')}{f'/{kind}' if kind else ''}" for number in port[1].split(",")]
        elif " from " in rule and not protocol:
            found.append("*")
    return found
