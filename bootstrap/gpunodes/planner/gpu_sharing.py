"""GPUs that several pods share: what the setting requests, and the label of the node that follows from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpunodes.ansible.module_utils import devices
from gpunodes.errors import WrongInput

SETTING = "gpunodes_gpu_sharing"


def replicas(settings: Mapping[str, Any]) -> int:
    """How many pods get one GPU of a machine with these settings, 1 without sharing; raises WrongInput."""
    value = settings.get(SETTING) or {}
    found = devices.requested_replicas(value)
    if not found:
        raise WrongInput(f"{SETTING} is {value!r}", devices.SHARING_WANTED, "correct it in the inventory")
    return found


def labels(settings: Mapping[str, Any]) -> dict[str, str]:
    """The label of the node, by which a device plugin with this configuration runs there; none without sharing."""
    count = replicas(settings)
    return {devices.SHARING: f"{devices.TIME_SLICING}-{count}"} if count > 1 else {}


def all_replicas(given: Iterable[Any]) -> list[int]:
    """The different replicas that the values of the setting request, without 1; raises WrongInput."""
    return sorted({count for each in given if (count := replicas({SETTING: each})) > 1})
