"""The plan of an upgrade of Kubernetes: reads the whole cluster and judges it. Nothing is changed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpunodes.engine import events, journal, runner
from gpunodes.errors import GpunodesError, Interrupted
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, Role
from gpunodes.operations import matching, phases, preflight, switched_off
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner import reports, upgrade, versions
from gpunodes.planner.candidates import MachineFacts, requirements_of
from gpunodes.planner.shared_identities import own_nodes
from gpunodes.planner.upgrade_model import Subject, UpgradePlan
from gpunodes.repair import maintenance

PHASES = (phases.PREFLIGHT, phases.UPGRADE_FACTS)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with the reports on which it rests: an upgrade passes them on."""

    plan: UpgradePlan
    seen: preflight.Inspection


def run(inventory: Inventory, requested: str, view: RunView) -> Planned:
    """Read all machines of the cluster, and plan its upgrade to ``requested``, a minor or an exact version.

    Those that are off on purpose are not contacted; the plan passes them over.

    Raises WrongInput for a version that is not possible whatever the machines report, and GpunodesError without a
    cluster that responds.
    """
    wanted = versions.check(requested)
    every = inventory.machines(Role.CONTROL_PLANE, Role.WORKER)
    machines, off = switched_off.split(inventory, every, is_rolled_out=True)
    folder = journal.open_run("upgrade plan")
    view.begin("upgrade plan", machines)
    # The control plane is queried for its cluster in any case.
    seen = preflight.inspect(
        inventory, machines, folder, view, {}, sources=False, compares=True, compares_kubelets=True
    )
    if seen.interrupted:
        raise Interrupted
    if seen.cluster is None:
        finding = seen.no_cluster()
        problem = finding.problem
        raise GpunodesError(f"{finding.machine}: {problem.found}", problem.wanted, problem.remedy)
    upgrade.check_order(wanted, str(seen.cluster["version"]).removeprefix("v"))
    tracker = _read(inventory, machines, seen, wanted, folder, view)
    nodes, candidates = _nodes(inventory, every, seen, wanted), {each.name: each for each in seen.candidates}
    subjects = [
        _subject(
            candidates.get(each.name) or MachineFacts(each.name, each.role, None, off.get(each.name, "")),
            tracker,
            nodes.get(each.name, {}),
        )
        for each in every
    ]
    plan = upgrade.plan(wanted, subjects, seen.cluster)
    return Planned(replace(plan, findings=[*plan.findings, *preflight.drift_findings(seen)]), seen)


def _read(
    inventory: Inventory,
    machines: list[Machine],
    seen: preflight.Inspection,
    wanted: str,
    folder: Path,
    view: RunView,
) -> Tracker:
    """What the machines report of their versions."""
    own = folder / "versions"
    own.mkdir(mode=0o700)
    tracker = Tracker(machines, PHASES, view)
    play = runner.Play(
        "upgrade_facts.yml",
        inventory,
        [machine.name for machine in machines if machine.name in seen.facts],
        variables={"upgrade_minor": versions.minor_of(wanted), "upgrade_requested": wanted},
        facts=seen.facts,
        cluster=seen.cluster,
    )
    if play.machines:
        ended = runner.run(play, own, tracker.on_event)
        if ended.interrupted:
            raise Interrupted
        tracker.check_controller(ended)
    return tracker


def _nodes(
    inventory: Inventory, machines: Sequence[Machine], seen: preflight.Inspection, wanted: str
) -> dict[str, Mapping[str, Any]]:
    """The machines' nodes; of machines that did not respond, those by their name and by what they last reported."""
    requirements = requirements_of(seen.cluster, wanted)
    found = own_nodes([each for each in seen.candidates if each.facts], requirements)
    taken = {node["name"] for node in found.values()}
    others = {node["name"]: node for node in requirements.nodes if node["name"] not in taken}
    if silent := [each for each in machines if each.name not in seen.facts]:
        matches = matching.matches(inventory, silent, seen.facts, requirements.nodes, confirmed=False)
        found |= {
            name: others[match.node.name] for name, match in matches.items() if match.node and match.node.name in others
        }
    return found


def _subject(candidate: MachineFacts, tracker: Tracker, node: Mapping[str, Any]) -> Subject:
    own = tracker.answers.get("upgrade_facts", {}).get(candidate.name)
    failure = tracker.failures.get(candidate.name)
    why = candidate.unreachable or (events.cause(failure) if failure else "")
    if own is not None and (wrong := reports.upgrade_problem(own)):
        own, why = None, wrong
    maintained = maintenance.parse(str(node.get("maintenance") or ""))
    return Subject(
        name=candidate.name,
        role=candidate.role,
        facts=candidate.facts,
        own=own,
        node=node,
        unreachable=why,
        gates=candidate.requested.gates,
        maintenance=maintained.described() if maintained and maintained.holds(time.time()) else "",
    )
