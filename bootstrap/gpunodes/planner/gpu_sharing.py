"""GPUs that several pods share: what the setting requests, and the label of the node that follows from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpunodes.ansible.module_utils import devices
from gpunodes.errors import WrongInput

SETTING = "gpunodes_gpu_sharing"


def sharing(settings: Mapping[str, Any]) -> str:
    """How pods share the GPUs of a machine with these settings: ``time-slicing-4``, "" if they do not.

    Raises WrongInput for a wrong value, and for MIG together with a burn-in.
    """
    value = settings.get(SETTING) or {}
    found = devices.requested_sharing(value)
    if found is None:
        raise WrongInput(f"{SETTING} is {value!r}", devices.SHARING_WANTED, "correct it in the inventory")
    if devices.layout(found) and settings.get("gpunodes_burn_in"):
        raise WrongInput(
            f"gpunodes_burn_in tests whole GPUs, and {SETTING} slices them",
            "one of them",
            f"burn in without {SETTING}, and set it afterwards",
        )
    return found


def labels(settings: Mapping[str, Any]) -> dict[str, str]:
    """The label of the node, by which a device plugin with this configuration runs there; none without sharing."""
    found = sharing(settings)
    return {devices.SHARING: found} if found else {}


def setting_of(found: str) -> dict[str, Any]:
    """The value of the setting with this label."""
    if instances := devices.layout(found):
        return {"mode": devices.MIG, "profiles": instances}
    mode, _, count = found.rpartition("-")
    return {"mode": mode, "replicas": int(count)} if found else {}


def all_sharing(given: Iterable[Any]) -> list[str]:
    """The different labels that the values of the setting request; raises WrongInput."""
    found = {found for each in given if (found := sharing({SETTING: each}))}
    return sorted(found, key=lambda each: (each.rpartition("-")[0], int(each.rpartition("-")[2])))
