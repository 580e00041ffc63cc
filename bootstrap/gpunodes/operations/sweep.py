"""Ask live machines how their GPUs are: from the inventory to verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpunodes import settings
from gpunodes.engine import sweep
from gpunodes.engine.targets import Target, target
from gpunodes.health import judge, shape
from gpunodes.health.model import SiteRules, Verdict
from gpunodes.inventory import Inventory
from gpunodes.model import Machine

PARALLEL = sweep.PARALLEL
_PROBE = "module_utils/gpunodes/probe.py"
_DEADLINE_S, _DEADLINE_EACH_S = 60.0, 0.25


class View(Protocol):
    """Whoever shows a sweep while it goes on."""

    def begin(self, names: Sequence[str]) -> None:
        """These machines are asked now."""

    def came(self, verdict: Verdict) -> None:
        """One of them has answered, or has not."""


def deadline_for(machines: int) -> float:
    """Seconds that a sweep of so many machines may take when nobody says otherwise."""
    return _DEADLINE_S + _DEADLINE_EACH_S * machines


def targets(inventory: Inventory, machines: Sequence[Machine]) -> list[Target]:
    """How these machines are reached; raises WrongInput for what cannot be used, in the inventory or in ssh_config."""
    lookup = sweep.ssh_config()
    return [target(machine.name, inventory.variables(machine.name), lookup) for machine in machines]


def run(
    found: Sequence[Target],
    view: View,
    *,
    deadline_s: float,
    parallel: int = PARALLEL,
    site: SiteRules = SiteRules(),  # noqa: B008 - frozen
) -> list[Verdict]:
    """The verdict on each machine, in their order; ends after ``deadline_s`` seconds."""
    verdicts: dict[str, Verdict] = {}

    def on_answer(answer: sweep.Answer) -> None:
        verdicts[answer.name] = verdict = verdict_on(answer, site)
        view.came(verdict)

    view.begin([machine.name for machine in found])
    sweep.sweep(found, options(), deadline_s=deadline_s, parallel=parallel, on_answer=on_answer)
    return [verdicts[machine.name] for machine in found]


def options() -> sweep.Options:
    """The probe as it is sent."""
    return sweep.Options((settings.plugins() / _PROBE).read_bytes())


def verdict_on(answer: sweep.Answer, site: SiteRules) -> Verdict:
    """Judge one machine's answer; a document that is not of the probe's shape is no answer."""
    if answer.facts is None:
        return judge.unreachable(answer.name, answer.reach.value, answer.said)
    if wrong := shape.complaint(answer.facts):
        return judge.unreachable(answer.name, sweep.Reach.PROBE_FAILED.value, wrong)
    return judge.judge_facts(answer.name, answer.facts, site)
