"""Which machines are switched on, what the autoscaler is told of them, and what becomes of each. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpunodes.ansible.module_utils import devices
from gpunodes.autoscale import nodes
from gpunodes.autoscale.kept_off import KeptOff
from gpunodes.autoscale.nodes import SeenNode
from gpunodes.autoscale.plan import NodeShape, Plan, node_shape
from gpunodes.autoscale.state import SYSTEM_LABELS, Kubelet, MachineState, Phase
from gpunodes.planner import node_templates, versions
from gpunodes.repair.policy import Node

RETRY_S = 1800.0
"""Seconds after which a machine that did not start is tried again."""
UNUSED_S = 30 * 86400.0
"""Each machine is on at least once in this time: its kubelet renews its certificate only while it runs.

The certificate of kubeadm's clusters lasts a year, and the kubelet renews it in the last 10 to 30 % of that, in 36 days
or more. Source: kubernetes.io, "Configure Certificate Rotation for the Kubelet", and kubeadm's certificates.
"""
_CERTIFICATE_S = 36 * 86400.0
"""A kubelet's certificate is valid for at least so long after its node was in service: see ``UNUSED_S``."""
FOREIGN = (
    "its node is of another machine or was not joined for this: it is left alone; if the machine was reinstalled, run "
    "`gpunodes autoscale up`"
)
ON_WITHOUT_NODE = "it is on without a node: join it, or switch it off"
NOT_KNOWN = "its BMC does not say whether it is on"
FOUND_OFF = "it was found off, without a node"
SWITCHED_OFF = "it was found off, and not by the autoscaler: it stays off until it is switched on"
OFF_OR_HANGS = "its node is not ready, and nothing of it responds: it is off, or its system hangs"
SWITCHED_ON = "someone switched it on: it is used when its node is ready"
_DOING = {
    Phase.STARTING: "it was being switched on",
    Phase.STOPPING: "it was being switched off",
    Phase.GIVING_UP: "it was given up, and was being switched off",
}
_GRACE = 1.2
"""The autoscaler gives a start up after ``boot_s``; this server does so itself if the autoscaler does not."""


@dataclass(frozen=True, slots=True)
class World:
    """What is known at one moment; ``now`` is in seconds since 1970."""

    plan: Plan
    states: Mapping[str, MachineState]
    nodes: Mapping[str, SeenNode] = field(default_factory=dict)
    """The nodes of the plan's machines, by name."""
    now: float = 0.0
    foreign: Collection[str] = ()
    """Machines with whose names there are nodes that are not certainly their own."""
    locked: Mapping[str, str] = field(default_factory=dict)
    """Machines that other commands have just held, and which ones."""
    kept_off: Mapping[str, KeptOff] = field(default_factory=dict)
    """Machines that users switched off, as far as that is recorded."""
    version: str = ""
    """That of the API server, such as v1.36.3, "" while it is unknown."""

    def switched_off(self, name: str) -> KeptOff | None:
        """The record of a machine that a user switched off; None without one, and if it was switched on since."""
        made, found = self.kept_off.get(name), self.nodes.get(name)
        return None if made and found and found.node.ready and found.node.boot_id != made.boot_id else made

    def phase(self, name: str) -> Phase | None:
        """The phase of a machine; None if it is not yet known."""
        state = self.states.get(name)
        return state.phase if state else None


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a pool as the autoscaler is told."""

    least: int
    most: int
    target: int


def size(world: World, pool: str) -> Size:
    """The limits of a pool and its present target; machines that cannot be switched on reduce its limits."""
    planned = world.plan.pools[pool]
    names = world.plan.of_pool[pool]
    target = sum(is_counted(world, name) for name in names)
    most = min(planned.most, target + len(to_start(world, pool, len(names))))
    # A limit below the target would have the autoscaler do nothing at all with the pool.
    return Size(min(planned.least, most), max(most, target), target)


def is_counted(world: World, name: str) -> bool:
    """Whether a machine counts in the size of its pool: it is starting, or in service, and in no need of repair.

    One that someone else switched on counts until its start has an error: pods cannot use it then.
    """
    state, found = world.states.get(name), world.nodes.get(name)
    if state is None or name in world.foreign or (found and (found.node.needs_repair or too_many(world, name))):
        return False
    if state.phase is Phase.ON:
        return found is not None and not (found.is_starting and state.error)
    return state.phase is Phase.STARTING


def is_in_pool(world: World, name: str) -> bool:
    """Whether a machine's node is in its pool for the autoscaler: the size counts it, or the autoscaler drained it.

    The autoscaler waits for as many nodes as a pool's size is larger than the number of its nodes (clusterstate.go,
    GetUpcomingNodes): with one that the size does not count, it would have a second machine switched on for one pod.
    Those that it drained, and has switched off, it does not count itself.
    """
    return is_counted(world, name) or (world.phase(name) is Phase.STOPPING and name in world.nodes)


def too_many(world: World, name: str) -> str:
    """How a node offers more GPUs than its machine is known to have, "" if it does not.

    What it had in service counts, and what the plan has. One of which no GPUs are known may have those of its pool.
    """
    found, machine = world.nodes.get(name), world.plan.machines.get(name)
    if found is None or machine is None or not (found.odd or any(found.gpus.values())):
        return ""
    state = world.states.get(name)
    saved = state.saved.shape.capacity if state and state.saved else {}
    own = [each for each in (machine.capacity, saved) if any(devices.counts(each).values())]
    pool = (world.plan.machines[each].capacity for each in world.plan.of_pool[machine.pool])
    return nodes.too_many(found, own or [each for each in pool if each])


def unusable(world: World, name: str) -> str:
    """Why a machine gets no pods by being switched on, "" if it does."""
    state, found = world.states.get(name), world.nodes.get(name)
    if state is None:
        return "its power state is not yet known"
    if name in world.foreign:
        return FOREIGN
    if state.phase in (Phase.BY_HAND, Phase.LEFT_ALONE):
        return state.reason
    # While it is given up it may be on: it gets an order again when its BMC has shown that it is off.
    waits = state.phase is Phase.FAILED and world.now - state.since < RETRY_S
    if state.phase is Phase.GIVING_UP or waits or (state.needs_join and found is None):
        return state.error or state.reason
    return held(world, name) if found else _unusable_off(world, name, state)


def _unusable_off(world: World, name: str, state: MachineState) -> str:
    """As ``unusable``, of a machine without a node."""
    if name in world.locked:
        return world.locked[name]
    if why := versions.too_old(state.kubelet, world.version):
        return f"{why}: {upgraded(name)}"
    marks = state.saved.annotations if state.saved else {}
    if "gpunodes.dev/needs-repair" in marks:
        return f"needs repair: {marks['gpunodes.dev/needs-repair']}"
    return ""


def upgraded(name: str) -> str:
    """How a machine catches up with an upgrade that it missed."""
    return f"`gpunodes power {name} on --wait`, then `gpunodes upgrade`"


def held(world: World, name: str) -> str:
    """Why the autoscaler must leave a node alone, "" if it need not."""
    found = world.nodes.get(name)
    if found is None:
        return ""
    node = found.node
    if node.maintenance and node.maintenance.holds(world.now):
        return f"maintenance: {node.maintenance.described()}"
    if node.needs_repair:
        return f"needs repair: {node.needs_repair}"
    if node.rollout:
        return "a roll-out works on it"
    if node.cordoned_by_repair:
        return "a repair works on it"
    return "it was cordoned by someone else" if node.cordoned_by_others else too_many(world, name)


def is_worked_on(node: Node) -> bool:
    """Whether a repair or a roll-out works on a node, or was left there unfinished; not one that a repair gave up."""
    return bool(node.rollout or (node.cordoned_by_repair and not node.needs_repair))


def to_start(world: World, pool: str, count: int) -> list[str]:
    """Up to ``count`` machines to switch on: those that failed last, then the least recently used first."""

    def order(name: str) -> tuple[bool, float, str]:
        state = world.states[name]
        return state.phase is Phase.FAILED, state.used, name

    off = [
        name
        for name in world.plan.of_pool[pool]
        if world.phase(name) in (Phase.OFF, Phase.FAILED) and name not in world.nodes and not unusable(world, name)
    ]
    return sorted(off, key=order)[:count]


def unused(world: World) -> list[str]:
    """Machines that have been off for too long; at most one for each pool that has none starting."""
    found = []
    for pool, names in world.plan.of_pool.items():
        if size(world, pool).target >= world.plan.pools[pool].most:
            continue
        if any(world.phase(name) is Phase.STARTING for name in names):
            continue
        old = [name for name in to_start(world, pool, len(names)) if world.now - world.states[name].used > UNUSED_S]
        found += old[:1]
    return found


def template(world: World, pool: str) -> NodeShape:
    """What a pod would see of a new node of a pool: from its nodes as they were seen last, else as planned.

    Machines of several architectures, none of which more than half have, have no label of it. Of nodes that an earlier
    release saw, none is known.
    """
    planned = world.plan.pools[pool]
    states = (world.states.get(name) for name in world.plan.of_pool[pool])
    seen = [state.saved.shape for state in states if state and state.saved and state.saved.shape.capacity]
    found = planned.template
    if seen:
        documents = [each.document() for each in seen]
        found = node_shape(node_templates.template(documents, planned.given.document(), planned.template.document()))
    known = node_templates.keys_of_most([each.labels for each in seen]) | set(planned.template.labels)
    default = {key: text for key, text in SYSTEM_LABELS.items() if key not in known}
    return NodeShape({**default, **found.labels}, found.taints, found.capacity)


def adopted(world: World, is_on: Mapping[str, bool], silent: Mapping[str, str]) -> Iterator[tuple[str, MachineState]]:
    """The state of each machine that has none yet, from its node and its BMC; ``is_on`` lacks machines not asked.

    Of those in ``silent`` the BMC did not say it, with why.
    """
    for name in world.plan.machines:
        if name in world.states:
            continue
        if name in world.nodes:
            yield name, MachineState(Phase.ON, world.now, "it has a node", used=world.now, served=world.now)
        elif name in is_on and not is_on[name]:
            yield name, MachineState(Phase.OFF, world.now, FOUND_OFF, used=world.now)
        elif name in is_on:
            yield name, MachineState(Phase.LEFT_ALONE, world.now, ON_WITHOUT_NODE)
        elif name in silent:
            yield name, MachineState(Phase.LEFT_ALONE, world.now, NOT_KNOWN, silent[name], used=world.now)


def still_alone(state: MachineState, why: str) -> MachineState:
    """The state of a machine that is left alone: its BMC says that it is on, or does not say that, for ``why``."""
    if not state.error:
        return state
    return dataclasses.replace(state, reason=NOT_KNOWN if why else ON_WITHOUT_NODE, error=why)


def observed(world: World, name: str) -> MachineState:
    """The state of a machine after a look at its node; the same object if nothing follows from it."""
    state, found = world.states[name], world.nodes.get(name)
    if made := world.switched_off(name):
        # An order that is carried out ends first.
        return state if state.phase in (Phase.STOPPING, Phase.GIVING_UP) else switched_off_by_user(state, made)
    if found is None:
        # Whether it is on is asked of its BMC when it is needed next.
        if state.phase is not Phase.ON:
            return state
        why, now = FOREIGN if name in world.foreign else "its node was deleted by someone else", world.now
        return dataclasses.replace(state, phase=Phase.OFF, since=now, reason=why, used=now, served=now)
    reason, more = "", too_many(world, name)
    if state.phase is Phase.STARTING and more and found.node.ready:
        # Nothing is gained by another boot: it stays on, apart from its pool, which gets another machine.
        reason = "its node has registered"
    elif state.phase is Phase.STARTING and not found.is_starting and not nodes.not_in_service(found, _resources(state)):
        reason = "its node is in service"
    elif state.phase in (Phase.OFF, Phase.FAILED, Phase.BY_HAND, Phase.LEFT_ALONE) and found.node.ready:
        reason = "switched on by someone else"
    if reason:
        now = world.now
        state = dataclasses.replace(
            state, phase=Phase.ON, since=now, reason=reason, error="", used=now, served=now, needs_join=False
        )
    if state.phase is Phase.ON and more:
        # What it had before stays known.
        return state if state.error == more else dataclasses.replace(state, error=more)
    if state.phase is Phase.ON and not found.is_starting and not nodes.not_in_service(found, {}):
        saved = found.saved(world.plan.state_bytes)
        # What was wrong with it is over.
        after = dataclasses.replace(state, saved=saved, kubelet=found.kubelet, error="")
        return state if after == state else after
    return state


def switched_off_by_user(state: MachineState, made: KeptOff) -> MachineState:
    """The state of a machine that a user switched off; the same object if it is in that."""
    if state.phase is Phase.BY_HAND and state.reason == made.reason:
        return state
    return dataclasses.replace(state, phase=Phase.BY_HAND, since=made.since, reason=made.reason, error="")


def switched_off(state: MachineState, now: float) -> MachineState:
    """The state of a machine that was stopped or given up, when it is off."""
    if state.phase is Phase.GIVING_UP:
        # Tried again RETRY_S after it was given up, however long its BMC refused to switch it off.
        return dataclasses.replace(state, phase=Phase.FAILED, error=state.reason)
    return dataclasses.replace(state, phase=Phase.OFF, since=now, error="", used=now)


def without_autoscaler(state: MachineState, found: SeenNode | None, now: float) -> MachineState | None:
    """The state of a machine whose autoscaler was removed; None if nothing is to be remembered: it is as any other.

    ``found`` is its own node. What was begun ends as it will: a machine that then has a ready node is not off.
    """
    if state.phase in (Phase.ON, Phase.LEFT_ALONE) or (found and (found.node.ready or state.phase is Phase.STARTING)):
        return None
    if state.phase not in _DOING:
        return state
    # A node that is still there, and not ready, is one that nobody deleted when its machine was off. OFF would mean a
    # machine whose node was deleted, so that this one would be repaired.
    phase = Phase.BY_HAND if found else Phase.OFF
    reason = f"{_DOING[state.phase]} when the autoscaler was removed"
    return dataclasses.replace(state, phase=phase, since=now, reason=reason, error="")


def unregistered(name: str, state: MachineState, kubelet: Kubelet, now: float) -> MachineState:
    """The state of a machine whose boot was given up without a node; ``kubelet`` is what the network showed then.

    A kubelet whose certificate has ended does not listen. Neither does one that is broken: only after a long time out
    of service the certificate is the probable cause.
    """
    if kubelet is Kubelet.SILENT:
        return dataclasses.replace(state, reason=f"{state.reason}: its system did not respond")
    if kubelet is Kubelet.RUNS:
        return dataclasses.replace(state, reason=f"{state.reason}: its kubelet runs, but registers no node")
    if now - state.served <= _CERTIFICATE_S:
        return dataclasses.replace(state, reason=f"{state.reason}: its system responds, its kubelet does not run")
    days = f"{(now - state.served) / 86400:.0f} days" if state.served else "an unknown time"
    why = (
        f"its kubelet does not run after {days} out of service; its certificate has probably ended: "
        f"`gpunodes power {name} on`, then `gpunodes join {name}`"
    )
    return dataclasses.replace(state, reason=why, needs_join=True)


def _resources(state: MachineState) -> Mapping[str, str]:
    return state.saved.shape.capacity if state.saved else {}


def lacks(world: World, name: str) -> str:
    """What a machine that was switched on lacks before pods may use it, "" if its node has all of it."""
    state, found = world.states.get(name), world.nodes.get(name)
    if found is None:
        return "it has no node"
    saved = state.saved if state else None
    expected = saved.shape.capacity if saved else world.plan.machines[name].capacity
    return nodes.not_in_service(found, expected, network=world.plan.network)


def late(world: World, name: str) -> str:
    """Why the start of a machine is given up: what went wrong last, or what it lacks after its time."""
    error, within = world.states[name].error, f"within {world.plan.boot_s:.0f} s"
    if error or name not in world.nodes:
        return error or f"it had no node {within}"
    return f"its node was not in service {within}: {lacks(world, name) or 'no pod has used its GPUs'}"


def unserved(world: World, name: str) -> str:
    """Why a machine that is on, and that this server did not start, is still not in service; "" before its time is up.

    An error that it has stays.
    """
    state, found = world.states.get(name), world.nodes.get(name)
    if not state or not found or state.phase is not Phase.ON or state.error or not found.is_starting:
        return ""
    return late(world, name) if world.now - state.since > world.plan.boot_s else ""


def overdue(world: World) -> Sequence[str]:
    """Machines that did not start in time, and that the autoscaler has not given up."""
    limit = world.plan.boot_s * _GRACE
    return [
        name
        for name, state in world.states.items()
        if name in world.plan.machines and state.phase is Phase.STARTING and world.now - state.since > limit
    ]
