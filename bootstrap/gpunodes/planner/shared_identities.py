"""Identities that machines share with each other or with nodes, and the nodes of machines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.identity.matcher import Matcher
from gpunodes.identity.model import described, reported
from gpunodes.identity.values import same_uuid
from gpunodes.model import PreflightFinding, Role
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts

# Identities that must be unique in a cluster. Source: kubernetes.io, "Verify the MAC address and product_uuid".
_UNIQUE = {
    "hostname": "set another with `hostnamectl set-hostname NAME`",
    "machine_id": "the disk was copied: remove /etc/machine-id, run `systemd-machine-id-setup`, reboot",
    "product_uuid": "the virtual machine was copied: give it its own UUID in the hypervisor",
}


def shared(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> dict[str, list[PreflightFinding]]:
    """Identities that machines share with each other or with nodes of the cluster, by machine."""
    found: dict[str, list[PreflightFinding]] = defaultdict(list)
    known = [candidate for candidate in candidates if candidate.facts and candidate.role is not Role.GPU_HOST]
    own = {candidate.node["name"] for candidate in known if candidate.node}
    other_nodes = [node for node in requirements.nodes if node["name"] not in own]
    for key, remedy in _UNIQUE.items():
        owners: dict[str, list[str]] = defaultdict(list)
        for candidate in known:
            if candidate.facts and (value := candidate.facts.get(key)):
                owners[str(value).lower()].append(candidate.name)
        for node in other_nodes:
            if value := node.get("name" if key == "hostname" else key):
                owners[value.lower()].append(f"node {node['name']}")
        for value, names in owners.items():
            # Vendors write placeholders into boards without a UUID; `same_uuid` never accepts these as equal.
            is_identity = key != "product_uuid" or same_uuid(value, value)
            if len(names) > 1 and is_identity:
                for name in names:
                    others = ", ".join(other for other in names if other != name)
                    title = key.replace("_", " ")
                    delete = "; or delete that node, if its machine no longer exists or was reinstalled"
                    what = f"{remedy}{delete if 'node ' in others else ''}"
                    fact = f"its {title} {value} is the same as that of {others}"
                    found[name].append(PreflightFinding(name, key, Problem(fact, f"a unique {title}", what)))
    return found


def own_nodes(candidates: Sequence[MachineFacts], requirements: ClusterRequirements) -> dict[str, Mapping[str, Any]]:
    """The machines' nodes: those in the cluster, and those that rejoin after an interruption."""
    machines = {each.name: reported(each.name, each.address, each.facts) for each in candidates}
    matcher = Matcher([described(node) for node in requirements.nodes], machines.values())
    nodes = {node["name"]: node for node in requirements.nodes}
    found = {}
    for candidate in candidates:
        member = bool((candidate.facts or {})["kubernetes"]["role"])
        find = matcher.match if member else matcher.joining
        if node := find(machines[candidate.name]).node:
            found[candidate.name] = nodes[node.name]
    return found
