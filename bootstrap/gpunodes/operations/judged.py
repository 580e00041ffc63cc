"""The variables of machines that preflight judges: templates of the inventory are rendered here, for all of it.

Only variables of the user's own inventory are rendered, never what machines report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes import settings
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine
from gpunodes.planner import endpoint, storage
from gpunodes.planner.node_address import SETTING as ADDRESS
from gpunodes.planner.runtime_versions import SETTING as CONTAINERD

JUDGED = (
    ADDRESS,
    CONTAINERD,
    endpoint.ENDPOINT,
    endpoint.VIP,
    endpoint.ROUTER_ID,
    endpoint.INTERVAL,
    storage.SETTING,
    "gpunodes_burn_in",
    "gpunodes_component_arguments",
    "gpunodes_cuda_versions",
    "gpunodes_cudnn_version",
    "gpunodes_driver_branch",
    "gpunodes_driver_source",
    "gpunodes_feature_gates",
    "gpunodes_firewall",
    "gpunodes_gpu_serving",
    "gpunodes_gpu_sharing",
    "gpunodes_kubernetes_version",
    "gpunodes_network",
    "gpunodes_pod_subnet",
    "gpunodes_pools",
    "gpunodes_runtime",
    "gpunodes_service_subnet",
    "gpunodes_time_service",
    "gpunodes_unsupported_os",
)
"""The variables that preflight judges: their templates are rendered, and no others."""


def rendered(
    inventory: Inventory, machines: Sequence[Machine], variables: Mapping[str, Any], *, refuses: bool
) -> dict[str, dict[str, Any]]:
    """The variables of machines, rendered as far as they are judged; ``variables`` are those of the run.

    ``refuses``: raises WrongInput for a template that cannot be rendered, and for wrong values of templates. Commands
    without preflight need neither: a template stays one, and the default stands in for a wrong value.
    """
    found: dict[str, dict[str, Any]] = {}
    wrong: dict[str, list[settings.SettingProblem]] = {}
    for machine in machines:
        raw = inventory.variables(machine.name)
        own = found[machine.name] = dict(raw)
        # Without a template nothing is copied or compared: most inventories have none.
        templates = [key for key in JUDGED if key in raw and settings.is_template(raw[key])]
        for key in templates:
            try:
                own[key] = inventory.with_rendered(machine.name, [key], variables)[key]
            except WrongInput:
                if refuses:
                    raise
                if isinstance(settings.defaults()[key], int):
                    del own[key]  # a template is no number
        if any(own[key] is not raw[key] for key in templates if key in own):
            problems = list(settings.problems({key: own[key] for key in JUDGED if key in own}))
            wrong[machine.name] = problems
            for each in problems:
                own.pop(each.key, None)
    if refuses:
        settings.report_all(inventory.title, wrong)
    return found
