"""The works that can be rolled out, by the name that stands in the record of a roll-out.

A record comes back from the cluster: its name of a work is only looked up here, and the class found here checks the
parameters again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpunodes.engine.fleet import Fleet
from gpunodes.errors import WrongInput
from gpunodes.operations.rolling import control_plane_settings, kubelet_settings, runtime, upgrades
from gpunodes.operations.rolling.work import Work

Maker = Callable[[Fleet, Mapping[str, str]], Work]
"""Makes a work for a fleet from its parameters; raises WrongInput for wrong ones."""

WORKS: dict[str, Maker] = {
    upgrades.CONTROL_PLANES: upgrades.control_planes,
    upgrades.KUBELETS: upgrades.kubelets,
    upgrades.ROLLBACK: upgrades.rollback,
    upgrades.SYSTEM: upgrades.system,
    upgrades.DRIVER: upgrades.driver,
    runtime.RUNTIME: runtime.make,
    control_plane_settings.NAME: control_plane_settings.make,
    kubelet_settings.NAME: kubelet_settings.make,
}


def make(fleet: Fleet, name: str, parameters: Mapping[str, str]) -> Work:
    """The work of a record; raises WrongInput for one that this version of gpunodes does not know."""
    if name not in WORKS:
        raise WrongInput(
            f"the roll-out in the cluster is of {name!r}, which this gpunodes does not know",
            f"one of {', '.join(sorted(WORKS))}",
            "resume it with the version that began it, or forget it: `gpunodes rollout abandon`",
        )
    return WORKS[name](fleet, parameters)
