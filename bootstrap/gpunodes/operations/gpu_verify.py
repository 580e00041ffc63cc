"""Verify GPUs from the driver up to a pod: four levels, and the first that failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes.engine import control_planes, events, journal, runner
from gpunodes.errors import Interrupted
from gpunodes.inventory import Inventory
from gpunodes.model import GpuLevel, GpuVerification, Machine
from gpunodes.operations import phases
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner import reports
from gpunodes.planner.gpu import gpus_of

PHASES = (phases.GPU_MACHINE, phases.GPU_NODE)


def run(
    inventory: Inventory, machines: Sequence[Machine], view: RunView, variables: Mapping[str, Any]
) -> list[GpuVerification]:
    """Check the levels on all machines in parallel; nothing is changed."""
    tracker = Tracker(machines, PHASES, view)
    view.begin("gpu verify", machines)
    folder = journal.open_run("gpu verify")
    control = control_planes.choose(inventory).machine.name if inventory.controls_of(machines) else ""
    names = list(dict.fromkeys([*(machine.name for machine in machines), *([control] if control else ())]))
    play = runner.Play("gpu_verify.yml", inventory, names, variables=variables, control=control)
    ended = runner.run(play, folder, tracker.on_event)
    if ended.interrupted:
        raise Interrupted
    tracker.check_controller(ended)
    # All nodes are verified by one task, whose result Ansible reports for an arbitrary machine.
    nodes: dict[str, Any] = {}
    for result in tracker.answers.get("gpu_nodes", {}).values():
        nodes |= result if isinstance(result, dict) else {}
    causes = {name: events.cause(failure) for name, failure in tracker.failures.items()}
    return [
        assemble(
            machine.name,
            tracker.answers.get("host_facts", {}).get(machine.name),
            tracker.answers.get("gpu_levels", {}).get(machine.name, []),
            nodes,
            causes.get(machine.name) or ("" if ended.ok else ended.error_text),
        )
        for machine in machines
    ]


def assemble(
    name: str,
    facts: Mapping[str, Any] | None,
    levels: Sequence[Mapping[str, str]],
    nodes: Mapping[str, Sequence[Mapping[str, str]]],
    cause: str,
) -> GpuVerification:
    """A machine's levels, from its own report and its cluster's; ``cause`` is why a report is missing."""
    if facts is None:
        return GpuVerification(name, 0, (), cause or "its facts could not be read")
    if found := reports.machine_problem(facts) or reports.levels_problem(levels):
        return GpuVerification(name, 0, (), found)
    node_levels = nodes.get(str(facts["hostname"]).lower(), [])
    if found := reports.levels_problem(node_levels):
        return GpuVerification(name, 0, (), f"its node: {found}")
    seen = tuple(
        GpuLevel(**{each: level[each] for each in ("level", "state", "fact", "wanted", "remedy")})
        for level in [*levels, *node_levels]
    )
    return GpuVerification(name, len(gpus_of(facts)), seen, "" if seen or not gpus_of(facts) else cause)
