"""What an upgrade of the container runtime would do to a machine, from what the machine reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpunodes.errors import ExitCode, exit_code_for
from gpunodes.planner import reports


@dataclass(frozen=True, slots=True)
class ReplacedPackage:
    """A package that would be replaced, or installed as a dependency (``old`` is "")."""

    name: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class PlannedRuntime:
    """The result for one machine; ``unreadable`` is why there is none, or why the upgrade is not possible."""

    name: str
    packages: Sequence[ReplacedPackage] = ()
    changes: Sequence[str] = ()
    """Other changes, such as of the configuration."""
    unreadable: str = ""

    @property
    def needed(self) -> str:
        """What there is to do, "" for nothing."""
        replaced = [f"{each.name} becomes {each.new}" for each in self.packages]
        return ", ".join(replaced or (["its configuration changes"] if self.changes else []))


@dataclass(frozen=True, slots=True)
class RuntimePlans:
    """The results of several machines."""

    machines: Sequence[PlannedRuntime]
    interrupted: bool = False

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        return exit_code_for(sum(bool(machine.unreadable) for machine in self.machines), len(self.machines))


def planned(name: str, pending: Any, why: str = "") -> PlannedRuntime:
    """The result for a machine: ``pending`` is a result of runtime_pending, None if ``why`` prevents it."""
    if pending is None:
        return PlannedRuntime(name, unreadable=why or "it did not report what is pending")
    if problem := reports.runtime_problem(pending):
        return PlannedRuntime(name, unreadable=f"its report is invalid: {problem}")
    packages = [ReplacedPackage(each["name"], each["old"], each["new"]) for each in pending["packages"]]
    return PlannedRuntime(name, packages, list(pending["changes"]))
