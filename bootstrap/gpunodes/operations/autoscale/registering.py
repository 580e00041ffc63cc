"""Which machines of pools that scale are prepared now, and how: they register their nodes by themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpunodes.ansible.module_utils.scaling import PROVIDER
from gpunodes.autoscale.nodes import SeenNode
from gpunodes.engine import journal
from gpunodes.engine.fleet import InventoryFleet
from gpunodes.errors import ExitCode, GpunodesError, Interrupted
from gpunodes.model import Machine, Severity
from gpunodes.operations import preflight, registration, switched_off
from gpunodes.operations.run import RunOptions, carry_out
from gpunodes.operations.tracker import RunView
from gpunodes.repair.switched_off import Switched


@dataclass(frozen=True, slots=True)
class Chosen:
    """The machines that are prepared, by node; the others by their names, with why they are not."""

    machines: Mapping[str, Machine]
    passed_over: Mapping[str, str]
    """Machines that are off, or in maintenance."""
    silent: Mapping[str, str]
    """Machines that should respond, and do not."""
    strangers: frozenset[str]
    """The nodes of these that were never prepared: the power server leaves them alone."""


def choose(
    fleet: InventoryFleet,
    machines: Mapping[str, Machine],
    nodes: Mapping[str, SeenNode],
    switched: Mapping[str, Switched],
    view: RunView,
) -> Chosen:
    """Find out which of ``machines``, by node, can be prepared; ``switched`` are the states of those off on purpose.

    The others are contacted. Nothing is changed.
    """
    reasons = {node: _left(machine.name, nodes.get(node), switched.get(node)) for node, machine in machines.items()}
    silent = _silent(fleet, [machine for node, machine in machines.items() if not reasons[node]], view)
    chosen = {node: each for node, each in machines.items() if not reasons[node] and each.name not in silent}
    return Chosen(
        chosen,
        {machines[node].name: why for node, why in reasons.items() if why},
        silent,
        frozenset(
            name
            for name in machines
            if name not in chosen and name in nodes and nodes[name].provider != PROVIDER + name
        ),
    )


def register(fleet: InventoryFleet, machines: Sequence[Machine], view: RunView) -> None:
    """Let machines register their nodes by themselves; raises GpunodesError with the first cause."""
    if not machines:
        return
    done = carry_out(registration.OPERATION, fleet.inventory, machines, view, RunOptions())
    if done.interrupted:
        raise Interrupted
    if done.exit_code is not ExitCode.DONE:
        causes = [str(finding) for finding in done.findings if finding.severity is Severity.ERROR]
        causes += [f"{each.name}: {each.cause}" for each in done.machines if each.cause]
        raise GpunodesError(
            causes[0] if causes else "the machines could not be prepared",
            "machines that register their nodes by themselves",
            f"run the same command again; the log is {done.log}",
        )


def _left(name: str, found: SeenNode | None, state: Switched | None) -> str:
    """Why a machine is not prepared, "" if it is; ``found`` is its node, ``state`` what was done with it last."""
    if state and state.is_off(ready=found.node.ready if found else None):
        return switched_off.left_out(name, state.described)
    if found is None:
        return "it has no node now; see `gpunodes autoscale status`"
    held = found.node.maintenance
    if held and held.holds(time.time()):
        return f"in maintenance: {held.described()}; `gpunodes maintenance off {name}`, then the same command again"
    return ""


def _silent(fleet: InventoryFleet, machines: Sequence[Machine], view: RunView) -> dict[str, str]:
    """Why machines do not respond, by name; one that responds, and on which something fails, is not among them."""
    if not machines:
        return {}
    view.begin("autoscale up", machines)
    seen = preflight.inspect(fleet.inventory, machines, journal.open_run("autoscale up"), view, {}, sources=False)
    if seen.interrupted:
        raise Interrupted
    return {each.name: each.unreachable for each in seen.candidates if each.silent}
