"""The change of pools that a run brings: a node's label is corrected to what the inventory says."""

from __future__ import annotations

from collections.abc import Sequence

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine import identities
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.identity.matcher import Matcher
from gpunodes.identity.model import described, reported
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, PreflightFinding, Severity
from gpunodes.operations.preflight import Inspection
from gpunodes.planner.desired import POOL_LABEL


def changes(inventory: Inventory, machines: Sequence[Machine], seen: Inspection) -> list[PreflightFinding]:
    """A warning for each machine whose node has the pool label of another pool, set by gpunodes: pods may select it."""
    if seen.cluster is None:
        return []
    nodes = {node["name"]: node for node in seen.cluster["nodes"]}
    addresses = {machine.name: machine.address for machine in inventory.machines()}
    known = identities.recall_all(inventory.cluster, addresses)
    known |= {name: reported(name, addresses[name], facts) for name, facts in seen.facts.items()}
    matcher = Matcher([described(node) for node in nodes.values()], known.values())
    fleet = InventoryFleet(inventory)
    found = []
    for machine in machines:
        node = matcher.match(known[machine.name]).node if machine.name in known else None
        before = nodes[node.name]["managed"]["labels"].get(POOL_LABEL, "") if node else ""
        after = fleet.labels(machine.name).get(POOL_LABEL, "")
        if before and before != after:
            problem = Problem(
                f"its node's label {POOL_LABEL} is {before}, and this run {f'sets {after}' if after else 'removes it'}",
                "",
                f"pods that select {before} no longer start there; to keep it, set gpunodes_pool, or name the group in "
                "gpunodes_pools",
            )
            found.append(PreflightFinding(machine.name, "pool", problem, Severity.WARNING))
    return found
