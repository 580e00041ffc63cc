"""Scan live machines: from the inventory to verdicts on their GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class ScanView(Protocol):
    """A view of a running scan."""

    def begin(self, names: Sequence[str]) -> None:
        """The scan of these machines begins."""

    def scanned(self, verdict: Verdict) -> None:
        """The verdict on one machine is known."""


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
        rules = site.rules(given["gpunodes_health_xids"], given["gpunodes_health_sxids"])
        found.append(ScanTarget(target(machine.name, variables, lookup), rules, gpus))
    return found


def targets(inventory: Inventory, machines: Sequence[Machine]) -> list[Target]:
    """How to reach these machines; raises WrongInput like :func:`scan_targets`."""
    return [machine.target for machine in scan_targets(inventory, machines)]


def run(
    machines: Sequence[ScanTarget], view: ScanView, *, deadline_s: float, parallel: int = PARALLEL, cluster: str = ""
) -> list[Verdict]:
    """The verdict on each machine, in their order; ends after ``deadline_s`` seconds.

    Their identities are recorded for ``cluster``, if given.
    """
    by_name = {machine.target.name: machine for machine in machines}
    verdicts: dict[str, Verdict] = {}
    reached: dict[str, Mapping[str, Any] | None] = {}

    def on_result(result: ProbeResult) -> None:
        machine = by_name[result.name]
        verdicts[result.name] = verdict = verdict_on(result, machine.site, machine.gpus)
        if verdict.state is not State.UNREACHABLE:
            reached[result.name] = result.facts
        view.scanned(verdict)

    view.begin(list(by_name))
    probing.probe(
        [machine.target for machine in machines],
        probing.ProbeSettings(),
        deadline_s=deadline_s,
        parallel=parallel,
        on_result=on_result,
    )
    if cluster:
        identities.remember(cluster, reached)
    return [verdicts[name] for name in by_name]


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
