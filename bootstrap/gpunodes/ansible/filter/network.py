"""Filters of the roles for the machines' networks."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import gpunodes.planner.tables as _  # noqa: F401 - checks whether the package is installed
except ModuleNotFoundError:
    # From a checkout, or from the built collection, which brings the parts of the package that this file imports.
    _HERE = Path(__file__).resolve()
    sys.path[:0] = [str(_HERE.parents[3]), str(_HERE.parents[1] / "plugin_utils")]


def firewalled(
    nodes: Sequence[Mapping[str, Any]],
    machines: Mapping[str, str],
    cluster: Sequence[str],
    joining: Collection[str],
    *,
    addresses: Sequence[str],
    pods: str,
    controls: Sequence[str] = (),
    shared: Sequence[str] = (),
    storage: Collection[str] = (),
    network: str = "flannel",
) -> list[dict[str, Any]]:
    """The other machines in whose firewalls gpunodes opened ports: ``name``, and ``wanted`` for the module host.

    ``nodes`` are those of cluster_info, ``machines`` the inventory's addresses by name, ``cluster`` the control planes'
    names, under whose key identities are stored, ``joining`` the machines of this run. ``addresses`` and ``pods`` are
    let in, ``controls`` to the ports of control planes for each other, ``shared`` to their virtual address.
    ``storage`` are the machines that serve shares, ``network`` is the value of gpunodes_network.
    """
    from gpunodes import clusters
    from gpunodes.engine import identities
    from gpunodes.identity.matcher import Matcher
    from gpunodes.identity.model import described
    from gpunodes.model import Role
    from gpunodes.planner import firewall

    labelled = {node["name"]: Role(node["role"]) for node in nodes if firewall.LABEL in node["managed"]["labels"]}
    if not labelled:
        return []
    key = clusters.key([machines.get(each) or each for each in cluster])
    known = identities.recall_all(key, {name: address or name for name, address in machines.items()})
    matcher = Matcher([described(node) for node in nodes], known.values())
    found = []
    for name in sorted(set(machines) - set(joining)):
        node = matcher.match(known[name]).node
        if node and node.name in labelled:
            serves = name in storage
            spec = firewall.wanted(
                labelled[node.name], addresses, pods, controls, shared, network=network, storage=serves
            )
            found.append({"name": name, "wanted": {"firewall": json.loads(json.dumps(dataclasses.asdict(spec)))}})
    return found


def control_planes(
    nodes: Sequence[Mapping[str, Any]],
    names: Collection[str],
    *,
    facts: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    reached: Mapping[str, str],
) -> list[str]:
    """The addresses of all control planes: those of the cluster's ``nodes``, and of the machines of this run."""
    from gpunodes.planner import endpoint

    return endpoint.control_planes(names, facts, settings, reached, nodes)


def node_addresses(
    names: Collection[str],
    *,
    facts: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    reached: Mapping[str, str],
) -> list[str]:
    """The addresses in the cluster of those of these machines that are in this run."""
    from gpunodes.planner import node_address

    return node_address.of_all(names, facts, settings, reached)


def endpoint_peers(
    nodes: Sequence[Mapping[str, Any]],
    machines: Mapping[str, str],
    cluster: Sequence[str],
    present: Collection[str],
    *,
    control_planes: Sequence[str],
) -> list[dict[str, Any]]:
    """The control planes that are not part of this run: ``name``, and ``wanted``, the list of the others' addresses.

    ``nodes``, ``machines`` and ``cluster`` are those of ``firewalled``; ``present`` are the machines of this run, and
    ``control_planes`` the addresses of all control planes after it.
    """
    from gpunodes import clusters
    from gpunodes.ansible.module_utils.host.spec import Service, Spec
    from gpunodes.engine import identities
    from gpunodes.identity.matcher import Matcher
    from gpunodes.identity.model import described
    from gpunodes.planner import endpoint

    key = clusters.key([machines.get(each) or each for each in cluster])
    known = identities.recall_all(key, {name: address or name for name, address in machines.items()})
    matcher = Matcher([described(node) for node in nodes], known.values())
    own = {node["name"]: str(node["address"]) for node in nodes if node["role"] == "control_plane"}
    found = []
    for name in [name for name in machines if name not in present]:
        node = matcher.match(known[name]).node
        if node and node.name in own:
            file = endpoint.peers_file(own[node.name], control_planes)
            spec = Spec(files=(file,), services=(Service("keepalived"),))
            found.append({"name": name, "wanted": json.loads(json.dumps(dataclasses.asdict(spec)))})
    return found


def endpoint_settle(settings: Mapping[str, Any]) -> int:
    """Seconds after a restart of keepalived until the machine may take the virtual address over again."""
    from gpunodes.planner import endpoint

    return endpoint.settle_s(endpoint.settings_of(settings))


class FilterModule:
    """The filters, as Ansible looks them up."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "control_planes": control_planes,
            "endpoint_peers": endpoint_peers,
            "node_addresses": node_addresses,
            "endpoint_settle": endpoint_settle,
            "firewalled": firewalled,
        }
