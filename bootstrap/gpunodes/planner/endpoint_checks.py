"""The preflight checks of the cluster's endpoint and of the virtual address of its control planes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.model import Role, Severity
from gpunodes.planner import endpoint, node_address
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts

Facts = Mapping[str, Any]
_SHOWN = 8
"""Names of a certificate that a message lists."""


def macs(facts: Sequence[Facts]) -> list[str]:
    """The MAC addresses of the interfaces on which these machines have, or would have, the virtual address."""
    return [mac for each in facts if (mac := (each.get("virtual_address") or {}).get("mac"))]


def _settings(candidate: MachineFacts, _: Facts, __: ClusterRequirements) -> Iterator[Problem]:
    if candidate.role is Role.CONTROL_PLANE:
        yield from endpoint.conflicts(candidate.endpoint)


def _virtual_address(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    vip, found = candidate.endpoint.vip, facts.get("virtual_address")
    if candidate.role is not Role.CONTROL_PLANE or not node_address.is_ipv4(vip):
        return
    addresses = node_address.Addresses(candidate.name, candidate.node_address, candidate.address, facts, candidate.node)
    own = node_address.chosen(addresses)
    if isinstance(own, str) and facts["network"] and not endpoint.interface(facts, own, vip):
        yield endpoint.outside(facts, own, vip)
    if owners := [name for name, address in requirements.addresses.items() if address == vip]:
        yield Problem(f"{vip} is the address of {owners[0]}", *_FREE)
    if found:
        yield from _in_use(vip, found, requirements)


def _selinux(candidate: MachineFacts, facts: Facts, _: ClusterRequirements) -> Iterator[Problem]:
    found = facts.get("virtual_address") or {}
    if candidate.role is Role.CONTROL_PLANE and candidate.endpoint.vip and found.get("confined"):
        yield Problem(
            "SELinux is enforcing, and its boolean keepalived_connect_any is off",
            "a keepalived whose check reaches port 6443 of the API servers: else it gives the virtual address up",
            f"run `setsebool -P keepalived_connect_any on` on it, or use a load balancer and set {endpoint.ENDPOINT}",
        )


def before_move(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    """What is in the way of a virtual address to which an existing cluster moves."""
    yield from _settings(candidate, facts, requirements)
    yield from _virtual_address(candidate, facts, requirements)


def _in_use(vip: str, found: Mapping[str, Any], requirements: ClusterRequirements) -> Iterator[Problem]:
    if found["foreign"]:
        yield Problem(
            f"{endpoint.CONFIG} exists, and gpunodes did not write it",
            "a machine on which nothing else uses keepalived",
            "remove keepalived if nothing needs it, or use a load balancer and set gpunodes_control_plane_endpoint",
        )
    if (host := endpoint.host_of(requirements.endpoint)) in found["others"]:
        yield Problem(
            f"{vip} would replace {host}, at which all machines of the cluster reach its API",
            "an endpoint that works until the last machine has left it",
            f"set {endpoint.ENDPOINT} to a name or a load balancer in place of {endpoint.VIP}, move there, and then on",
        )
    if found["held"] and not found["managed"]:
        yield Problem(f"it has the address {vip} without keepalived", *_FREE)
    # The control planes of a cluster with this endpoint need not be part of this run.
    ours = requirements.macs if endpoint.host_of(requirements.endpoint) != vip else {*found["answers"]}
    if foreign := sorted({*found["answers"]} - {*ours}):
        yield Problem(f"{vip} is in use: the host with the MAC address {foreign[0]} answers for it", *_FREE)


_FREE = ("an address that no machine has", f"correct {endpoint.VIP}, or free the address")


def _of_cluster(candidate: MachineFacts, _: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    wanted, present = candidate.endpoint.requested, requirements.endpoint
    if candidate.role is Role.CONTROL_PLANE and wanted and present and wanted != endpoint.with_port(present):
        setting = endpoint.VIP if candidate.endpoint.vip else endpoint.ENDPOINT
        yield Problem(
            f"the endpoint of its cluster is {present}, but {setting} requests {wanted}",
            "the same endpoint",
            f"run `gpunodes endpoint set {wanted}`, or correct {setting}",
        )


def _given(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    """The endpoint that gpunodes does not provide: a load balancer or a name."""
    if not candidate.endpoint.endpoint or candidate.endpoint.vip:
        return
    wanted = candidate.endpoint.requested
    for found in facts.get("endpoints") or ():
        if found["endpoint"] == wanted:
            yield from unusable(found, connects=bool(requirements.ca_hash))


def unusable(found: Mapping[str, Any], *, connects: bool, named: bool = True) -> Iterator[Problem]:
    """Why a machine cannot use an endpoint, by its fact ``endpoints``.

    ``connects``: an API server exists behind it; ``named``: its certificate must have the endpoint's name already.
    """
    wanted, host = found["endpoint"], endpoint.host_of(found["endpoint"])
    if not found["resolved"]:
        yield Problem(
            f"{host} does not resolve to an IPv4 address on it",
            "a name that all machines resolve",
            f"add it to your DNS, or to /etc/hosts of each machine, or correct {endpoint.ENDPOINT}",
        )
    elif connects and found["error"]:
        yield Problem(
            f"it does not reach the API at {wanted}: {found['error']}",
            "an endpoint that leads to every control plane",
            f"correct the load balancer, the firewalls between, or {endpoint.ENDPOINT}",
        )
    elif connects and named and found["names"] and host not in found["names"]:
        names = ", ".join(found["names"][:_SHOWN])
        yield Problem(
            f"the certificate of the API server at {wanted} is not for {host} (it is for {names})",
            "a certificate with the name of the endpoint",
            f"run `gpunodes endpoint set {wanted}`",
        )


def _control_planes(candidate: MachineFacts, facts: Facts, requirements: ClusterRequirements) -> Iterator[Problem]:
    known = {str(node.get("address")) for node in requirements.nodes if node.get("role") == "control_plane"}
    probed = facts.get("endpoints") or ()
    # The addresses in the cluster may be others than those of SSH, and known only by the settings.
    reached = {address for found in probed for address in found["resolved"]}
    if missing := sorted(known - reached) if probed else []:
        yield Problem(
            f"whether it reaches the control plane at {', '.join(missing)} was not checked: the inventory has another "
            "address of that machine",
            "the address of each control plane in the cluster",
            "set gpunodes_node_address of that machine to the address in the inventory",
        )
    for found in probed:
        if found["endpoint"] != candidate.endpoint.requested and known & {*found["resolved"]} and found["error"]:
            yield Problem(
                f"it does not reach the control plane at {found['endpoint']}: {found['error']}",
                "a way to port 6443 of every control plane, since each may be the next behind the endpoint",
                "start that control plane, or open the port in the firewalls between; `gpunodes ports` lists all",
            )


CHECKS: Sequence[tuple[str, Callable[[MachineFacts, Facts, ClusterRequirements], Iterator[Problem]], Severity]] = (
    ("the virtual address and the endpoint of the settings do not contradict each other", _settings, Severity.ERROR),
    ("the virtual address is free, and in the control plane's network", _virtual_address, Severity.ERROR),
    ("the cluster has the endpoint that the settings request", _of_cluster, Severity.ERROR),
    ("a given endpoint resolves, leads to the API, and is in its certificate", _given, Severity.ERROR),
    ("the machine reaches every control plane", _control_planes, Severity.WARNING),
    ("SELinux lets keepalived check the API servers", _selinux, Severity.WARNING),
)
"""Title, check and severity."""
