"""A machine that a user switched: one that is on is off on purpose no longer, and one that is off stays off.

The first holds also where no autoscaler sees it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from gpunodes.ansible.module_utils.scaling import PROVIDER
from gpunodes.autoscale import nodes
from gpunodes.autoscale.kept_off import KeptOff
from gpunodes.autoscale.nodes import SeenNode
from gpunodes.autoscale.store import Overtaken
from gpunodes.engine import identities
from gpunodes.engine.cluster.errors import NoCluster, NoResponse, NoSession
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.fleet import Fleet, match_nodes
from gpunodes.engine.leases.holders import user_at_host
from gpunodes.errors import GpunodesError, sentence
from gpunodes.identity.matcher import Match
from gpunodes.model import Machine, Role
from gpunodes.operations.autoscale.objects import Objects
from gpunodes.operations.repair.context import Report
from gpunodes.planner.scaled_pools import scales
from gpunodes.repair.switched_off import of_machines

_PATIENCE_S = 5.0
_ATTEMPTS = 5
_BY_HAND = "by-hand"
_SWITCHES_OFF = frozenset({"stopping", "giving-up"})


def end_off(fleet: Fleet, machine: Machine, session: Session, report: Report) -> None:
    """End that a machine that was switched on counts as off on purpose, and report that; else nothing is done.

    Where there is an autoscaler, its power server does that: when the node is ready, or, of a machine that someone else
    had switched off, when its BMC says that it is on. Where none is left, the state is forgotten, and what the
    autoscaler left on the machine's own node is removed. The machine is on in any case: what fails is reported, but for
    an API that does not respond.
    """
    if machine.role is not Role.WORKER:
        return
    try:
        _end(fleet, machine, Objects(session, patience_s=_PATIENCE_S), report)
    except NoResponse:
        return
    except GpunodesError as problem:
        report(machine.name, f"it may still count as off on purpose: {sentence(problem)}; run the same command again")


def keep_off(fleet: Fleet, machine: Machine, session: Session, report: Report) -> None:
    """Have the autoscaler, if there is one for the machine, leave it off.

    Raises GpunodesError if that is not certain for a machine of a pool that scales: who reserves it may work in it.
    """
    if machine.role is not Role.WORKER:
        return
    objects = Objects(session, patience_s=_PATIENCE_S)
    try:
        if not objects.is_installed():
            return
        found, states = objects.seen_nodes(), objects.states(create=False)
        name, match = _node_of(fleet, machine, found, states)
        if not name and states.keys() - found.keys() and _scales(fleet, machine):
            raise GpunodesError("which node it was is not known on this controller")
        if name in states and not match.contradiction:
            boot_id = found[name].node.boot_id if name in found else ""
            objects.keep_off(name, KeptOff(user_at_host(), time.time(), boot_id))
            report(machine.name, f"the autoscaler leaves it off until `gpunodes power {machine.name} on`")
    except (NoCluster, NoSession):
        return
    except GpunodesError as problem:
        if isinstance(problem, NoResponse) and not _scales(fleet, machine):
            return
        raise GpunodesError(
            f"{machine.name} is off, and the autoscaler may switch it on again: {sentence(problem)}",
            "a record in the cluster that it stays off",
            "run the same command again, from the controller that joined it if another one does not know it",
        ) from problem


def _scales(fleet: Fleet, machine: Machine) -> bool:
    """Whether a machine's pool scales, by the inventory."""
    return scales(fleet.settings()["gpunodes_pools"], fleet.pool_label(machine.name))


def _node_of(
    fleet: Fleet, machine: Machine, found: Mapping[str, SeenNode], recorded: Iterable[str]
) -> tuple[str, Match]:
    """The name of a machine's node, "" if it is unknown, and its match; ``recorded`` are names of nodes without one."""
    matches = match_nodes(fleet, [each.node for each in found.values()], {})
    match = matches[machine.name]
    known = identities.recall_all(fleet.cluster_name, {each.name: each.address for each in fleet.all_machines()})
    off = of_machines({name: name for name in recorded}, known, matches).get(machine.name, "")
    return (match.node.name if match.node else off), match


def _end(fleet: Fleet, machine: Machine, objects: Objects, report: Report) -> None:
    found, switched = objects.seen_nodes(), objects.switched_off()
    kept_off = objects.kept_off()
    name, match = _node_of(fleet, machine, found, {*switched, *kept_off})
    state, node = switched.get(name), found.get(name)
    is_left = node is not None and node.provider == PROVIDER + name and nodes.given_back(node) is not None
    if not state and not is_left and name not in kept_off:
        return
    if match.contradiction:
        report(machine.name, f"it may still count as off on purpose: {match.contradiction}")
        return
    if name in kept_off:
        objects.keep_off(name, None)
    if objects.is_installed():
        if state and state.phase in _SWITCHES_OFF:
            report(machine.name, f"{state.why}: it does not stay on; run the same command again when it is off")
        elif state:
            as_off = "" if state.phase == _BY_HAND else ": until then it is as off"
            report(machine.name, f"the autoscaler takes it into service when its node is ready{as_off}")
        return
    if is_left:
        objects.change(name, nodes.given_back)
        report(machine.name, "taints and marks that the autoscaler left on its node are removed")
    if state:
        _forget(objects, name)
        more = "" if node else f"; a node that registers anew waits with the taint {nodes.STARTING}, which "
        more += "" if node else f"`gpunodes power {machine.name} on --wait` or `gpunodes join {machine.name}` removes"
        report(machine.name, f"it is off on purpose no longer{more}")


def _forget(objects: Objects, name: str) -> None:
    """Forget the state of a machine; raises Overtaken if others change the states all the time."""
    for left in reversed(range(_ATTEMPTS)):
        objects.states(create=False)
        try:
            objects.write({name: None})
        except Overtaken:
            if not left:
                raise
        else:
            return
