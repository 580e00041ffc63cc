"""The change of pools that a run brings: a node's label is corrected to what the inventory says."""

from __future__ import annotations

from collections.abc import Sequence

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, PreflightFinding, Severity
from gpunodes.operations import nodes
from gpunodes.operations.preflight import Inspection
from gpunodes.planner.pools import POOL_LABEL


def changes(inventory: Inventory, machines: Sequence[Machine], seen: Inspection) -> list[PreflightFinding]:
    """A warning for each machine whose node has the pool label of another pool, set by gpunodes: pods may select it."""
    if seen.cluster is None:
        return []
    reports = {node["name"]: node for node in seen.cluster["nodes"]}
    fleet = InventoryFleet(inventory)
    found = []
    for name, match in nodes.matches(inventory, machines, seen).items():
        before = reports[match.node.name]["managed"]["labels"].get(POOL_LABEL, "") if match.node else ""
        after = fleet.labels(name).get(POOL_LABEL, "")
        if before and before != after:
            problem = Problem(
                f"its node's label {POOL_LABEL} is {before}, and this run {f'sets {after}' if after else 'removes it'}",
                "",
                f"pods that select {before} no longer start there; to keep it, set gpunodes_pool, or name the group in "
                "gpunodes_pools",
            )
            found.append(PreflightFinding(name, "pool", problem, Severity.WARNING))
    return found
