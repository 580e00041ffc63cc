"""Plans for upgrades of drivers, from the facts that machines report now. Nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunodes.engine import journal
from gpunodes.inventory import Inventory
from gpunodes.model import Machine
from gpunodes.operations import preflight
from gpunodes.operations.tracker import RunView, Unseen
from gpunodes.planner import gpu_upgrade
from gpunodes.planner.candidates import MachineFacts


def run(
    inventory: Inventory, machines: Sequence[Machine], view: RunView, variables: Mapping[str, Any]
) -> gpu_upgrade.Upgrades:
    """Read the machines and plan; ``variables`` are settings of this run, among them the requested driver."""
    folder = journal.open_run("gpu upgrade plan")
    view.begin("gpu upgrade plan", machines)
    seen = preflight.inspect(inventory, machines, folder, view, variables)
    found = [_planned(each) for each in seen.candidates]
    return gpu_upgrade.Upgrades(str(variables["gpunodes_driver_branch"]), found, interrupted=seen.interrupted)


def of_machine(
    inventory: Inventory, machine: Machine, folder: Path, variables: Mapping[str, Any]
) -> gpu_upgrade.PlannedUpgrade:
    """The same for one machine, with its files in ``folder``."""
    seen = preflight.inspect(inventory, [machine], folder, Unseen(), variables, alone=True)
    return _planned(seen.candidates[0])


def _planned(each: MachineFacts) -> gpu_upgrade.PlannedUpgrade:
    return gpu_upgrade.planned(each.name, each.facts, each.requested.without_kubernetes(), each.unreachable)
