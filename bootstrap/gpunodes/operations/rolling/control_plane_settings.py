"""The work that brings a control plane to its settings."""

from __future__ import annotations

from collections.abc import Mapping

from gpunodes.engine.fleet import Fleet
from gpunodes.inventory import Inventory
from gpunodes.model import Role
from gpunodes.operations.rolling.playbook import PlaybookWork
from gpunodes.operations.rolling.upgrades import inventory_of
from gpunodes.operations.rolling.work import Target
from gpunodes.rollout.record import Disruption

NAME = "control-plane-settings"
"""Its name in records."""


class ControlPlaneSettings(PlaybookWork):
    """Applies the settings of the inventory to a control plane. Its node keeps its pods."""

    def __init__(self, inventory: Inventory) -> None:
        super().__init__(
            inventory,
            NAME,
            "control_plane_settings.yml",
            Disruption.NOTHING,
            parameters={},
            variables={},
            undoes=True,
        )

    def needed(self, target: Target) -> str:
        """As ``Work.needed``: the command selected the control planes that differ, and the module is idempotent."""
        return "its settings are applied" if target.role is Role.CONTROL_PLANE else ""


def make(fleet: Fleet, _: Mapping[str, str]) -> ControlPlaneSettings:
    """Make the work of a record; raises WrongInput without an inventory."""
    return ControlPlaneSettings(inventory_of(fleet))
