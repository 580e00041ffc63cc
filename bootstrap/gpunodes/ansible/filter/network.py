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
    cluster: str,
    joining: Collection[str],
    *,
    addresses: Sequence[str],
    pods: str,
    controls: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The other machines in whose firewalls gpunodes opened ports: ``name``, and ``wanted`` for the module host.

    ``nodes`` are those of cluster_info, ``machines`` the inventory's addresses by name, ``cluster`` the name under
    which identities are stored, ``joining`` the machines of this run. ``addresses`` and ``pods`` are let in,
    ``controls`` to the ports of control planes for each other.
    """
    from gpunodes.engine import identities
    from gpunodes.identity.matcher import Matcher
    from gpunodes.identity.model import described
    from gpunodes.model import Role
    from gpunodes.planner import firewall

    labelled = {node["name"]: Role(node["role"]) for node in nodes if firewall.LABEL in node["managed"]["labels"]}
    if not labelled:
        return []
    known = identities.recall_all(cluster, {name: address or name for name, address in machines.items()})
    matcher = Matcher([described(node) for node in nodes], known.values())
    found = []
    for name in sorted(set(machines) - set(joining)):
        node = matcher.match(known[name]).node
        if node and node.name in labelled:
            spec = firewall.wanted(labelled[node.name], addresses, pods, controls)
            found.append({"name": name, "wanted": {"firewall": json.loads(json.dumps(dataclasses.asdict(spec)))}})
    return found


class FilterModule:
    """The filters, as Ansible looks them up."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"firewalled": firewalled}
