"""The input of a command that was checked as a whole, before any machine is contacted."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from gpunodes import settings
from gpunodes.errors import WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Kubeconfig, Role
from gpunodes.planner import endpoint, gpu, node_address, pools, storage, versions

_PAGE = "`gpunodes help --page existing-cluster`"


class Needs(Enum):
    """What a command needs an inventory for: the groups, and what to do without an inventory."""

    NEW_CLUSTER = (
        "the groups control_plane and workers",
        "or create one with `gpunodes init-master ADDRESS --user NAME --key FILE`",
    )
    CLUSTER = ("the group control_plane", f"or write one as in {_PAGE}")
    MACHINES = ("the group workers or gpu_hosts", f"or write one as in {_PAGE}")
    NODES = (
        "the groups control_plane and workers; with --kubeconfig workers are enough",
        f"or write one as in {_PAGE}",
    )
    REPAIR = (
        "the groups control_plane and workers; with --kubeconfig or --without-cluster workers are enough",
        f"or write one as in {_PAGE}",
    )


def inventory(path: Path, needs: Needs = Needs.NEW_CLUSTER, kubeconfig: Kubeconfig | None = None) -> Inventory:
    """The inventory at ``path``: every command that needs one reads it here. ``kubeconfig`` is one for this command.

    Raises WrongInput for a missing or malformed inventory, and for all wrong settings of its machines at once. Machines
    that are not selected count, too: a budget is a setting of a whole pool.
    """
    if not path.exists():
        groups, otherwise = needs.value
        raise WrongInput(
            f"there is no inventory at {path}", f"an Ansible inventory with {groups}", f"name it with -i, {otherwise}"
        )
    found = Inventory(path, kubeconfig)
    every = [*found.machines(), *found.machines(Role.STORAGE)]
    variables = {machine.name: found.variables(machine.name) for machine in every}
    problems = {
        name: [*settings.problems(own), *_pool_problems(found, own), *_storage_problems(own)]
        for name, own in variables.items()
    }
    for machine in found.machines(Role.CONTROL_PLANE):
        problems[machine.name] += _endpoint_problems(variables[machine.name])
    controls = {machine.name for machine in found.machines(Role.CONTROL_PLANE)}
    settings.report_all(path, problems, _unknown_versions(controls, variables, problems))
    _ = found.kubeconfig  # raises for one beside control planes
    if needs is Needs.CLUSTER:
        found.control_planes()
    return found


def _pool_problems(inventory: Inventory, variables: Mapping[str, Any]) -> Iterator[settings.SettingProblem]:
    """Groups of ``gpunodes_pools`` that do not exist, and a machine in several of them."""
    resolved = settings.resolve(variables)
    named = resolved["gpunodes_pools"]
    if not isinstance(named, Mapping):
        return
    # A dynamic inventory has only groups with machines.
    unknown = [] if inventory.plugin else [str(name) for name in named if name not in inventory.groups]
    for name in unknown:
        near = difflib.get_close_matches(name, inventory.groups, n=1)
        nearest = f"; the nearest: {near[0]}" if near else ""
        yield settings.SettingProblem(
            "gpunodes_pools", f"names {name}, which is no group", f"groups of the inventory{nearest}"
        )
    try:
        pools.pool(resolved, variables.get("group_names") or ())
    except WrongInput as error:
        names = error.problem.found.removeprefix("gpunodes_pools ")
        yield settings.SettingProblem("gpunodes_pools", names, "one of them, or the machine's pool in gpunodes_pool")


def _storage_problems(variables: Mapping[str, Any]) -> Iterator[settings.SettingProblem]:
    """Shares that cannot be made; a value that is no list has its own problem, and only Ansible renders a template."""
    resolved = settings.resolve(variables)
    value, data = resolved[storage.SETTING], str(resolved["gpunodes_data_directory"])
    if isinstance(value, list) and "{{" not in str(value):
        found = list(storage.problems(value))
        if not found and data and "{{" not in data and storage.serves(value, variables.get("group_names") or ()):
            found = list(storage.moved(value, data))
        for each in found:
            yield settings.SettingProblem(storage.SETTING, *each)


def _endpoint_problems(variables: Mapping[str, Any]) -> Iterator[settings.SettingProblem]:
    """A virtual address that contradicts other settings of a control plane."""
    resolved = settings.resolve(variables)
    values = {name: str(resolved[name]) for name in (endpoint.VIP, endpoint.ROUTER_ID, endpoint.ENDPOINT)}
    if any("{{" in value for value in values.values()) or not values[endpoint.ROUTER_ID].isdigit():
        return  # only Ansible can render it, or it has its own problem
    if node_address.is_ipv4(values[endpoint.VIP]):
        for problem in endpoint.conflicts(endpoint.settings_of(resolved)):
            key, _, fact = problem.found.partition(" ")
            yield settings.SettingProblem(key, fact, problem.wanted)


def _unknown_versions(
    controls: set[str],
    variables: Mapping[str, Mapping[str, Any]],
    problems: Mapping[str, Sequence[settings.SettingProblem]],
) -> list[WrongInput]:
    """Versions in the settings that are valid, but not in any table."""
    found: dict[str, WrongInput] = {}
    for name, own in variables.items():
        # A wrong setting is reported already, and a template cannot be checked here: the default stands in for both.
        wrong = {problem.key for problem in problems[name]}
        resolved = settings.resolve({k: v for k, v in own.items() if k not in wrong and "{{" not in str(v)})
        try:
            gpu.check(gpu.requested_of(resolved, ""))
            if name in controls:
                versions.check(str(resolved["gpunodes_kubernetes_version"]))
        except WrongInput as error:
            found.setdefault(str(error), error)
    return list(found.values())
