"""What a storage server that is a node must not do: reboot by a repair, be switched off, or leave the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Outcome, PreflightFinding, Role, RunResult, Severity
from gpunodes.planner import scaled_pools, storage
from gpunodes.planner.gpu import gpus_of
from gpunodes.planner.pools import POOL_LABEL


def of_machines(inventory: Inventory, facts: Mapping[str, Mapping[str, Any]]) -> list[PreflightFinding]:
    """The warnings for the machines with these facts; none without shares that a machine of the inventory serves."""
    names = servers(inventory)
    workers = [each for each in inventory.machines(Role.WORKER) if each.name in names and each.name in facts]
    return [finding for each in workers for finding in of_server(inventory, each, facts[each.name])]


def of_server(inventory: Inventory, machine: Machine, facts: Mapping[str, Any]) -> list[PreflightFinding]:
    """The warnings if the machine that serves is a worker that repairs may reboot, or the power server switch off."""
    if machine.role is not Role.WORKER:
        return []
    shares, found, fleet = _own(inventory), [], InventoryFleet(inventory)
    users = f"every pod that uses {'this share' if len(shares) == 1 else 'these shares'}"
    pool = fleet.labels(machine.name).get(POOL_LABEL, "")
    if scaled_pools.scales(fleet.settings()["gpunodes_pools"], pool):
        found.append(
            Problem(
                f"it serves {', '.join(shares)}, and its pool {pool} scales: the power server may switch it off, which "
                f"stalls {users}",
                "a storage server that stays on",
                "put it into another pool by gpunodes_pool, or serve from another machine",
            )
        )
    if facts and gpus_of(facts):
        found.append(
            Problem(
                f"it has GPUs and serves {', '.join(shares)}: a repair or a roll-out that reboots it stalls {users}",
                "a storage server that no repair reboots",
                "serve from a control plane without GPUs, or from a machine that is no node",
            )
        )
    return [PreflightFinding(machine.name, "storage", each, Severity.WARNING) for each in found]


def check_leaving(inventory: Inventory, machines: Sequence[Machine]) -> None:
    """Raise WrongInput for a machine of the group ``storage`` whose removal takes shares from nodes that stay."""
    if not (shares := shares_lost(inventory, machines)):
        return
    [name, *_] = _serving(inventory, machines)
    raise WrongInput(
        f"{name} serves {', '.join(shares)} to nodes that stay",
        "a machine that serves no shared storage: processes that use it would hang",
        f"run `gpunodes storage down`, and take {name} out of the group storage; if the cluster does not respond any "
        "more, do that alone",
    )


def still_exported(inventory: Inventory, result: RunResult) -> list[PreflightFinding]:
    """The warning of a server that stays and exports to machines which this run took out of the cluster."""
    left = {each.name for each in result.machines if each.outcome in (Outcome.CHANGED, Outcome.UNCHANGED)}
    names = [each.name for each in inventory.machines(Role.CONTROL_PLANE, Role.WORKER) if each.name in left]
    serving = [each.name for each in inventory.machines(Role.STORAGE) if each.name not in left]
    if result.dry_run or not names or not serving or not (own := _own(inventory)):
        return []
    goes_on = any(each.name not in left for each in inventory.machines(Role.CONTROL_PLANE))
    problem = Problem(
        f"it still exports {', '.join(own)} to {', '.join(names)}",
        "exports to nodes only",
        f"delete {'it' if len(names) == 1 else 'them'} from the inventory and run `gpunodes storage up`"
        if goes_on
        else f"delete {storage.EXPORTS} there, then run `exportfs -ra`",
    )
    return [PreflightFinding(name, "storage", problem, Severity.WARNING) for name in serving]


def shares_lost(inventory: Inventory, machines: Sequence[Machine]) -> Sequence[str]:
    """The shares that nodes lose which stay while these machines are away."""
    away = {machine.name for machine in machines}
    staying = any(each.name not in away for each in inventory.machines(Role.CONTROL_PLANE, Role.WORKER))
    return _own(inventory) if staying and _serving(inventory, machines) else []


def _serving(inventory: Inventory, machines: Sequence[Machine]) -> list[str]:
    """Those of these machines that are in the group ``storage``."""
    names = {machine.name for machine in machines}
    return [each.name for each in inventory.machines(Role.STORAGE) if each.name in names]


def servers(inventory: Inventory) -> set[str]:
    """The machines of the inventory that serve shares."""
    return {each.name for each in inventory.machines(Role.STORAGE)} if _own(inventory) else set()


def _own(inventory: Inventory) -> list[str]:
    """The shares that a machine of the inventory serves; a wrong setting is another check's problem."""
    controls = inventory.machines(Role.CONTROL_PLANE)
    value = inventory.rendered(controls[0].name, storage.SETTING).get(storage.SETTING) if controls else None
    return storage.own_names(value) if value and not list(storage.problems(value)) else []
