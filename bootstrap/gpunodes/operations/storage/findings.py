"""What a storage server that is a node must not do: reboot by a repair, or leave the nodes that use its shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, PreflightFinding, Role, Severity
from gpunodes.planner import storage
from gpunodes.planner.gpu import gpus_of


def of_machines(inventory: Inventory, facts: Mapping[str, Mapping[str, Any]]) -> list[PreflightFinding]:
    """The warnings for the machines with these facts; none without shares that a machine of the inventory serves."""
    own = _own(inventory)
    serving = {each.name for each in inventory.machines(Role.STORAGE)} if own else set()
    workers = [each for each in inventory.machines(Role.WORKER) if each.name in serving]
    return [finding for each in workers for finding in of_server(each, facts.get(each.name) or {}, own)]


def of_server(machine: Machine, facts: Mapping[str, Any], shares: Sequence[str]) -> list[PreflightFinding]:
    """The warning if the machine that serves these shares is a worker with GPUs, which repairs may reboot."""
    if machine.role is not Role.WORKER or not facts or not gpus_of(facts):
        return []
    problem = Problem(
        f"it has GPUs and serves {', '.join(shares)}: a repair or a roll-out that reboots it stalls every pod that "
        f"uses {'this share' if len(shares) == 1 else 'these shares'}",
        "a storage server that no repair reboots",
        "serve from a control plane without GPUs, or from a machine that is no node",
    )
    return [PreflightFinding(machine.name, "storage", problem, Severity.WARNING)]


def check_leaving(inventory: Inventory, machines: Sequence[Machine]) -> None:
    """Raise WrongInput for a machine of the group ``storage`` whose removal takes shares from nodes that stay."""
    leaving = {machine.name for machine in machines}
    staying = [each for each in inventory.machines(Role.CONTROL_PLANE, Role.WORKER) if each.name not in leaving]
    serving = [each.name for each in inventory.machines(Role.STORAGE) if each.name in leaving]
    if not serving or not staying or not (own := _own(inventory)):
        return
    [name, *_] = serving
    raise WrongInput(
        f"{name} serves {', '.join(own)} to nodes that stay",
        "a machine that serves no shared storage: processes that use it would hang",
        f"run `gpunodes storage down`, and take {name} out of the group storage; if the cluster does not respond any "
        "more, do that alone",
    )


def _own(inventory: Inventory) -> list[str]:
    """The shares that a machine of the inventory serves; a wrong setting is another check's problem."""
    controls = inventory.machines(Role.CONTROL_PLANE)
    value = inventory.rendered(controls[0].name, storage.SETTING).get(storage.SETTING) if controls else None
    return storage.own_names(value) if value and not list(storage.problems(value)) else []
