"""Plans the upgrade of a machine's GPU driver: facts and the requested driver in; an upgrade, or conflicts, out. Pure.

The plan of the new driver is that of a machine without a driver (planner/gpu.py). This module adds what an installed
driver decides: its source, the CUDA versions in use, and whether there is anything to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpunodes.ansible.module_utils.packages import RequestedPackage, fits
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import ExitCode, exit_code_for
from gpunodes.planner import gpu, tables
from gpunodes.planner.gpu_case import Case, installed_driver, number, version_of
from gpunodes.planner.gpu_installed import installed_from
from gpunodes.planner.gpu_model import SOURCES, Facts, Group, Plan, RequestedSoftware, Source
from gpunodes.planner.gpu_packages import minor_of

_NONE: Mapping[str, Any] = {"module": None, "loaded": False, "origin": None, "packages": {}, "flavour": None}


@dataclass(frozen=True, slots=True)
class Upgrade:
    """The upgrade of one machine's driver."""

    machine: str
    installed: str
    """The exact version that is installed."""
    requested: str
    """The requested branch or exact version."""
    needed: bool
    """Whether the installed driver does not meet the request."""
    downgrade: bool
    plan: Plan
    """The plan of the requested driver."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedUpgrade:
    """The result for one machine: an upgrade, or conflicts, or why its facts could not be read."""

    name: str
    upgrade: Upgrade | None = None
    conflicts: tuple[Problem, ...] = ()
    unreachable: str = ""


@dataclass(frozen=True, slots=True)
class Upgrades:
    """The upgrades of several machines."""

    driver: str
    machines: Sequence[PlannedUpgrade]
    interrupted: bool = False

    @property
    def possible(self) -> bool:
        """Whether nothing is in the way of a machine that responds."""
        return not any(machine.conflicts for machine in self.machines)

    @property
    def silent(self) -> dict[str, str]:
        """Why machines could not be read, by name."""
        return {machine.name: machine.unreachable for machine in self.machines if machine.unreachable}

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        return exit_code_for(sum(machine.upgrade is None for machine in self.machines), len(self.machines))


def without_driver(facts: Facts) -> dict[str, Any]:
    """The facts of the same machine without its driver: all that its GPUs, kernel and system require stays."""
    found = facts.get("gpu") or {}
    return {**facts, "gpu": {**found, "driver": dict(_NONE), "clients": None} if found.get("functions") else found}


def planned(machine: str, facts: Facts | None, requested: RequestedSoftware, unreachable: str = "") -> PlannedUpgrade:
    """``upgrade`` for one of several machines."""
    if facts is None:
        return PlannedUpgrade(machine, unreachable=unreachable or "its facts could not be read")
    found = upgrade(machine, facts, requested)
    if isinstance(found, Upgrade):
        return PlannedUpgrade(machine, upgrade=found)
    return PlannedUpgrade(machine, conflicts=found)


def upgrade(machine: str, facts: Facts, requested: RequestedSoftware) -> Upgrade | tuple[Problem, ...]:
    """The upgrade of ``machine``, or all reasons why it is not possible. ``facts`` is a result of host_facts."""
    installed = Case(machine, facts, requested)
    version = installed_driver(installed.gpu.get("driver") or {})
    if conflicts := _unsuitable(installed, version):
        return conflicts
    # CUDA toolkits on the machine stay, whichever source they came from: the new driver only must not be too old.
    cudas = {*(installed.gpu.get("cuda") or {}), *map(minor_of, requested.cuda)}
    plan = gpu.plan(machine, without_driver(facts), replace(requested, cuda=()))
    conflicts = plan if isinstance(plan, tuple) else ()
    broken = [*conflicts, *_too_old(requested.branch, cudas)]
    if isinstance(plan, tuple) or broken:
        return tuple(dict.fromkeys(broken))
    if other := _other_source(installed, plan):
        return (other,)
    [first] = [package for package in plan.group(Group.DRIVER) if package.version][:1]
    needed = not fits(RequestedPackage(first.name, first.version), f"{version}-")
    # A branch is newer than all versions of an older one.
    older = version_of(requested.driver) < version_of(version)[: len(version_of(requested.driver))]
    warnings = [*plan.warnings, *(_lost_by_downgrade(requested.branch, version) if older else ())]
    before = (installed.gpu.get("driver") or {}).get("flavour")
    if before and plan.flavour and before != plan.flavour:
        warnings.append(f"the kernel modules change from {before} to {plan.flavour} ones")
    return Upgrade(machine, version, requested.driver, needed, needed and older, plan, tuple(warnings))


def _unsuitable(case: Case, version: str) -> tuple[Problem, ...]:
    """Why the driver of a machine cannot be upgraded in place, whatever is requested."""
    if not case.requested.driver:
        return (Problem("no driver is requested", "a branch such as 590, or an exact version", "name it by --driver"),)
    if not case.gpus or case.gpu.get("expected"):
        return (Problem("no NVIDIA GPU is on the PCI bus", "a machine with GPUs", "select machines with GPUs"),)
    if not version:
        return (Problem("no driver is installed", "a driver to upgrade", f"run `gpunodes gpu install {case.machine}`"),)
    if case.facts.get("package_manager") == "dnf":
        return (
            Problem(
                "its packages come by dnf",
                "a system with apt: on others gpunodes cannot go back to the old driver",
                f"drain the node, run `gpunodes gpu remove {case.machine}`, then `gpunodes gpu install`",
            ),
        )
    kept = case.requested.source == Source.EXISTING
    if kept or installed_from(case) is None:
        why = "others update it (gpunodes_driver_source: existing)" if kept else "it was not installed from packages"
        return (
            Problem(
                f"driver {version} is installed, and {why}",
                "a driver from NVIDIA's repository or the distribution",
                "update it as it was installed; or remove it (`nvidia-uninstall`, or its packages), reboot, leave"
                " gpunodes_driver_source empty, and run `gpunodes gpu install`",
            ),
        )
    return ()


def _too_old(branch: str, cudas: Iterable[str]) -> list[Problem]:
    """The CUDA toolkits of the machine that need a newer driver than ``branch``; the driver judges unknown ones."""
    rows = {minor: row for row in tables.read("cuda")["cuda"] for minor in row["minors"]}
    return [
        Problem(
            f"CUDA {minor} is installed or requested on the machine, and driver {branch} is too old for it",
            f"{rows[minor]['least_driver']} or newer ({tables.read('cuda')['sources'][rows[minor]['source']]})",
            "request a newer driver, or remove that CUDA toolkit",
        )
        for minor in sorted(cudas)
        if minor in rows and branch.isdecimal() and number(branch) < number(rows[minor]["least_driver"])
    ]


def _other_source(case: Case, plan: Plan) -> Problem | None:
    """A plan whose driver comes from another source than the installed one."""
    found = installed_from(case)
    if found is None or plan.source is None or found[0] is plan.source:
        return None
    return Problem(
        f"the installed driver comes from {SOURCES[found[0]]}, and {case.requested.driver} from {SOURCES[plan.source]}",
        "one source: packages of two sources overwrite each other",
        f"set gpunodes_driver_source to {found[0]}, or request a driver that it has",
    )


def _lost_by_downgrade(branch: str, version: str) -> list[str]:
    """What an older driver no longer runs."""
    before = version.partition(".")[0]
    lost = [
        row["major"]
        for row in tables.read("cuda")["cuda"]
        if number(branch) < number(row["least_driver"]) <= number(before)
    ]
    needs = f" containers with CUDA {' and '.join(lost)} no longer run;" if lost else ""
    return [f"this is a downgrade from {version}:{needs} containers that need a newer driver than {branch} fail"]
