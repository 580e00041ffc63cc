"""The preflight of machines: their facts, read in one round trip and judged together. Nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunodes import settings
from gpunodes.ansible.module_utils.gpunodes.problem import Problem
from gpunodes.engine import events, identities, journal, runner
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, MachineResult, Outcome, PreflightFinding, RunResult, TaskEnded
from gpunodes.operations import phases
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner import gpu, preflight, reports, versions

PHASES = (phases.PREFLIGHT,)


@dataclass(frozen=True, slots=True)
class Inspection:
    """The facts that a preflight read."""

    candidates: Sequence[preflight.MachineFacts]
    cluster: Mapping[str, Any] | None
    """The report of the module ``cluster_info``, or None without a cluster."""
    control_failure: TaskEnded | None
    """The failure of querying the control plane, if any."""
    interrupted: bool
    log: Path

    @property
    def facts(self) -> dict[str, Mapping[str, Any]]:
        """The machines' facts by name, for the following playbook: they are not read again."""
        return {candidate.name: candidate.facts for candidate in self.candidates if candidate.facts is not None}

    def no_cluster(self, control: str) -> PreflightFinding:
        """The finding that there is no cluster to join. A new one is suggested only if the control plane responded."""
        if failure := self.control_failure:
            problem = Problem(events.cause(failure), "a control plane that responds", no_contact(failure))
            return PreflightFinding(control, "cluster", problem)
        remedy = f"`gpunodes init-master {control}` creates one; if it has one, start its API server"
        problem = Problem("it runs no cluster that responds", "a cluster to join", remedy)
        return PreflightFinding(control, "cluster", problem)


def no_contact(failure: TaskEnded) -> str:
    """The remedy for a control plane that could not be queried."""
    if failure.outcome is Outcome.UNREACHABLE:
        return "start the machine, or correct its address and SSH settings in the inventory"
    return "correct that, then run the same command again"


def inspect(
    inventory: Inventory,
    machines: Sequence[Machine],
    folder: Path,
    view: RunView,
    variables: Mapping[str, Any],
    *,
    sources: bool = True,
) -> Inspection:
    """Read the facts of ``machines`` and of the cluster of the inventory's control plane, if any.

    ``sources``: the machines query their package sources, too. Raises GpunodesError if Ansible fails on the controller.
    """
    control = inventory.control_plane()
    requested = {
        machine.name: gpu.requested_of(settings.resolve({**inventory.variables(machine.name), **variables}), "")
        for machine in machines
    }
    tracker = Tracker(machines, PHASES, view)
    for machine in machines:
        view.phase(machine.name, phases.PREFLIGHT)
    wanted = [machine.name for machine in machines]
    names = list(dict.fromkeys([*wanted, control.name]))
    play = runner.Play(
        "facts.yml",
        inventory.path,
        names,
        skip_phases=[] if sources else [phases.PREFLIGHT.name],
        variables={**variables, "facts_wanted": wanted},
    )
    ended = runner.run(play, folder, tracker.on_event)
    tracker.check_controller(ended)
    reported = tracker.answers.get("host_facts", {})
    candidates = []
    for machine in machines:
        failure = tracker.failures.get(machine.name)
        why = events.cause(failure) if failure else ended.error_text
        if machine.name in reported:
            why = reports.of_machine(reported[machine.name])
        candidates.append(
            preflight.MachineFacts(
                name=machine.name,
                role=machine.role,
                facts=None if why else reported[machine.name],
                unreachable=why,
                read_at=tracker.answered_at.get(machine.name),
                requested=requested[machine.name],
                address=machine.address,
            )
        )
    identities.remember(inventory.cluster, {each.name: each.facts for each in candidates})
    cluster = checked_cluster(tracker, control.name)
    requested_kubernetes = str(
        settings.resolve({**inventory.variables(control.name), **variables})["gpunodes_kubernetes_version"]
    )
    own = str((cluster or {}).get("version") or requested_kubernetes).removeprefix("v")
    if sources and versions.minor_of(own) != versions.minor_of(requested_kubernetes):
        # The machines queried the package source of another minor than the cluster's, which was not known yet.
        again = folder / "again"
        again.mkdir(mode=0o700)
        return inspect(inventory, machines, again, view, {**variables, "gpunodes_kubernetes_version": own})
    return Inspection(candidates, cluster, tracker.failures.get(control.name), ended.interrupted, ended.log)


def checked_cluster(tracker: Tracker, control: str) -> Mapping[str, Any] | None:
    """The control plane's report of its cluster, None for none; raises GpunodesError for an invalid report."""
    cluster: Mapping[str, Any] | None = tracker.answers.get("cluster", {}).get(control)
    if cluster is not None and (found := reports.of_cluster(cluster)):
        raise GpunodesError(
            f"{control}: its report of the cluster is invalid: {found}",
            "a report of the module cluster_info",
            "check that the machine and its API server are yours",
        )
    return cluster


def judge(seen: Inspection, kubernetes: str) -> list[PreflightFinding]:
    """Compare the facts with the limits; an existing cluster decides the version."""
    return preflight.judge(seen.candidates, preflight.requirements_of(seen.cluster, kubernetes))


def requested_version(inventory: Inventory, given: str | None) -> str:
    """The Kubernetes version that the user or the settings request; raises WrongInput for an unknown one."""
    requested = (
        given or settings.resolve(inventory.variables(inventory.control_plane().name))["gpunodes_kubernetes_version"]
    )
    return versions.check(str(requested))


def run(inventory: Inventory, machines: Sequence[Machine], view: RunView, kubernetes: str | None = None) -> RunResult:
    """The command `preflight`: all findings of all machines; nothing is changed."""
    version = requested_version(inventory, kubernetes)
    folder = journal.open_run("preflight")
    view.begin("preflight", machines)
    seen = inspect(inventory, machines, folder, view, {"gpunodes_kubernetes_version": version})
    findings = judge(seen, version)
    view.findings(findings)
    unreachable = {candidate.name for candidate in seen.candidates if candidate.facts is None}
    results = [
        MachineResult(machine.name, Outcome.UNREACHABLE if machine.name in unreachable else Outcome.UNCHANGED)
        for machine in machines
    ]
    return RunResult("preflight", results, findings, str(seen.log), interrupted=seen.interrupted)
