"""How every command that changes machines goes: preflight, lock, playbook, result."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpunodes import settings
from gpunodes.engine import journal, locks, runner
from gpunodes.errors import GpunodesError
from gpunodes.inventory import Inventory
from gpunodes.model import Finding, Machine, MachineResult, Only, Outcome, Phase, RunResult, Severity
from gpunodes.operations import phases as phase_list
from gpunodes.operations import preflight
from gpunodes.operations.tracker import Tracker, View
from gpunodes.planner import gpu


@dataclass(frozen=True, slots=True)
class Operation:
    """A command's way: the phases it walks, in order, and the playbook that holds them."""

    name: str
    playbook: str
    phases: Sequence[Phase]
    needs_cluster: bool = False
    """Whether there must be a cluster already."""
    after_interruption: str = ""
    """The playbook that takes back what an interrupted run must not leave, on the control plane."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may say of any run. ``variables`` are settings for this run; they hold no secret."""

    kubernetes: str | None = None
    skip_phases: Sequence[str] = ()
    from_phase: str | None = None
    dry_run: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


def carry_out(
    operation: Operation, inventory: Inventory, machines: Sequence[Machine], view: View, options: Options
) -> RunResult:
    """Walk ``operation`` on ``machines``.

    Raises WrongInput before anything is touched, and GpunodesError when another command holds the cluster's lock. What
    fails on machines is in the result, each with its first cause.
    """
    skip = phase_list.skipped(operation.phases, options.skip_phases, options.from_phase)
    phases = [phase for phase in operation.phases if phase.name not in skip]
    control = inventory.control_plane()
    preflight.check_settings(inventory, machines)
    version = preflight.wished_version(inventory, options.kubernetes)
    variables = {**options.variables, **({"gpunodes_kubernetes_version": version} if options.kubernetes else {})}

    folder = journal.open_run(operation.name)
    view.begin(operation.name, machines)
    result = RunResult(operation.name, (), log=str(folder), dry_run=options.dry_run)
    findings: Sequence[Finding] = ()
    known: Mapping[str, Any] = {}
    concerned = _concerned(inventory, machines, options, control.name)
    unlocked: GpunodesError | None = None
    with contextlib.ExitStack() as held:
        # A look changes nothing and needs no lock; all that follows does.
        if not options.dry_run:
            lock = locks.hold(control.address, inventory.connection(control.name), operation.name)
            try:
                held.enter_context(lock)
            except locks.NoLock as error:
                unlocked = error
        if phase_list.PREFLIGHT in phases:
            seen = preflight.look(inventory, machines, folder, view, variables)
            findings = [] if seen.interrupted else preflight.judge(seen, version)
            if operation.needs_cluster and seen.cluster is None and not seen.interrupted:
                findings = [*findings, seen.no_cluster(control.name)]
            view.findings(findings)
            if seen.interrupted or any(finding.severity is Severity.ERROR for finding in findings):
                untouched = [MachineResult(machine.name, Outcome.SKIPPED) for machine in machines]
                return replace(
                    result, machines=untouched, findings=findings, log=str(seen.log), interrupted=seen.interrupted
                )
            known = {"gpunodes_facts": seen.facts, "gpunodes_cluster": seen.cluster or {}}
            concerned[Only.GPUS] = {name for name, facts in seen.facts.items() if gpu.gpus_of(facts)}
            concerned[Only.NODES] = {name for name, facts in seen.facts.items() if facts["kubernetes"]["role"]}
        if unlocked:
            # The look has not told why.
            raise unlocked
        work = [phase for phase in phases if phase != phase_list.PREFLIGHT]
        every = {machine.name for machine in machines}
        spared = phase_list.spared(work, every, concerned)
        # Phases that concern nobody cost nothing.
        idle = [name for name, names in spared.items() if names == every]
        tracker = Tracker(machines, [phase for phase in work if phase.name not in idle], view, spared)
        play = runner.Play(
            playbook=operation.playbook,
            inventory=inventory.path,
            machines=[machine.name for machine in machines],
            skip_phases=[*skip, *idle, phase_list.PREFLIGHT.name],
            variables={**variables, **known},
            check=options.dry_run,
        )
        ended = runner.run(play, folder, tracker.on_event)
        if ended.interrupted and operation.after_interruption and not options.dry_run:
            mend = runner.Play(operation.after_interruption, inventory.path, [control.name])
            runner.run(mend, folder, lambda _: None)
    return replace(
        result,
        machines=tracker.results(ok=ended.ok, interrupted=ended.interrupted, complaint=ended.complaint),
        findings=findings,
        log=str(ended.log),
        interrupted=ended.interrupted,
    )


def _concerned(
    inventory: Inventory, machines: Sequence[Machine], options: Options, control: str
) -> dict[Only, set[str]]:
    """The machines that phases concern, as far as the settings tell: all of them where only facts do."""
    wishes = {
        machine.name: settings.of({**inventory.variables(machine.name), **options.variables}) for machine in machines
    }
    return {
        Only.GPUS: set(wishes),
        Only.NODES: set(wishes),
        Only.CUDA: {
            name for name, wish in wishes.items() if wish["gpunodes_cuda_versions"] or wish["gpunodes_cudnn_version"]
        },
        Only.DOCKER: {name for name, wish in wishes.items() if wish["gpunodes_runtime"] == "docker"},
        Only.CONTROL_PLANE: {control},
    }
