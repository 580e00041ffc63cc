"""What becomes of the machines of pools that scale without their autoscaler: none must wait for it.

A node that serves gets what only the autoscaler takes away taken away here, and its machine is as any other from then
on. What is off stays off, until `gpunodes power NAME on`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gpunodes.ansible.module_utils.scaling import PROVIDER
from gpunodes.autoscale import decisions, nodes
from gpunodes.autoscale import plan as plans
from gpunodes.autoscale.nodes import SeenNode
from gpunodes.autoscale.plan import Plan
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.autoscale.store import Overtaken
from gpunodes.engine.cluster.marks import Patch
from gpunodes.engine.fleet import Fleet, match_nodes
from gpunodes.errors import WrongInput
from gpunodes.operations.autoscale.objects import Objects
from gpunodes.operations.repair.context import Report

_END_S = 60.0
"""Time limit in seconds for the end of the autoscaler's pod: by default Kubernetes kills it after 30."""
_POLL_S = 1.0
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Removed:
    """A machine of a pool that scales, without an autoscaler."""

    name: str
    """Of its node."""
    before: MachineState | None
    """None without one, or if it is not valid."""
    after: MachineState | None
    """None if nothing is to be remembered of it."""
    node: SeenNode | None
    """Its own node."""
    recorded: bool = True
    """Whether the cluster has a state of it."""
    foreign: bool = False
    """A node of its name is not certainly its own, and has taints of the autoscaler."""

    @property
    def changes(self) -> bool:
        """Whether its state is written anew, or forgotten."""
        return self.recorded and (self.before is None or self.after != self.before)

    @property
    def pool(self) -> str:
        """As its node has it, or had it, "" if that is unknown."""
        saved = self.after.saved if self.after else None
        labels = self.node.labels if self.node else saved.shape.labels if saved else {}
        return labels.get("gpunodes.dev/pool", "")

    @property
    def phase(self) -> str:
        """As `autoscale status` names it."""
        if self.after:
            return self.after.phase.value
        return Phase.ON.value if self.node and self.node.node.ready else "unknown"

    @property
    def line(self) -> str:
        """What becomes of it, "" for one that serves as before."""
        if self.foreign:
            return "a node of its name is not certainly its own: it is left alone, with its taints gpunodes.dev/..."
        if self.after and self.after == self.before:
            return f"it stays as it is, {self.phase}, until `gpunodes power` switches it on"
        if self.after:
            until = "until its node is ready" if self.node else "until its node registers"
            return f"it counts as off on purpose {until}, or `gpunodes power` switches it on: {self.after.reason}"
        if self.node and (nodes.given_back(self.node) or (self.before and self.before.phase is not Phase.ON)):
            return "its node is that of any other machine: taints and marks of the autoscaler are removed"
        return ""


def planned(objects: Objects) -> Plan | None:
    """The plan in the cluster; None without a valid one."""
    with contextlib.suppress(WrongInput):
        return plans.parse(document) if (document := objects.plan()) else None
    return None


def read(fleet: Fleet, objects: Objects) -> list[Removed]:
    """What becomes of each machine of the plan, and of each that has a state, as things are now."""
    planned_now, found = planned(objects), objects.seen_nodes()
    states = objects.states(create=False)
    machines = planned_now.machines if planned_now else {}
    # What is no state of this version, but counts as one for other commands, is forgotten.
    recorded = {*states, *objects.switched_off()}
    own, now = _own(fleet, found, planned_now), time.time()
    done = []
    for name in sorted({*recorded, *machines}):
        before, node = states.get(name), own.get(name)
        after = decisions.without_autoscaler(before, node, now) if before else None
        foreign = node is None and name in found and nodes.given_back(found[name]) is not None
        done.append(Removed(name, before, after, node, name in recorded, foreign))
    return done


def settle(fleet: Fleet, objects: Objects, report: Report) -> list[Removed]:
    """Do that. If it is interrupted, another run goes on: a state is forgotten after its node was changed."""
    for _ in range(_ATTEMPTS):
        found = read(fleet, objects)
        for each in found:
            if each.node:
                objects.change(each.name, functools.partial(_given_back, each.node))
        try:
            if changes := {each.name: each.after for each in found if each.changes}:
                objects.write(changes)
        except Overtaken:
            # The last write of a power server that was ending, or of `gpunodes power`.
            continue
        if not any(each.after for each in found):
            objects.delete_states()
        for each in found:
            if each.line:
                report(each.name, each.line)
        return found
    raise Overtaken(
        "another program changes the states of machines all the time",
        "no power server",
        "see `kubectl -n kube-system get pods`, then run the same command again",
    )


def _given_back(known: SeenNode, now: SeenNode) -> Patch | None:
    """The patch for a node as it is now, unless it is another machine's by now."""
    ids = [(each.provider, each.node.system_uuid, each.node.machine_id) for each in (known, now)]
    return nodes.given_back(now) if ids[0] == ids[1] else None


def wait_for_end(objects: Objects, report: Report) -> None:
    """Wait until the deleted autoscaler's pods have ended: until then one may carry out an order.

    One on a control plane that does not respond is not waited for: without its account it begins nothing.
    """
    deadline = time.monotonic() + _END_S
    while left := objects.pod_nodes():
        if time.monotonic() > deadline:
            report("", f"the autoscaler's pod on {', '.join(left)} has not ended within {_END_S:.0f} s")
            return
        time.sleep(_POLL_S)


def _own(fleet: Fleet, found: Mapping[str, SeenNode], planned_now: Plan | None) -> dict[str, SeenNode]:
    """The nodes of machines of pools that scale, by name: registered as such, and certainly of these machines.

    By the inventory, and by the plan where it has the machine, as the power server does.
    """
    matches = match_nodes(fleet, [each.node for each in found.values()], {}).values()
    matched = [match.node.name for match in matches if match.node]
    own = {}
    for name, each in found.items():
        machine = planned_now.machines.get(name) if planned_now else None
        planned = nodes.is_own(each, machine) if machine else each.provider == PROVIDER + name
        if planned and matched.count(name) == 1:
            own[name] = each
    return own
