"""A machine that a user switched on: it is off on purpose no longer, also where no autoscaler sees that."""

from __future__ import annotations

from gpunodes.autoscale import nodes
from gpunodes.autoscale.nodes import PROVIDER
from gpunodes.autoscale.store import Overtaken
from gpunodes.engine import identities
from gpunodes.engine.cluster.errors import NoResponse
from gpunodes.engine.cluster.session import Session
from gpunodes.engine.fleet import Fleet, match_nodes
from gpunodes.errors import GpunodesError, sentence
from gpunodes.model import Machine, Role
from gpunodes.operations.autoscale.objects import Objects
from gpunodes.operations.repair.context import Report
from gpunodes.repair.switched_off import of_machines

_PATIENCE_S = 5.0
_ATTEMPTS = 5
_SWITCHES_OFF = frozenset({"stopping", "giving-up"})


def end_off(fleet: Fleet, machine: Machine, session: Session, report: Report) -> None:
    """End that a machine that was switched on counts as off on purpose, and report that; else nothing is done.

    Where there is an autoscaler, its power server does that when the node is ready. Where none is left, the state is
    forgotten, and what the autoscaler left on the machine's own node is removed. The machine is on in any case: what
    fails is reported, but for an API that does not respond.
    """
    if machine.role is not Role.WORKER:
        return
    try:
        _end(fleet, machine, Objects(session, patience_s=_PATIENCE_S), report)
    except NoResponse:
        return
    except GpunodesError as problem:
        report(machine.name, f"it may still count as off on purpose: {sentence(problem)}; run the same command again")


def _end(fleet: Fleet, machine: Machine, objects: Objects, report: Report) -> None:
    found, switched = objects.seen_nodes(), objects.switched_off()
    match = match_nodes(fleet, [each.node for each in found.values()], {})[machine.name]
    known = identities.recall_all(fleet.cluster_name, {each.name: each.address for each in fleet.all_machines()})
    recorded = of_machines({name: name for name in switched}, known).get(machine.name, "")
    name = match.node.name if match.node else recorded
    state, node = switched.get(name), found.get(name)
    is_left = node is not None and node.provider == PROVIDER + name and nodes.given_back(node) is not None
    if not state and not is_left:
        return
    if match.contradiction:
        report(machine.name, f"it may still count as off on purpose: {match.contradiction}")
        return
    if objects.is_installed():
        if state and state.phase in _SWITCHES_OFF:
            report(machine.name, f"{state.why}: it does not stay on; run the same command again when it is off")
        elif state:
            report(machine.name, "the autoscaler takes it into service when its node is ready: until then it is as off")
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
