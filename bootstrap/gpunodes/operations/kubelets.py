"""Compare the kubelets of machines with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunodes import settings
from gpunodes.inventory import Inventory
from gpunodes.model import Role
from gpunodes.planner import kubelet_layers
from gpunodes.planner.kubelet_drift import KubeletDrift, compare
from gpunodes.planner.kubelet_layers import Kubelet


def fields(inventory: Inventory) -> list[str]:
    """What the module kubelet_settings is to report: the fields of gpunodes, and those that patches name."""
    found = [
        kubelet_layers.fields(settings.resolve(inventory.variables(machine.name)))
        for machine in inventory.machines(Role.CONTROL_PLANE)
    ]
    return sorted({*kubelet_layers.FIELDS}.union(*found))


def compared(
    inventory: Inventory, machines: Mapping[str, str], cluster: Mapping[str, Any], report: object
) -> KubeletDrift:
    """How the kubelets of ``machines``, which are named by their nodes, differ from the settings.

    ``cluster`` is a checked result of cluster_info, ``report`` the control plane's of kubelet_settings, None without
    one.
    """
    controls = {machine.name for machine in inventory.machines(Role.CONTROL_PLANE)}
    kubelets = []
    for node in cluster["nodes"]:
        if name := machines.get(node["name"]):
            variables = inventory.variables(name)
            kubelet = Kubelet(
                machine=name,
                node=node["name"],
                version=node["version"],
                gpus=node["gpus"] > 0,
                settings=settings.resolve(variables),
                control_plane=name in controls,
                groups=variables.get("group_names") or (),
            )
            kubelets.append(kubelet)
    return compare(report, kubelets)
