"""A machine's power by hand, and the end of "needs repair"."""

from __future__ import annotations

import getpass
import socket
import time
from dataclasses import dataclass
from enum import StrEnum

from gpunodes.engine import history
from gpunodes.engine import power as powers
from gpunodes.engine.cluster import Cluster, Session
from gpunodes.engine.leases import Leases, who
from gpunodes.engine.power import Order
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.model import Machine
from gpunodes.operations.repair import World, node_of


class Action(StrEnum):
    """What can be asked of a machine's power."""

    STATUS = "status"
    ON = "on"
    OFF = "off"
    CYCLE = "cycle"


@dataclass(frozen=True, slots=True)
class Powered:
    """What the BMC says after an action."""

    machine: str
    action: str
    state: str
    bmc: str


def power(world: World, machine: Machine, action: Action) -> Powered:
    """Carry out a power action, seen to have happened; raises PowerProblem, and WrongInput where there is no BMC."""
    hands = world.hands(machine)
    bmc = hands.power()
    if bmc is None:
        raise WrongInput(f"{machine.name} has no BMC", "gpunodes_bmc_type and its fellows", "set them in the inventory")
    if action is Action.CYCLE:
        hands.cold_cycle()
    elif action is not Action.STATUS:
        powers.change(bmc, Order(action.value))
    state = bmc.state().value
    if action is not Action.STATUS:
        _note(world, machine.name, history.Kind.POWER, action.value, state)
    return Powered(machine.name, action.value, state, bmc.name)


@dataclass(frozen=True, slots=True)
class Cleared:
    """A machine that may be repaired again. ``schedulable`` is None where no cluster was asked."""

    machine: str
    node: str
    schedulable: bool | None


def clear(world: World, machine: Machine, *, without_cluster: bool) -> Cleared:
    """Take back "needs repair": marks, taint, and the cordon if it is ours.

    Raises GpunodesError while the machine is being repaired.
    """
    if without_cluster:
        _note(world, machine.name, history.Kind.CLEARED, "cleared", "")
        return Cleared(machine.name, "", None)
    session: Session = world.session()
    try:
        cluster = Cluster(session)
        node = node_of(machine, cluster.nodes())
        if node is None:
            raise WrongInput(f"{machine.name} is no node of the cluster", "a node", "see `gpunodes status`")
        for seen in Leases(cluster).seen():
            if seen.node == node.name and seen.live:
                raise GpunodesError(
                    f"{machine.name} is being repaired by {who(seen.holder)}", "one at a time", "wait for it to end"
                )
        schedulable = cluster.clear(node.name)
        _note(
            world, machine.name, history.Kind.CLEARED, "cleared", "" if schedulable else "somebody else's cordon stays"
        )
        cluster.event(node.name, "RepairCleared", "somebody cleared this machine by hand", warning=False)
        return Cleared(machine.name, node.name, schedulable)
    finally:
        session.close()


def _note(world: World, machine: str, kind: history.Kind, what: str, outcome: str) -> None:
    history.append(
        history.Entry(
            time=time.time(),
            machine=machine,
            kind=kind,
            what=what,
            outcome=outcome,
            cluster=world.cluster_name,
            by=f"{getpass.getuser()}@{socket.gethostname()}",
        )
    )
