"""The machines of an inventory that the autoscaler keeps off, and what that means for a verdict."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from gpunodes import settings
from gpunodes.engine.cluster.client import Cluster
from gpunodes.engine.fleet import InventoryFleet, match_switched
from gpunodes.errors import GpunodesError
from gpunodes.health.model import Action, State, Verdict
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role
from gpunodes.planner import scaled_pools
from gpunodes.repair.switched_off import Switched


def read(inventory: Inventory) -> dict[str, Switched]:
    """The machines that are off on purpose, by name.

    None without gpunodes_pools: then the control plane is not contacted. A pool that scales no longer may have machines
    that are off, after `gpunodes autoscale down`: what the cluster recorded counts, as for repairs. None either if it
    does not respond: the machines then count as any others.
    """
    if not inventory.machines(Role.CONTROL_PLANE) or not any(_pools(inventory)):
        return {}
    with contextlib.suppress(GpunodesError):
        fleet = InventoryFleet(inventory)
        with contextlib.closing(fleet.session()) as session:
            cluster = Cluster(session, patience_s=0.0)
            switched = cluster.switched_off()
            nodes = cluster.nodes() if switched else []
            ready = {node.name: node.ready for node in nodes}
            off = {name: each for name, each in switched.items() if each.is_off(ready=ready.get(name))}
            return match_switched(fleet, off, nodes, {})
    return {}


def has_scaling_pools(inventory: Inventory) -> bool:
    """Whether a pool scales by the settings."""
    return any(map(_scales, _pools(inventory)))


def split(
    inventory: Inventory, machines: Sequence[Machine], *, is_rolled_out: bool = False
) -> tuple[list[Machine], dict[str, str]]:
    """The machines that are not off on purpose; and of the others why they are left out, by name, as ``left_out``."""
    off = read(inventory)
    left = {
        each.name: left_out(each.name, off[each.name].described, is_rolled_out=is_rolled_out)
        for each in machines
        if each.name in off
    }
    return [each for each in machines if each.name not in left], left


def left_out(name: str, why: str, *, is_rolled_out: bool = False) -> str:
    """Why a command leaves a machine out, and how to include it: nothing is done to it at its next start.

    ``is_rolled_out``: what the command does is a roll-out, whose option --wake switches machines on.
    """
    wakes = f", or --wake --only {name} with the roll-out" if is_rolled_out else ""
    return f"{why}; to include it: `gpunodes power {name} on --wait`, then the same command again{wakes}"


def marked(verdict: Verdict, off: Mapping[str, Switched]) -> Verdict:
    """A verdict that says why the machine does not respond, if it is ``off`` on purpose."""
    found = off.get(verdict.name)
    if found is None or verdict.state is not State.UNREACHABLE:
        return verdict
    return dataclasses.replace(verdict, state=State.OFF, action=Action.NONE, findings=(), wanted=found.why)


def _pools(inventory: Inventory) -> list[object]:
    """The different values of gpunodes_pools; it is a setting of all machines, but a group may have another one."""
    found: list[object] = []
    for machine in inventory.machines(Role.WORKER):
        pools = settings.resolve(inventory.variables(machine.name))["gpunodes_pools"]
        if pools not in found:
            found.append(pools)
    return found


def _scales(pools: object) -> bool:
    # Only Ansible can render a template: then a pool may scale.
    return scaled_pools.any_scales(pools) or "{{" in str(pools)
