"""The plan of an upgrade of Kubernetes: reads the whole cluster and judges it. Nothing is changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine import events, journal, runner
from gpunodes.errors import GpunodesError, Interrupted
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, PreflightFinding, Role, Severity
from gpunodes.operations import phases, preflight, switched_off
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner import reports, upgrade, versions
from gpunodes.planner.candidates import MachineFacts, requirements_of
from gpunodes.planner.shared_identities import own_nodes
from gpunodes.planner.upgrade_model import Subject, UpgradePlan

OFF = "power"
"""The check of machines that are left out, since they are off on purpose."""
PHASES = (phases.PREFLIGHT, phases.UPGRADE_FACTS)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with the reports on which it rests: an upgrade passes them on."""

    plan: UpgradePlan
    seen: preflight.Inspection


def run(inventory: Inventory, requested: str, view: RunView) -> Planned:
    """Read all machines of the cluster, and plan its upgrade to ``requested``, a minor or an exact version.

    Those that the autoscaler keeps off are left out, with a warning.

    Raises WrongInput for a version that is not possible whatever the machines report, and GpunodesError without a
    cluster that responds.
    """
    wanted = versions.check(requested)
    machines, off = switched_off.split(
        inventory, inventory.machines(Role.CONTROL_PLANE, Role.WORKER), is_rolled_out=True
    )
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
    subjects = _read(inventory, machines, seen, wanted, folder, view)
    plan = upgrade.plan(wanted, subjects, seen.cluster)
    left_out = [PreflightFinding(name, OFF, Problem(why, "", ""), Severity.WARNING) for name, why in off.items()]
    return Planned(replace(plan, findings=[*plan.findings, *preflight.drift_findings(seen), *left_out]), seen)


def _read(
    inventory: Inventory,
    machines: list[Machine],
    seen: preflight.Inspection,
    wanted: str,
    folder: Path,
    view: RunView,
) -> list[Subject]:
    """The machines with their versions; one that fails has the reason."""
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
    present = [each for each in seen.candidates if each.facts]
    nodes = own_nodes(present, requirements_of(seen.cluster, wanted))
    return [_subject(each, tracker, nodes.get(each.name, {})) for each in seen.candidates]


def _subject(candidate: MachineFacts, tracker: Tracker, node: object) -> Subject:
    own = tracker.answers.get("upgrade_facts", {}).get(candidate.name)
    failure = tracker.failures.get(candidate.name)
    why = candidate.unreachable or (events.cause(failure) if failure else "")
    if own is not None and (wrong := reports.upgrade_problem(own)):
        own, why = None, wrong
    return Subject(
        name=candidate.name,
        role=candidate.role,
        facts=candidate.facts,
        own=own,
        node=node if isinstance(node, dict) else {},
        unreachable=why,
        gates=candidate.requested.gates,
    )
