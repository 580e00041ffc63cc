"""The preflight checks of addresses, ports and firewalls of one machine. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpunodes.ansible.module_utils.host.spec import Firewall
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import Role, Severity
from gpunodes.planner import firewall, networks, ports


@dataclass(frozen=True, slots=True)
class Case:
    """A machine, and what of the cluster concerns its network."""

    facts: Mapping[str, Any]
    role: Role
    settings: networks.NetworkSettings
    others: Mapping[str, str]
    """The addresses of the other machines and nodes, by name."""
    in_cluster: bool
    """The cluster exists."""
    controls: Mapping[str, str] = field(default_factory=dict)
    """The addresses of the other control planes, {} if there are none."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Of those with which it shares a virtual address."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """The addresses of machines that may join a new cluster later, and are not checked now."""

    def closed(self, found: Mapping[str, Any]) -> list[ports.Port]:
        """The ports of the machine that no rule of an active firewall mentions."""
        return firewall.closed(
            found,
            self.role,
            self.settings.network,
            controls=bool(self.controls),
            shared=bool(self.shared),
            storage=self.settings.storage,
        )

    def rules(self) -> Firewall:
        """What gpunodes would open."""
        return firewall.wanted(
            self.role,
            self.others.values(),
            self.settings.pods,
            self.controls.values(),
            self.shared.values(),
            network=self.settings.network,
            storage=self.settings.storage,
        )


def _tools(case: Case) -> Iterator[Problem]:
    if case.facts["network"] is None:
        yield Problem(
            "its addresses cannot be read: `ip -json address` fails",
            "iproute2, which kubeadm needs too",
            "install the package iproute2 (RHEL family: iproute)",
        )


def _each_other(case: Case) -> Iterator[Problem]:
    yield from networks.among_themselves(case.facts, case.settings)


def _overlaps(case: Case) -> Iterator[Problem]:
    if not networks.is_node(case.facts):
        yield from networks.overlaps(case.facts, case.settings, case.others, case.unread, in_cluster=case.in_cluster)


def _overlap_warnings(case: Case) -> Iterator[Problem]:
    # A node works with the overlap, and its cluster's ranges cannot be changed.
    if networks.is_node(case.facts):
        yield from networks.overlaps(case.facts, case.settings, case.others, {}, in_cluster=True)
    yield from networks.holes(case.facts, case.settings)


def _ports(case: Case) -> Iterator[Problem]:
    yield from ports.taken(case.facts, case.role, case.settings.network)


def _node_ports(case: Case) -> Iterator[Problem]:
    yield from ports.taken_node_ports(case.facts, case.role)


def _firewall(case: Case) -> Iterator[Problem]:
    if case.settings.firewall != firewall.OPEN or networks.is_node(case.facts):
        return
    for each in case.facts["firewalls"]:
        if each["writable"] or not (closed := case.closed(each)):
            continue
        lines = firewall.commands(each, firewall.narrowed(case.rules(), {port.text for port in closed}))
        # Without another machine there is nobody to open the ports to.
        add = f"add `{'`, `'.join(lines)}`" if lines else "open these ports"
        yield Problem(
            f"{_named(each)} drops packets, and gpunodes cannot add rules to it that last: it opens no "
            f"{', '.join(port.text for port in closed)}",
            "open ports, or ufw, firewalld, or a ruleset that the service nftables loads",
            f"{add} where these rules are kept, then set gpunodes_firewall to leave",
        )


def _closed(case: Case) -> Iterator[Problem]:
    if case.settings.firewall != firewall.LEAVE:
        return
    for each in case.facts["firewalls"]:
        if closed := case.closed(each):
            shown = ", ".join(f"{port.text} (from {firewall.who(port)})" for port in closed)
            yield Problem(
                f"{_named(each)} is active, and no rule of it mentions {shown}",
                "open ports: gpunodes_firewall is leave, so gpunodes does not open them",
                "open them if they are closed; `gpunodes ports` lists all",
            )


def _named(found: Mapping[str, Any]) -> str:
    chains = f" (chain {', '.join(found['chains'])})" if found["chains"] else ""
    return f"the firewall {found['name']}{chains}"


CHECKS: Sequence[tuple[str, str, Callable[[Case], Iterator[Problem]], Severity]] = (
    ("network", "the machine's addresses and routes can be read", _tools, Severity.ERROR),
    (
        "ranges",
        "the ranges of pods, services and Docker's bridge do not overlap each other",
        _each_other,
        Severity.ERROR,
    ),
    ("ranges", "no address or route of the machine overlaps these ranges", _overlaps, Severity.ERROR),
    ("ranges", "no route to a larger network contains them", _overlap_warnings, Severity.WARNING),
    ("ports", "the ports of the role are free, or the cluster's own software holds them", _ports, Severity.ERROR),
    ("ports", "no program listens in the range of ports for services", _node_ports, Severity.WARNING),
    ("firewall", "the ports can be opened in every active firewall", _firewall, Severity.ERROR),
    ("firewall", "with gpunodes_firewall: leave, the ports are open, as far as can be read", _closed, Severity.WARNING),
)
"""Name, title, check and severity."""
