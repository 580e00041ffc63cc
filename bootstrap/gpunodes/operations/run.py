"""How every operation runs: preflight, locks, playbook, result."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpunodes import settings
from gpunodes.engine import control_planes, journal, locks, runner
from gpunodes.engine.cluster.errors import NoSession
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import (
    Event,
    Machine,
    MachineResult,
    Only,
    Outcome,
    Phase,
    PreflightFinding,
    Role,
    RunResult,
    Severity,
)
from gpunodes.operations import burn_in_history, claims, confirmed, judged, pools, preflight, revoke
from gpunodes.operations import phases as phase_list
from gpunodes.operations.storage import findings as storage_findings
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner import gpu, gpu_installed, scaled_pools
from gpunodes.planner.candidates import Growth


@dataclass(frozen=True, slots=True)
class Operation:
    """A command that changes machines: its phases, in order, and the playbook that contains them."""

    name: str
    """The command as it is typed."""
    playbook: str
    phases: Sequence[Phase]
    needs_cluster: bool = False
    """Whether a cluster must already exist."""
    without_cluster: bool = False
    """Whether it contacts no cluster: the settings decide the versions, and the inventory needs no control plane."""
    ends_cluster: bool = False
    """Whether it removes the cluster together with its control plane."""
    replaces_objects: bool = False
    """Whether it replaces the objects of the API, its own Leases among them: only the lock over SSH is kept."""
    after_interruption: str = ""
    """The playbook that revokes on a control plane what a run that was interrupted, or failed, may have left."""

    @property
    def joins(self) -> bool:
        """Whether its machines are to be nodes."""
        return not {phase_list.CONTROL_PLANE, phase_list.WORKER}.isdisjoint(self.phases)

    @property
    def growth(self) -> Growth:
        """Which control planes it may add to a cluster."""
        if phase_list.CONTROL_PLANE_JOIN not in self.phases:
            return Growth.NONE
        return Growth.ALL if phase_list.CONTROL_PLANE in self.phases else Growth.SELECTED


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of every run. ``variables`` are settings for this run; they contain no secrets."""

    kubernetes: str | None = None
    skip_phases: Sequence[str] = ()
    from_phase: str | None = None
    dry_run: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    seen: preflight.Inspection | None = None
    """The result of an earlier inspection of the machines."""
    confirmed: bool = False
    """``seen`` is what a user was shown, and has confirmed hours later perhaps: it must still be so under the locks."""


# Long: the steps of a run in their order, each with the results of the earlier ones.
def carry_out(
    operation: Operation, inventory: Inventory, machines: Sequence[Machine], view: RunView, options: RunOptions
) -> RunResult:
    """Run ``operation`` on ``machines``.

    Raises WrongInput before anything is changed, and GpunodesError if another command works on one of the machines.
    The result contains each machine's failure with its first cause, and the loss of locks.
    """
    skip = phase_list.skipped(operation.phases, options.skip_phases, options.from_phase)
    phases = [phase for phase in operation.phases if phase.name not in skip]
    check_kinds(operation, machines)
    controls = _controls(operation, inventory, machines)
    version, variables = _requested(operation, inventory, machines, options)

    folder = journal.open_run(operation.name)
    view.begin(operation.name, machines)
    result = RunResult(operation.name, (), log=str(folder), dry_run=options.dry_run)
    findings: Sequence[PreflightFinding] = ()
    facts: Mapping[str, Any] | None = options.seen.facts if options.seen else None
    cluster = options.seen.cluster or {} if options.seen else None
    unlocked: GpunodesError | None = None
    claim: claims.Claim | claims.HostClaim | None = None
    with contextlib.ExitStack() as held:
        try:
            claim = held.enter_context(_claimed(operation, inventory, machines, view, options))
        except (NoSession, locks.NoLock) as error:
            unlocked = error
        choice, warnings = _choice(claim, options), _lock_warnings(operation, controls, claim, unlocked)
        applicable = _applicable(operation, inventory, machines, options, [choice.machine] if choice else controls)
        if phase_list.PREFLIGHT in phases:
            seen = preflight.inspect(
                inventory,
                machines,
                folder,
                view,
                variables,
                without_cluster=operation.without_cluster,
                compares=operation.joins,
                choice=None if operation.without_cluster else choice,
            )
            findings = [*warnings, *_judged(operation, inventory, machines, seen, version, phases)]
            _check_request(findings, machines, options)
            view.findings(findings)
            if seen.interrupted or any(finding.severity is Severity.ERROR for finding in findings):
                return replace(
                    result,
                    machines=[MachineResult(machine.name, Outcome.SKIPPED) for machine in machines],
                    findings=findings,
                    log=str(seen.log),
                    interrupted=seen.interrupted,
                )
            facts, cluster, choice = seen.facts, seen.cluster or {}, seen.choice
            applicable |= _by_facts(seen.facts, applicable)
        elif warnings:
            findings = warnings
            view.findings(findings)
        if unlocked and not operation.without_cluster:
            # Preflight has not reported the reason.
            raise _not_locked(unlocked)
        if claim:
            if facts is None or options.confirmed:
                # Commands that know a machine by another name must find the same lock.
                facts, cluster = _identities(
                    operation, inventory, machines, folder, view, variables, choice, options.seen
                )
            claim.take_more(facts, lock_only=operation.replaces_objects)
        work = [phase for phase in phases if phase != phase_list.PREFLIGHT]
        all_names = {machine.name for machine in machines}
        not_applicable = phase_list.not_applicable(work, all_names, applicable | phase_list.by_cluster(cluster))
        # Phases that apply to no machine are skipped.
        idle = [name for name, names in not_applicable.items() if names == all_names]
        tracker = Tracker(machines, [phase for phase in work if phase.name not in idle], view, not_applicable)
        play = runner.Play(
            playbook=operation.playbook,
            inventory=inventory,
            machines=[machine.name for machine in machines],
            skip_phases=[*skip, *idle, phase_list.PREFLIGHT.name],
            variables={**variables, "worker_run": claim.holder if claim else ""},
            facts=facts,
            cluster=cluster,
            control=choice.machine.name if choice else "",
            check=options.dry_run,
        )
        ended, lost = _play(
            play,
            folder,
            tracker.on_event,
            claim,
            functools.partial(_at_work, operation, tracker, controls or machines),
            view,
        )
        if claim:
            revoke.leftovers(operation.after_interruption, inventory, folder, claim.holder, ended)
        unnoted = burn_in_history.note(inventory.cluster, play.machines, tracker.answers, tracker.failures)
        view.findings(unnoted)
    interrupted = ended.interrupted and lost is None
    return replace(
        result,
        machines=tracker.results(ok=ended.ok, interrupted=interrupted, error_text=str(lost or ended.error_text)),
        findings=[*findings, *unnoted],
        log=str(ended.log),
        interrupted=interrupted,
    )


def _requested(
    operation: Operation, inventory: Inventory, machines: Sequence[Machine], options: RunOptions
) -> tuple[str, Mapping[str, Any]]:
    """The requested Kubernetes version, and the settings for this run."""
    alone = operation.without_cluster
    version = preflight.requested_version(inventory, options.kubernetes, machines, without_cluster=alone)
    return version, {**options.variables, **({"gpunodes_kubernetes_version": version} if options.kubernetes else {})}


def _claimed(
    operation: Operation, inventory: Inventory, machines: Sequence[Machine], view: RunView, options: RunOptions
) -> contextlib.AbstractContextManager[claims.Claim | claims.HostClaim | None]:
    """The locks of this run; none for a dry run, which changes nothing."""
    if options.dry_run:
        return contextlib.nullcontext()
    if not _controls(operation, inventory, machines):
        return claims.claimed_hosts(inventory, machines, operation.name)
    return claims.claimed(inventory, machines, operation.name, lambda finding: view.findings([finding]))


def _judged(
    operation: Operation,
    inventory: Inventory,
    machines: Sequence[Machine],
    seen: preflight.Inspection,
    version: str,
    phases: Sequence[Phase],
) -> Sequence[PreflightFinding]:
    """The findings of preflight, with the changes of pools; none if it was interrupted."""
    if seen.interrupted:
        return ()
    found = preflight.judge(
        seen, version, needs_cluster=operation.needs_cluster, joins=operation.joins, growth=operation.growth
    )
    found += storage_findings.of_machines(inventory, seen.facts)
    if phase_list.CONTROL_PLANE in phases:
        found += preflight.another_cluster(inventory, machines, seen)
    return [*found, *(pools.changes(inventory, machines, seen) if phase_list.POOL in phases else ())]


def _choice(claim: claims.Claim | claims.HostClaim | None, options: RunOptions) -> control_planes.Choice | None:
    """The control plane that the locks or an earlier inspection use; None if none is known yet."""
    if isinstance(claim, claims.Claim):
        return claim.choice
    return options.seen.choice if options.seen else None


def _lock_warnings(
    operation: Operation,
    controls: Sequence[Machine],
    claim: claims.Claim | claims.HostClaim | None,
    unlocked: GpunodesError | None,
) -> Sequence[PreflightFinding]:
    """Warnings about the locks. An operation that needs no cluster continues if its control plane does not respond."""
    if unlocked and operation.without_cluster and controls:
        return [claims.no_lock(controls[0].name, unlocked)]
    return claim.findings if claim else ()


def check_kinds(operation: Operation, machines: Sequence[Machine]) -> None:
    """Raise WrongInput for machines of a cluster together with GPU hosts: their locks are in different places."""
    hosts = [machine.name for machine in machines if machine.role is Role.GPU_HOST]
    others = [machine.name for machine in machines if machine.role is not Role.GPU_HOST]
    if hosts and others:
        raise WrongInput(
            f"{hosts[0]} is a GPU host, and {others[0]} belongs to a cluster",
            f"GPU hosts, or machines of the cluster, in one `gpunodes {operation.name}`",
            "run it once for the group gpu_hosts, and once for the others",
        )


def _check_request(findings: Sequence[PreflightFinding], machines: Sequence[Machine], options: RunOptions) -> None:
    """Raise WrongInput if the request contradicts what a machine is: its runtime, or a node among the GPU hosts."""
    hosts = {machine.name for machine in machines if machine.role is Role.GPU_HOST}
    wrong = [
        each
        for each in findings
        if (each.check == "runtime" and "gpunodes_runtime" in options.variables)
        or (each.check == "cluster" and each.machine in hosts)
    ]
    if wrong:
        first = wrong[0]
        others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise WrongInput(f"{first.machine}{others}: {first.problem.fact}", first.problem.wanted, first.problem.remedy)


def _not_locked(error: GpunodesError) -> GpunodesError:
    """``error`` with a remedy for a run, which cannot leave its cluster out as a repair can."""
    remedy = "start that machine, or correct its address and SSH settings in the inventory"
    return GpunodesError(error.problem.found, error.problem.wanted, remedy)


def _by_facts(facts: Mapping[str, Mapping[str, Any]], requested: Mapping[Only, set[str]]) -> dict[Only, set[str]]:
    """The machines to which phases apply, by their facts; ``requested`` are those by their settings."""
    docker = {name for name, each in facts.items() if "docker" in gpu_installed.runtimes_of(each)}
    return {
        Only.WITH_DOCKER: requested[Only.DOCKER] | docker,
        Only.GPUS: {name for name, each in facts.items() if gpu.gpus_of(each)},
        Only.NODES: {name for name, each in facts.items() if each["kubernetes"]["role"]},
    }


def _identities(
    operation: Operation,
    inventory: Inventory,
    machines: Sequence[Machine],
    folder: Path,
    view: RunView,
    variables: Mapping[str, Any],
    choice: control_planes.Choice | None,
    shown: preflight.Inspection | None,
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The reports of machines and their cluster, if preflight was skipped or the user was ``shown`` earlier ones.

    Raises GpunodesError if they differ from those.
    """
    own = folder / "identities"
    own.mkdir(mode=0o700)
    seen = preflight.inspect(
        inventory,
        machines,
        own,
        view,
        variables,
        sources=False,
        without_cluster=operation.without_cluster,
        choice=None if operation.without_cluster else choice,
    )
    confirmed.check_same(machines, shown, seen.facts, seen.cluster or {})
    return seen.facts, seen.cluster or {}


def _controls(operation: Operation, inventory: Inventory, machines: Sequence[Machine]) -> Sequence[Machine]:
    """The control planes whose cluster has the locks; none for GPU hosts, and where none exists and none is needed."""
    if operation.without_cluster and not inventory.machines(Role.CONTROL_PLANE):
        return ()
    return inventory.controls_of(machines)


def _at_work(operation: Operation, tracker: Tracker, machines: Sequence[Machine]) -> bool:
    """Whether the run is changing a machine with a lock now: a control plane, or one without a cluster."""
    return operation.ends_cluster or any(tracker.works_on(machine.name) for machine in machines)


def _play(
    play: runner.Play,
    folder: Path,
    on_event: Callable[[Event], None],
    claim: claims.Claim | claims.HostClaim | None,
    at_work: Callable[[], bool],
    view: RunView,
) -> tuple[runner.PlayResult, GpunodesError | None]:
    """Run the playbook while the locks are held; how it ended, and why the locks may be lost."""
    if claim is None:
        return runner.run(play, folder, on_event), None
    if lost := claim.lost(at_work=True):
        raise lost
    reported = False

    def must_end() -> bool:
        nonlocal reported
        lost = claim.lost(at_work=at_work())
        if claim.unrenewed and not reported:
            reported = True
            view.findings([claim.unrenewed])
        return lost is not None

    ended = runner.run(play, folder, on_event, must_end)
    return ended, claim.lost(at_work=at_work()) if ended.interrupted else None


def _applicable(
    operation: Operation,
    inventory: Inventory,
    machines: Sequence[Machine],
    options: RunOptions,
    controls: Sequence[Machine],
) -> dict[Only, set[str]]:
    """The machines to which phases apply by their settings; all machines for phases that depend on facts.

    The first one of ``controls`` is the control plane at which the cluster is created or changed.
    """
    rendered = judged.rendered(inventory, machines, options.variables, refuses=False)
    requested = {name: settings.resolve({**own, **options.variables}) for name, own in rendered.items()}
    creators = {machine.name for machine in controls[:1]}
    own = {machine.name for machine in machines if machine.role is Role.CONTROL_PLANE}
    return {
        Only.GPUS: set(requested),
        Only.NODES: {machine.name for machine in machines if machine.role is not Role.GPU_HOST},
        Only.BURN_IN: {name for name, request in requested.items() if request["gpunodes_burn_in"]},
        Only.SCALING: {
            name for name, request in requested.items() if scaled_pools.any_scales(request["gpunodes_pools"])
        }
        - own,
        Only.STORAGE: {name for name, request in requested.items() if request["gpunodes_storage"]},
        Only.WITH_DOCKER: set(requested),
        Only.REGISTRY: set(requested),
        Only.CUDA: {
            name
            for name, request in requested.items()
            if request["gpunodes_cuda_versions"] or request["gpunodes_cudnn_version"]
        },
        Only.DOCKER: {name for name, request in requested.items() if request["gpunodes_runtime"] == "docker"},
        Only.CONTROL_PLANE: creators,
        Only.CONTROL_PLANES: own,
        Only.VIRTUAL_ADDRESS: {name for name in own if requested[name]["gpunodes_control_plane_vip"]},
        Only.OTHER_CONTROL_PLANES: own - (creators if phase_list.CONTROL_PLANE in operation.phases else set()),
    }
