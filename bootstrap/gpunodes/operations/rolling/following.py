"""Roll-outs of several parts, such as an upgrade of Kubernetes: one part after the other, each as its record says."""

from __future__ import annotations

from gpunodes.engine.fleet import Fleet
from gpunodes.errors import ExitCode
from gpunodes.operations import addons
from gpunodes.operations.rolling import commands
from gpunodes.operations.rolling.context import Report
from gpunodes.rollout.result import RolloutResult
from gpunodes.rollout.state import ADDONS

_LAST: commands.LastParts = {ADDONS: addons.upgrade_inside}


def resume(fleet: Fleet, report: Report, command: str = "rollout resume") -> list[RolloutResult]:
    """Go on with the roll-out that stands in the cluster, and with all that follows; raises as ``commands.resume``."""
    return follow(commands.resume(fleet, report, command, _LAST), fleet, report, command)


def follow(first: RolloutResult, fleet: Fleet, report: Report, command: str) -> list[RolloutResult]:
    """The result of a roll-out, and those of what follows; what follows one that did not end well is not begun."""
    results = [first]
    while results[-1].then and results[-1].exit_code is ExitCode.DONE:
        results.append(commands.resume(fleet, report, command, _LAST))
    return results
