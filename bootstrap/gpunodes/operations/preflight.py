"""The preflight of machines: their facts, read in one round trip and judged together. Nothing is changed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpunodes import settings
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.engine import control_planes, events, identities, journal, runner
from gpunodes.engine.cluster.connection import INVALID, NO_CLUSTER, NO_SESSION
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import Machine, MachineResult, Outcome, PreflightFinding, Role, RunResult, Severity, TaskEnded
from gpunodes.operations import claims, judged, kubelets, matching, phases, switched_off
from gpunodes.operations.storage import findings as storage_findings
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner import (
    certificates,
    drift,
    endpoint,
    gpu,
    kubelet_drift,
    networks,
    preflight,
    reports,
    storage,
    versions,
)
from gpunodes.planner.candidates import Growth, MachineFacts, requirements_of
from gpunodes.planner.control_planes import START_API, given
from gpunodes.planner.node_address import SETTING as ADDRESS
from gpunodes.planner.runtime_versions import SETTING as CONTAINERD

PHASES = (phases.PREFLIGHT,)
_VERSION = "gpunodes_kubernetes_version"


@dataclass(frozen=True, slots=True)
class Inspection:
    """The facts that a preflight read."""

    candidates: Sequence[MachineFacts]
    control: str
    """The control-plane machine, "" if it was not contacted."""
    cluster: Mapping[str, Any] | None
    """The report of the module ``cluster_info``, or None without a cluster."""
    control_failure: TaskEnded | None
    """The failure of querying the control plane, if any."""
    unresponsive: str
    """Why the API of its cluster does not respond, "" if it does or there is no cluster."""
    interrupted: bool
    log: Path
    prepares: bool = False
    """Whether the machines are only prepared, and join later."""
    alone: bool = False
    """Whether their cluster is not known, as in ``ClusterRequirements``."""
    choice: control_planes.Choice | None = None
    """The control plane that was contacted, if any."""
    warnings: Sequence[PreflightFinding] = ()
    """Control planes that do not respond, while another one does."""
    controls: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of ``control_planes.given`` that the inventory and the cluster determine."""
    listed: Mapping[str, str] = field(default_factory=dict)
    """The addresses of the inventory's machines, as in ``ClusterRequirements``."""
    differing: Sequence[drift.MachineDrift] = ()
    """How the control planes differ from their settings, if that was read."""
    kubelets: kubelet_drift.KubeletDrift = field(default_factory=kubelet_drift.KubeletDrift)
    """How the kubelets of the machines do, if that was read."""

    @property
    def facts(self) -> dict[str, Mapping[str, Any]]:
        """The machines' facts by name, for the following playbook: they are not read again."""
        return {candidate.name: candidate.facts for candidate in self.candidates if candidate.facts is not None}

    def no_cluster(self) -> PreflightFinding:
        """The finding that there is no cluster to join. A new one is suggested only to a machine that has none."""
        if self.control_failure:
            return PreflightFinding(self.control, "cluster", not_read(self.control_failure))
        if self.unresponsive:
            found, wanted = f"it has a cluster, but {self.unresponsive}", "an API that responds"
            remedy = "start it there; `journalctl -u kubelet` and `crictl ps -a` show why it does not run"
        else:
            found, wanted = "it runs no cluster", "a cluster to join"
            remedy = f"`gpunodes init-master {self.control}` creates one"
        return PreflightFinding(self.control, "cluster", Problem(found, wanted, remedy))


def not_read(failure: TaskEnded) -> Problem:
    """The problem of a control plane that could not be queried."""
    remedy = "correct that, then run the same command again"
    if failure.outcome is Outcome.UNREACHABLE:
        remedy = "start the machine, or correct its address and SSH settings in the inventory"
    # The message of a module that reports a problem says what it wanted (module_utils/entry.py).
    wanted = "" if failure.result.get("wanted") else "a control plane that responds"
    return Problem(events.cause(failure), wanted, remedy)


# Long: the steps of an inspection in their order, and the result.
def inspect(
    inventory: Inventory,
    machines: Sequence[Machine],
    folder: Path,
    view: RunView,
    variables: Mapping[str, Any],
    *,
    sources: bool = True,
    without_cluster: bool = False,
    alone: bool = False,
    compares: bool = False,
    compares_kubelets: bool = False,
    choice: control_planes.Choice | None = None,
) -> Inspection:
    """Read the facts of ``machines`` and of the cluster of the inventory's control planes, if any.

    ``sources``: the machines query their package sources, too. ``without_cluster``: no cluster is read, and machines
    report the GPUs that copies of their disks will find. ``alone``: none is read either, but the machines may be nodes
    of one, and report what they have. ``compares``: control planes among the machines are compared
    with their settings. ``compares_kubelets``: so are the kubelets of machines that are nodes. ``choice``: the control
    plane, if one is chosen. Raises GpunodesError if Ansible fails on the controller.
    """
    warnings: Sequence[PreflightFinding] = ()
    if choice is None and not (without_cluster or alone) and inventory.controls_of(machines):
        choice = control_planes.choose(inventory, {machine.name for machine in machines})
        warnings = claims.unresponsive(choice)
    control = choice.machine if choice else None
    rendered = judged.rendered(inventory, machines, variables, refuses=sources)
    tracker = Tracker(machines, PHASES, view)
    for machine in machines:
        view.phase(machine.name, phases.PREFLIGHT)
    wanted = [machine.name for machine in machines]
    names = list(dict.fromkeys([*wanted, *([control.name] if control else ())]))
    play = runner.Play(
        "prepare_facts.yml" if without_cluster else "facts.yml",
        inventory,
        names,
        skip_phases=[] if sources else [phases.PREFLIGHT.name],
        variables={
            **variables,
            "facts_wanted": wanted,
            "facts_drift": compares,
            "facts_kubelets": compares_kubelets,
            "kubelet_fields": kubelets.fields(inventory) if compares_kubelets else [],
        },
        control=control.name if control else "",
    )
    ended = runner.run(play, folder, tracker.on_event)
    tracker.check_controller(ended)
    candidates = _explained(inventory, [_candidate(each, tracker, rendered[each.name], variables) for each in machines])
    identities.remember(inventory.cluster, {each.name: each.facts for each in candidates})
    if control is None:
        found = Inspection(candidates, "", None, None, "", ended.interrupted, ended.log)
        return replace(found, prepares=without_cluster, alone=alone)
    cluster = checked_cluster(tracker, control.name)
    listed = inventory.machines(Role.CONTROL_PLANE)
    others = [each for each in listed if each.name not in rendered]
    rendered |= judged.rendered(inventory, others, variables, refuses=sources)
    requested = settings.resolve({**rendered[control.name], **variables})
    requested_kubernetes = str(requested["gpunodes_kubernetes_version"])
    own = str((cluster or {}).get("version") or requested_kubernetes).removeprefix("v")
    if sources and versions.minor_of(own) != versions.minor_of(requested_kubernetes):
        # The machines queried the package source of another minor than the cluster's, which was not known yet.
        again = folder / "again"
        again.mkdir(mode=0o700)
        newer = {**variables, "gpunodes_kubernetes_version": own}
        newer_seen = inspect(
            inventory,
            machines,
            again,
            view,
            newer,
            choice=choice,
            compares=compares,
            compares_kubelets=compares_kubelets,
        )
        return replace(newer_seen, warnings=warnings)
    failure, reason = tracker.failures.get(control.name), tracker.answers.get("unresponsive", {}).get(control.name, "")
    found = Inspection(candidates, control.name, cluster, failure, str(reason), ended.interrupted, ended.log)
    controls = _controls({each.name: each.address for each in listed}, requested, cluster)
    differing = [drift.of_report(*each) for each in tracker.answers.get("control_plane_drift", {}).items()]
    nodes = {each.name: each.address for each in inventory.machines(Role.CONTROL_PLANE, Role.WORKER)}
    found = replace(found, choice=choice, warnings=warnings, controls=controls, differing=differing, listed=nodes)
    return _with_kubelets(inventory, machines, found, tracker) if compares_kubelets else found


def _with_kubelets(inventory: Inventory, machines: Sequence[Machine], seen: Inspection, tracker: Tracker) -> Inspection:
    """The same, with the drift of the machines' kubelets."""
    if seen.cluster is None:
        return seen
    found = matching.matches(inventory, machines, seen.facts, seen.cluster["nodes"], confirmed=False)
    owners = {match.node.name: name for name, match in found.items() if match.node}
    report = tracker.answers.get("kubelet_settings", {}).get(seen.control)
    return replace(seen, kubelets=kubelets.compared(inventory, owners, seen.cluster, report))


def _controls(
    addresses: Mapping[str, str], requested: Mapping[str, Any], cluster: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """What the inventory and the cluster determine of ``given``: its control planes, and the settings of one."""
    target = requested[endpoint.VIP] or requested[endpoint.ENDPOINT]
    return {
        "machines": addresses,
        "endpoint": str((cluster or {}).get("endpoint") or target or ""),
        "arguments": requested["gpunodes_component_arguments"],
        "leader_election": (cluster or {}).get("leader_election", True),
    }


def _explained(inventory: Inventory, candidates: list[MachineFacts]) -> list[MachineFacts]:
    """The same, where machines that were not read say it if they are off on purpose."""
    if all(each.facts is not None for each in candidates):
        return candidates
    off = switched_off.read(inventory)
    return [
        replace(each, unreachable=f"{off[each.name].described}; `gpunodes power {each.name} on` ends that")
        if each.facts is None and each.name in off
        else each
        for each in candidates
    ]


def _candidate(
    machine: Machine, tracker: Tracker, own: Mapping[str, Any], variables: Mapping[str, Any]
) -> MachineFacts:
    """What a machine reported, or why it did not; ``own`` are its variables, ``variables`` those of the run."""
    resolved = settings.resolve({**own, **variables})
    shares = resolved[storage.SETTING]
    # A wrong value is another check's problem.
    serves = not [*storage.problems(shares)] and storage.serves(shares, own.get("group_names") or ())
    facts = tracker.answers.get("host_facts", {}).get(machine.name)
    failure = tracker.failures.get(machine.name)
    why = events.cause(failure) if failure else "Ansible stopped before the machine reported its facts"
    if facts is not None:
        why = reports.machine_problem(facts)
    return MachineFacts(
        name=machine.name,
        role=machine.role,
        facts=None if why else facts,
        unreachable=why,
        read_at=tracker.answered_at.get(machine.name),
        requested=gpu.requested_of(resolved, ""),
        network=networks.settings_of(resolved, storage=serves),
        endpoint=endpoint.settings_of(resolved),
        asked_at=tracker.asked_at.get(machine.name),
        time_service=str(resolved["gpunodes_time_service"]),
        containerd=str(resolved[CONTAINERD]),
        address=machine.address,
        node_address=str(resolved[ADDRESS]),
        silent=facts is None and failure is not None and failure.outcome is Outcome.UNREACHABLE,
    )


def checked_cluster(tracker: Tracker, control: str) -> Mapping[str, Any] | None:
    """The control plane's report of its cluster, None for none; raises GpunodesError for an invalid report."""
    cluster: Mapping[str, Any] | None = tracker.answers.get("cluster", {}).get(control)
    if cluster is not None and (found := reports.cluster_problem(cluster)):
        raise GpunodesError(
            f"{control}: its report of the cluster is invalid: {found}",
            "a report of the module cluster_info",
            "check that the machine and its API server are yours",
        )
    return cluster


def judge(
    seen: Inspection,
    kubernetes: str,
    *,
    needs_cluster: bool = False,
    joins: bool = True,
    growth: Growth = Growth.SELECTED,
) -> list[PreflightFinding]:
    """Compare the facts with the limits; an existing cluster decides the version.

    ``joins``: machines become nodes. ``growth``: which control planes the run may add.
    """
    controls = given(**seen.controls, growth=growth.value) if seen.controls else None
    requirements = requirements_of(
        seen.cluster,
        kubernetes,
        joins=joins,
        prepares=seen.prepares,
        alone=seen.alone,
        control_planes=controls,
        listed=seen.listed,
    )
    findings = [*seen.warnings, *preflight.judge(seen.candidates, requirements), *drift_findings(seen)]
    if needs_cluster and seen.cluster is None:
        findings.append(seen.no_cluster())
    elif seen.unresponsive:
        # No error: `init-master` and `up` start an API that has stopped, if they can.
        findings.append(replace(seen.no_cluster(), severity=Severity.WARNING))
    ends = certificates.ending((seen.cluster or {}).get("certificates", ()), time.time())
    return findings + [PreflightFinding(seen.control, "certificates", each, Severity.WARNING) for each in ends]


def another_cluster(inventory: Inventory, machines: Sequence[Machine], seen: Inspection) -> list[PreflightFinding]:
    """The control planes beside ``machines`` that have a cluster, or may have one, if a new one would be created.

    That would be a second one with the same endpoint.
    """
    chosen = {machine.name for machine in machines}
    stopped = seen.unresponsive and seen.control in chosen
    others = [each for each in inventory.controls_of(machines) if each.name not in chosen]
    if seen.cluster or seen.interrupted or stopped:
        return []
    found = []
    for name, response in control_planes.responses(inventory, others).items():
        if response.status == NO_CLUSTER:
            continue
        silent = response.status in (NO_SESSION, INVALID)
        has = "whether it has a cluster is not known" if silent else "it has a cluster, whose API does not respond"
        problem = Problem(
            f"{has}: {response.error}" if response.error else has,
            "control planes without a cluster, before one is created",
            "start it, or remove it from the group control_plane if it has none" if silent else START_API,
        )
        found.append(PreflightFinding(name, "cluster", problem))
    return found


def findings_of(inventory: Inventory, seen: Inspection, kubernetes: str) -> list[PreflightFinding]:
    """What `preflight` finds: what ``judge`` does, and the warnings about storage."""
    return [*judge(seen, kubernetes), *storage_findings.of_machines(inventory, seen.facts)]


def drift_findings(seen: Inspection) -> list[PreflightFinding]:
    """How control planes and kubelets differ from their settings."""
    return [*drift.findings(seen.differing), *kubelet_drift.findings(seen.kubelets, seen.control)]


def are_alone(inventory: Inventory) -> bool:
    """Whether machines are checked by themselves: of their cluster, if they have one, no control plane can be asked."""
    return not inventory.machines(Role.CONTROL_PLANE)


def requested_version(
    inventory: Inventory, given: str | None, machines: Sequence[Machine], *, without_cluster: bool = False
) -> str:
    """The Kubernetes version that the user or the settings request for the cluster of ``machines``.

    ``without_cluster``: that of the machines themselves. For GPU hosts alone, to which it does not matter, the default.
    Raises WrongInput for an unknown version, and for machines whose own settings differ.
    """
    if given:
        return versions.check(given)
    controls = [] if without_cluster else inventory.controls_of(machines)
    asked = [each for each in machines if each.role is not Role.GPU_HOST] if without_cluster else controls
    names = [machine.name for machine in asked]
    requested = {str(settings.resolve(inventory.with_rendered(name, [_VERSION]))[_VERSION]): name for name in names}
    if len(requested) > 1:
        raise WrongInput(
            f"gpunodes_kubernetes_version is {' and '.join(sorted(requested))}, depending on the machine",
            "one version for all selected machines",
            "select those of one version, or use --kubernetes-version",
        )
    return versions.check(next(iter(requested), str(settings.resolve({})["gpunodes_kubernetes_version"])))


def run(
    inventory: Inventory,
    machines: Sequence[Machine],
    view: RunView,
    kubernetes: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> RunResult:
    """The command `preflight`: all findings of all machines; nothing is changed.

    ``variables``: settings of this run.
    """
    alone = are_alone(inventory)
    version = requested_version(inventory, kubernetes, machines, without_cluster=alone)
    folder = journal.open_run("preflight")
    view.begin("preflight", machines)
    seen = inspect(
        inventory,
        machines,
        folder,
        view,
        {**(variables or {}), "gpunodes_kubernetes_version": version},
        alone=alone,
        compares=not alone,
        compares_kubelets=not alone,
    )
    findings = findings_of(inventory, seen, version)
    view.findings(findings)
    unreachable = {candidate.name for candidate in seen.candidates if candidate.facts is None}
    results = [
        MachineResult(machine.name, Outcome.UNREACHABLE if machine.name in unreachable else Outcome.UNCHANGED)
        for machine in machines
    ]
    return RunResult("preflight", results, findings, str(seen.log), interrupted=seen.interrupted)
