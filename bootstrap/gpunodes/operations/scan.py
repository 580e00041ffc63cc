"""Ask live machines how their GPUs are: from the inventory to verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpunodes import settings
from gpunodes.engine import identities, probing
from gpunodes.engine.targets import Target, target
from gpunodes.errors import WrongInput, sentence
from gpunodes.health import judge, shape, site
from gpunodes.health.model import SiteRules, State, Verdict
from gpunodes.inventory import Inventory
from gpunodes.model import Machine

PARALLEL = probing.PARALLEL
_PROBE = "module_utils/gpunodes/probe.py"
_DEADLINE_S, _DEADLINE_EACH_S = 60.0, 0.25


class ScanView(Protocol):
    """Whoever shows a sweep while it goes on."""

    def begin(self, names: Sequence[str]) -> None:
        """These machines are asked now."""

    def came(self, verdict: Verdict) -> None:
        """One of them has answered, or has not."""


def deadline_for(machines: int) -> float:
    """Seconds that a sweep of so many machines may take when nobody says otherwise."""
    return _DEADLINE_S + _DEADLINE_EACH_S * machines


@dataclass(frozen=True, slots=True)
class ScanTarget:
    """A machine that is to be asked, and what its settings say of it."""

    target: Target
    site: SiteRules = field(default_factory=SiteRules)
    gpus: int = 0
    """How many it should have, 0 where nobody says."""


def scan_targets(inventory: Inventory, machines: Sequence[Machine]) -> list[ScanTarget]:
    """How these machines are reached and judged; raises WrongInput for what cannot be used of that."""
    lookup = probing.ssh_config()
    found = []
    for machine in machines:
        variables = inventory.connection(machine.name)
        wanted = settings.resolve(variables)
        gpus = wanted["gpunodes_health_gpus"]
        if not isinstance(gpus, int) or gpus < 0:
            raise WrongInput(f"gpunodes_health_gpus of {machine.name} is {gpus!r}", "a number of GPUs", "correct it")
        rules = site.rules(wanted["gpunodes_health_xids"], wanted["gpunodes_health_sxids"])
        found.append(ScanTarget(target(machine.name, variables, lookup), rules, gpus))
    return found


def targets(inventory: Inventory, machines: Sequence[Machine]) -> list[Target]:
    """How these machines are reached; raises WrongInput like :func:`asked`."""
    return [machine.target for machine in scan_targets(inventory, machines)]


def run(
    machines: Sequence[ScanTarget], view: ScanView, *, deadline_s: float, parallel: int = PARALLEL, cluster: str = ""
) -> list[Verdict]:
    """The verdict on each machine, in their order; ends after ``deadline_s`` seconds.

    Who they are is recorded for ``cluster``, where one is named.
    """
    by_name = {machine.target.name: machine for machine in machines}
    verdicts: dict[str, Verdict] = {}
    answered: dict[str, Mapping[str, Any] | None] = {}

    def on_result(answer: probing.ProbeResult) -> None:
        machine = by_name[answer.name]
        verdicts[answer.name] = verdict = verdict_on(answer, machine.site, machine.gpus)
        if verdict.state is not State.UNREACHABLE:
            answered[answer.name] = answer.facts
        view.came(verdict)

    view.begin(list(by_name))
    probing.probe(
        [machine.target for machine in machines],
        options(),
        deadline_s=deadline_s,
        parallel=parallel,
        on_result=on_result,
    )
    if cluster:
        identities.remember(cluster, answered)
    return [verdicts[name] for name in by_name]


def options() -> probing.ProbeSettings:
    """The probe as it is sent."""
    return probing.ProbeSettings((settings.plugins() / _PROBE).read_bytes())


def verdict_on(answer: probing.ProbeResult, rules: SiteRules, gpus: int = 0) -> Verdict:
    """Judge one machine's answer; a document that is not of the probe's shape, or cannot be judged, is no answer."""
    if answer.facts is None:
        return judge.unreachable(answer.name, answer.reach.value, answer.message)
    if wrong := shape.violation(answer.facts):
        return judge.unreachable(answer.name, probing.Reach.PROBE_FAILED.value, wrong)
    expected = {"expected": {"gpus": gpus, "from": "setting"}} if gpus else {}
    try:
        return judge.judge_facts(answer.name, {**answer.facts, **expected}, rules)
    except Exception as problem:
        return judge.unreachable(answer.name, probing.Reach.PROBE_FAILED.value, sentence(problem))
