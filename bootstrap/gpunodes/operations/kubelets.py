"""Compare the kubelets of machines with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunodes import settings
from gpunodes.inventory import Inventory
from gpunodes.planner.kubelet_drift import Kubelet, KubeletDrift, compare


def compared(
    inventory: Inventory, machines: Mapping[str, str], cluster: Mapping[str, Any], report: object
) -> KubeletDrift:
    """How the kubelets of ``machines``, which are named by their nodes, differ from the settings.

    ``cluster`` is a checked result of cluster_info, ``report`` the control plane's of kubelet_gates, None without one.
    """
    kubelets = [
        Kubelet(
            machine=machines[node["name"]],
            node=node["name"],
            version=node["version"],
            gpus=node["gpus"] > 0,
            settings=settings.resolve(inventory.variables(machines[node["name"]])),
        )
        for node in cluster["nodes"]
        if machines.get(node["name"])
    ]
    return compare(report, kubelets)
