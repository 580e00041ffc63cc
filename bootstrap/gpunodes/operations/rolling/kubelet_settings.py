"""The work that brings the kubelet of a node to the settings of its machine."""

from __future__ import annotations

from collections.abc import Mapping

from gpunodes.engine.fleet import Fleet
from gpunodes.inventory import Inventory
from gpunodes.operations.rolling.playbook import PlaybookWork
from gpunodes.operations.rolling.upgrades import inventory_of
from gpunodes.operations.rolling.work import Target
from gpunodes.rollout.record import Disruption

NAME = "kubelet-settings"
"""Its name in records."""


class KubeletSettings(PlaybookWork):
    """Writes the files of a kubelet that gpunodes keeps, and restarts it where they differ. Its node keeps its pods.

    There is no way back: what the settings were before is known to nobody.
    """

    def __init__(self, inventory: Inventory) -> None:
        super().__init__(
            inventory, NAME, "kubelet_settings.yml", Disruption.NOTHING, parameters={}, variables={}, undoes=False
        )

    def needed(self, target: Target) -> str:
        """As ``Work.needed``: the command selected the kubelets that differ, and the modules are idempotent."""
        return f"the kubelet of {target.name} gets its settings"


def make(fleet: Fleet, _: Mapping[str, str]) -> KubeletSettings:
    """Make the work of a record; raises WrongInput without an inventory."""
    return KubeletSettings(inventory_of(fleet))
