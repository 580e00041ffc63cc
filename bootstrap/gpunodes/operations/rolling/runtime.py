"""The work that replaces the container runtime and the container toolkit of nodes, to which they can go back."""

from __future__ import annotations

from collections.abc import Mapping

from gpunodes.engine.fleet import Fleet
from gpunodes.inventory import Inventory
from gpunodes.operations import runtime_plan
from gpunodes.operations.rolling.playbook import PlaybookWork
from gpunodes.operations.rolling.upgrades import inventory_of
from gpunodes.operations.rolling.work import Stopped, Target
from gpunodes.planner.runtime_upgrade import RuntimePlans
from gpunodes.rollout.record import Disruption

RUNTIME = "container-runtime"
"""Its name in records."""


class RuntimeUpgrade(PlaybookWork):
    """Replaces the packages of the container runtime by those that the settings request, and restarts it."""

    def __init__(self, inventory: Inventory, plan: RuntimePlans | None = None) -> None:
        """``plan`` was read just before: its machines are read again only when they are begun."""
        super().__init__(
            inventory,
            RUNTIME,
            "runtime_upgrade.yml",
            Disruption.NODE,
            parameters={},
            variables={},
            undoes=True,
        )
        self._planned = {each.name: each.needed for each in (plan.machines if plan else ()) if not each.unreadable}

    def needed(self, target: Target) -> str:
        """As ``Work.needed``: what the machine has differs from what its settings request."""
        if target.name in self._planned:
            return self._planned.pop(target.name)
        folder = self._own_folder(target, "read")
        found = runtime_plan.needed(self._inventory, target.machine, folder, target.should_stop)
        if found is None:
            raise Stopped
        return found


def make(fleet: Fleet, _: Mapping[str, str]) -> RuntimeUpgrade:
    """Make the work of a record; raises WrongInput without an inventory."""
    return RuntimeUpgrade(inventory_of(fleet))
