"""How every command that changes machines goes: preflight, lock, playbook, result."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpunodes import settings
from gpunodes.engine import journal, locks, runner
from gpunodes.engine.cluster import NoSession
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Event, Machine, MachineResult, Only, Outcome, Phase, PreflightFinding, RunResult, Severity
from gpunodes.operations import claims, preflight
from gpunodes.operations import phases as phase_list
from gpunodes.operations.tracker import RunView, Tracker
from gpunodes.planner import gpu


@dataclass(frozen=True, slots=True)
class Operation:
    """A command's way: the phases it walks, in order, and the playbook that holds them."""

    name: str
    playbook: str
    phases: Sequence[Phase]
    needs_cluster: bool = False
    """Whether there must be a cluster already."""
    ends_cluster: bool = False
    """Whether it takes the cluster away with its control plane."""
    after_interruption: str = ""
    """The playbook that takes back what an interrupted run must not leave, on the control plane."""

    @property
    def words(self) -> str:
        """The command as it is typed."""
        return self.name.replace("gpu-", "gpu ")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a user may say of any run. ``variables`` are settings for this run; they hold no secret."""

    kubernetes: str | None = None
    skip_phases: Sequence[str] = ()
    from_phase: str | None = None
    dry_run: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    seen: preflight.Inspection | None = None
    """A look at the machines that was had already."""


def carry_out(
    operation: Operation, inventory: Inventory, machines: Sequence[Machine], view: RunView, options: RunOptions
) -> RunResult:
    """Walk ``operation`` on ``machines``.

    Raises WrongInput before anything is touched, and GpunodesError when somebody works on one of the machines already.
    What fails on machines is in the result, each with its first cause; so does a run that lost its locks.
    """
    skip = phase_list.skipped(operation.phases, options.skip_phases, options.from_phase)
    phases = [phase for phase in operation.phases if phase.name not in skip]
    control = inventory.control_plane()
    preflight.check_settings(inventory, machines)
    version = preflight.requested_version(inventory, options.kubernetes)
    variables = {**options.variables, **({"gpunodes_kubernetes_version": version} if options.kubernetes else {})}

    folder = journal.open_run(operation.name)
    view.begin(operation.name, machines)
    result = RunResult(operation.name, (), log=str(folder), dry_run=options.dry_run)
    findings: Sequence[PreflightFinding] = ()
    facts: Mapping[str, Any] | None = options.seen.facts if options.seen else None
    cluster = options.seen.cluster or {} if options.seen else None
    applicable = _applicable(inventory, machines, options, control.name)
    unlocked: GpunodesError | None = None
    claim: claims.Claim | None = None
    with contextlib.ExitStack() as held:
        try:
            claim = held.enter_context(_claimed(operation, inventory, machines, view, options))
        except (NoSession, locks.NoLock) as error:
            unlocked = error
        if phase_list.PREFLIGHT in phases:
            seen = preflight.inspect(inventory, machines, folder, view, variables)
            findings = [] if seen.interrupted else preflight.judge(seen, version)
            if operation.needs_cluster and seen.cluster is None and not seen.interrupted:
                findings = [*findings, seen.no_cluster(control.name)]
            findings = [*(claim.findings if claim else ()), *findings]
            view.findings(findings)
            if seen.interrupted or any(finding.severity is Severity.ERROR for finding in findings):
                return replace(
                    result,
                    machines=[MachineResult(machine.name, Outcome.SKIPPED) for machine in machines],
                    findings=findings,
                    log=str(seen.log),
                    interrupted=seen.interrupted,
                )
            facts, cluster = seen.facts, seen.cluster or {}
            applicable |= _told(seen.facts)
        elif claim and claim.findings:
            findings = claim.findings
            view.findings(findings)
        if unlocked:
            # Preflight did not report why.
            raise _not_locked(unlocked)
        if claim:
            if facts is None:
                # Whoever works on a machine by another name must meet our lock.
                facts, cluster = _identities(inventory, machines, folder, view, variables)
            claim.take_more(facts)
        work = [phase for phase in phases if phase != phase_list.PREFLIGHT]
        every = {machine.name for machine in machines}
        not_applicable = phase_list.not_applicable(work, every, applicable)
        # Phases that concern nobody cost nothing.
        idle = [name for name, names in not_applicable.items() if names == every]
        tracker = Tracker(machines, [phase for phase in work if phase.name not in idle], view, not_applicable)
        play = runner.Play(
            playbook=operation.playbook,
            inventory=inventory.path,
            machines=[machine.name for machine in machines],
            skip_phases=[*skip, *idle, phase_list.PREFLIGHT.name],
            variables={**variables, "worker_run": claim.holder if claim else ""},
            facts=facts,
            cluster=cluster,
            check=options.dry_run,
        )
        ended, lost = _play(
            play, folder, tracker.on_event, claim, functools.partial(_at_work, operation, tracker, control), view
        )
        if ended.interrupted and claim:
            _revoke(operation, inventory, folder, claim)
    interrupted = ended.interrupted and lost is None
    return replace(
        result,
        machines=tracker.results(ok=ended.ok, interrupted=interrupted, error_text=str(lost or ended.error_text)),
        findings=findings,
        log=str(ended.log),
        interrupted=interrupted,
    )


def _claimed(
    operation: Operation, inventory: Inventory, machines: Sequence[Machine], view: RunView, options: RunOptions
) -> contextlib.AbstractContextManager[claims.Claim | None]:
    """What this run must hold; nothing for a dry run, which changes nothing."""
    if options.dry_run:
        return contextlib.nullcontext()
    return claims.claimed(inventory, machines, operation.words, lambda finding: view.findings([finding]))


def _not_locked(error: GpunodesError) -> GpunodesError:
    """``error`` with a remedy for a run, which cannot leave its cluster out as a repair can."""
    remedy = "start its control plane, or correct the address and SSH settings in the inventory"
    return GpunodesError(error.found, error.wanted, remedy)


def _revoke(operation: Operation, inventory: Inventory, folder: Path, claim: claims.Claim) -> None:
    if operation.after_interruption:
        control, run = inventory.control_plane().name, {"revoke_run": claim.holder}
        revoke = runner.Play(operation.after_interruption, inventory.path, [control], variables=run)
        runner.run(revoke, folder, lambda _: None)


def _told(facts: Mapping[str, Mapping[str, Any]]) -> dict[Only, set[str]]:
    """The machines that phases concern, by what those report."""
    return {
        Only.GPUS: {name for name, each in facts.items() if gpu.gpus_of(each)},
        Only.NODES: {name for name, each in facts.items() if each["kubernetes"]["role"]},
    }


def _identities(
    inventory: Inventory, machines: Sequence[Machine], folder: Path, view: RunView, variables: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What machines and their cluster report, where no preflight has asked them."""
    own = folder / "identities"
    own.mkdir(mode=0o700)
    seen = preflight.inspect(inventory, machines, own, view, variables, sources=False)
    return seen.facts, seen.cluster or {}


def _at_work(operation: Operation, tracker: Tracker, control: Machine) -> bool:
    """Whether the run does something to the control plane now that may take its API away."""
    return operation.ends_cluster or tracker.works_on(control.name)


def _play(
    play: runner.Play,
    folder: Path,
    on_event: Callable[[Event], None],
    claim: claims.Claim | None,
    at_work: Callable[[], bool],
    view: RunView,
) -> tuple[runner.PlayResult, GpunodesError | None]:
    """Run the playbook for as long as the locks are surely ours; how it ended, and why they may be ours no more."""
    if claim is None:
        return runner.run(play, folder, on_event), None
    if lost := claim.lost(at_work=True):
        raise lost
    told = False

    def ends() -> bool:
        nonlocal told
        lost = claim.lost(at_work=at_work())
        if claim.unasked and not told:
            told = True
            view.findings([claim.unasked])
        return lost is not None

    ended = runner.run(play, folder, on_event, ends)
    return ended, claim.lost(at_work=at_work()) if ended.interrupted else None


def _applicable(
    inventory: Inventory, machines: Sequence[Machine], options: RunOptions, control: str
) -> dict[Only, set[str]]:
    """The machines that phases concern, as far as the settings tell: all of them where only facts do."""
    requested = {
        machine.name: settings.resolve({**inventory.variables(machine.name), **options.variables})
        for machine in machines
    }
    return {
        Only.GPUS: set(requested),
        Only.NODES: set(requested),
        Only.CUDA: {
            name
            for name, request in requested.items()
            if request["gpunodes_cuda_versions"] or request["gpunodes_cudnn_version"]
        },
        Only.DOCKER: {name for name, request in requested.items() if request["gpunodes_runtime"] == "docker"},
        Only.CONTROL_PLANE: {control},
    }
