"""Verify GPUs from the driver up to a pod: four levels, and the first that failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunodes.engine import control_planes, events, journal, runner
from gpunodes.errors import Interrupted
from gpunodes.inventory import Inventory
from gpunodes.model import GpuLevel, GpuVerification, Machine
from gpunodes.operations import matching, phases, preflight
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
    facts = tracker.answers.get("host_facts", {})
    own = _nodes(inventory, machines, facts, preflight.checked_cluster(tracker, control) if control else None)
    return [
        assemble(
            machine.name,
            facts.get(machine.name),
            tracker.answers.get("gpu_levels", {}).get(machine.name, []),
            nodes.get(own.get(machine.name, ""), []),
            causes.get(machine.name, ""),
            "" if ended.ok else ended.error_text,
        )
        for machine in machines
    ]


def _nodes(
    inventory: Inventory,
    machines: Sequence[Machine],
    facts: Mapping[str, Mapping[str, Any]],
    cluster: Mapping[str, Any] | None,
) -> dict[str, str]:
    """The names of the machines' nodes; a node may have another name than its machine and its host."""
    if cluster is None:
        return {}
    valid = {machine.name: facts[machine.name] for machine in machines if machine.name in facts}
    valid = {name: each for name, each in valid.items() if not reports.machine_problem(each)}
    found = matching.matches(inventory, machines, valid, cluster["nodes"], confirmed=False)
    return {name: match.node.name for name, match in found.items() if match.node}


def assemble(
    name: str,
    facts: Mapping[str, Any] | None,
    levels: Sequence[Mapping[str, str]],
    node_levels: Sequence[Mapping[str, str]],
    cause: str,
    error: str = "",
) -> GpuVerification:
    """A machine's levels, from its own report and its cluster's about its node.

    ``cause`` is why it failed, ``error`` why the whole run did, which counts for a machine that reported nothing.
    """
    if facts is None:
        return GpuVerification(name, 0, (), cause or error or "its facts could not be read")
    if found := reports.machine_problem(facts) or reports.levels_problem(levels):
        return GpuVerification(name, 0, (), found)
    if found := reports.levels_problem(node_levels):
        return GpuVerification(name, 0, (), f"its node: {found}")
    seen = tuple(
        GpuLevel(**{each: level[each] for each in ("level", "state", "fact", "wanted", "remedy")})
        for level in [*levels, *node_levels]
    )
    gpus = len(gpus_of(facts))
    # A machine that failed without a failed level was not verified to the end.
    is_complete = any(level.state == "failed" for level in seen) or not gpus
    return GpuVerification(name, gpus, seen, "" if is_complete else cause or ("" if seen else error))
