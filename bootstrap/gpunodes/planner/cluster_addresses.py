"""The addresses in the cluster of the machines that preflight checks, and of the other nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes.model import Role
from gpunodes.planner import node_address
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts


def node_addresses(candidate: MachineFacts) -> node_address.Addresses:
    """What the address of a machine follows from; only of one whose facts were read."""
    return node_address.Addresses(
        candidate.name, candidate.node_address, candidate.address, candidate.facts or {}, candidate.node
    )


def _other_nodes(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> list[Mapping[str, Any]]:
    """The nodes of machines that are not checked."""
    own = {each.node["name"] for each in candidates if each.node}
    return [node for node in requirements.nodes if node["name"] not in own]


def of_all(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> dict[str, str]:
    """The addresses in the cluster that nodes have, and that machines have or get, by name."""
    found = {str(node["name"]): str(node.get("address", "")) for node in _other_nodes(candidates, requirements)}
    own = {each.name: _address_of(each) for each in candidates if each.role is not Role.GPU_HOST}
    return {name: address for name, address in {**found, **own}.items() if address}


def _address_of(candidate: MachineFacts) -> str:
    """The address of a machine in the cluster; one that cannot have the requested address has its own finding."""
    chosen = node_address.chosen(node_addresses(candidate)) if candidate.facts else None
    if isinstance(chosen, str):
        return chosen
    default = (candidate.facts or {}).get("default_address")
    return str(candidate.node.get("address") or default or candidate.address)


def of_controls(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> dict[str, str]:
    """The addresses of the control planes by name, if there are several; the inventory counts before they join."""
    nodes = [node for node in requirements.nodes if node.get("role") == "control_plane"]
    own = [each.name for each in candidates if each.role is Role.CONTROL_PLANE]
    listed = requirements.control_planes.machines
    if max(len(nodes), len(own), len(listed)) < 2:  # noqa: PLR2004 - a single one has no others
        return {}
    others = [str(node["name"]) for node in _other_nodes(candidates, requirements) if node in nodes]
    known = requirements.addresses
    return {**listed, **{name: known[name] for name in (*others, *own) if name in known}}
