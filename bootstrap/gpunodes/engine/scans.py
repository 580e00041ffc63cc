"""Scans of live machines: from the inventory to verdicts on their GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpunodes import settings
from gpunodes.engine import identities
from gpunodes.engine.remote import probing
from gpunodes.engine.remote.reach import ProbeResult, Reach
from gpunodes.engine.remote.targets import Target, ssh_config, target
from gpunodes.errors import WrongInput, sentence
from gpunodes.health import judge, shape, site
from gpunodes.health.model import SiteRules, State, Verdict
from gpunodes.inventory import Inventory
from gpunodes.model import Machine

PARALLEL = probing.PARALLEL
_DEADLINE_S, _DEADLINE_EACH_S = 60.0, 0.25


def deadline_for(machines: int) -> float:
    """The default deadline of a scan of so many machines, in seconds."""
    return _DEADLINE_S + _DEADLINE_EACH_S * machines


@dataclass(frozen=True, slots=True)
class ScanTarget:
    """A machine to scan, with its settings."""

    target: Target
    site: SiteRules = field(default_factory=SiteRules)
    gpus: int = 0
    """How many GPUs it should have, 0 if not set."""


@dataclass(frozen=True, slots=True)
class MachineScan:
    """The scan of one machine: the verdict, and the probe's facts if it sent any."""

    verdict: Verdict
    facts: Mapping[str, Any] | None = None


def scan_targets(inventory: Inventory, machines: Sequence[Machine]) -> list[ScanTarget]:
    """How to reach and judge these machines; raises WrongInput for invalid settings."""
    lookup = ssh_config()
    found = []
    for machine in machines:
        variables = inventory.connection(machine.name)
        given = settings.resolve(variables)
        gpus = given["gpunodes_health_gpus"]
        if not isinstance(gpus, int) or gpus < 0:
            raise WrongInput(f"gpunodes_health_gpus of {machine.name} is {gpus!r}", "a number of GPUs", "correct it")
        try:
            rules = site.rules(given["gpunodes_health_xids"], given["gpunodes_health_sxids"])
        except WrongInput as error:
            wrong = error.problem
            raise WrongInput(f"{machine.name}: {wrong.found}", wrong.wanted, wrong.remedy) from error
        found.append(ScanTarget(target(machine.name, variables, lookup), rules, gpus))
    return found


def scan(
    machines: Sequence[ScanTarget],
    *,
    deadline_s: float | None = None,
    parallel: int = PARALLEL,
    cluster: str = "",
    on_scan: Callable[[Verdict], None] = lambda _: None,
) -> dict[str, MachineScan]:
    """The scan of each machine, in their order; ends after ``deadline_s`` seconds, by default of :func:`deadline_for`.

    ``on_scan`` is called with each verdict as soon as it is known. The identities of the machines are recorded for
    ``cluster``, if given.
    """
    by_name = {machine.target.name: machine for machine in machines}
    scans: dict[str, MachineScan] = {}

    def take(result: ProbeResult) -> None:
        machine = by_name[result.name]
        verdict = verdict_on(result, machine.site, machine.gpus)
        # A document that the probe did not write is not used.
        scans[result.name] = MachineScan(verdict, None if verdict.state is State.UNREACHABLE else result.facts)
        on_scan(verdict)

    probing.probe(
        [machine.target for machine in machines],
        probing.ProbeSettings(),
        deadline_s=deadline_s or deadline_for(len(machines)),
        parallel=parallel,
        on_result=take,
    )
    if cluster:
        reached = {name: seen for name, seen in scans.items() if seen.verdict.state is not State.UNREACHABLE}
        identities.remember(cluster, {name: seen.facts for name, seen in reached.items()})
    return {name: scans[name] for name in by_name}


def verdict_on(result: ProbeResult, rules: SiteRules, gpus: int = 0) -> Verdict:
    """Judge one probe result; a document that violates the schema, or cannot be judged, counts as unreachable."""
    if result.facts is None:
        return judge.unreachable(result.name, result.reach.value, result.message)
    if wrong := shape.violation(result.facts):
        return judge.unreachable(result.name, Reach.PROBE_FAILED.value, wrong)
    expected = {"expected": {"gpus": gpus, "from": "setting"}} if gpus else {}
    try:
        return judge.judge_facts(result.name, {**result.facts, **expected}, rules)
    except Exception as problem:
        return judge.unreachable(result.name, Reach.PROBE_FAILED.value, sentence(problem))
