"""The pool of a machine, and the labels of its node, by its settings and groups. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gpunodes.errors import WrongInput
from gpunodes.planner import gpu_serving, gpu_sharing

POOL_LABEL = "gpunodes.dev/pool"
LABEL_SETTINGS = (
    "gpunodes_pool",
    "gpunodes_pools",
    "gpunodes_gpu_sharing",
    "gpunodes_gpu_serving",
    "gpunodes_node_labels",
)
"""The settings that ``labels`` reads."""


def labels(settings: Mapping[str, Any], groups: Collection[str]) -> dict[str, str]:
    """The labels of a machine's node by its settings.

    Raises WrongInput for a machine in several pools.
    """
    name = pool(settings, groups)
    of_gpus = {**gpu_sharing.labels(settings), **gpu_serving.labels(settings)}
    return {**({POOL_LABEL: name} if name else {}), **of_gpus, **settings["gpunodes_node_labels"]}


def pool(settings: Mapping[str, Any], groups: Collection[str]) -> str:
    """The pool of a machine: ``gpunodes_pool``, else its group among the keys of ``gpunodes_pools``, "" for none.

    Raises WrongInput for a machine in several of these groups.
    """
    if settings["gpunodes_pool"]:
        return str(settings["gpunodes_pool"])
    found = sorted(set(groups) & set(settings["gpunodes_pools"] or ()))
    if len(found) > 1:
        raise WrongInput(
            f"gpunodes_pools names {' and '.join(found)}, and the machine is in all of these groups",
            "one pool",
            "set its gpunodes_pool",
        )
    return "".join(found)
