"""What an upgrade of the operating system would do to a machine, from what the machine reports. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpunodes.errors import ExitCode, exit_code_for
from gpunodes.planner import kernels, reports
from gpunodes.planner.gpu_model import Facts


@dataclass(frozen=True, slots=True)
class PendingPackage:
    """A package that would be upgraded, or installed as a dependency (``old`` is "")."""

    name: str
    old: str
    new: str
    security: bool


@dataclass(frozen=True, slots=True)
class PlannedOs:
    """The result for one machine; ``unreadable`` is why there is none."""

    name: str
    packages: Sequence[PendingPackage] = ()
    kernels: Sequence[str] = ()
    """Releases of new kernels that would be installed."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Releases of new kernels for which the GPU driver does not build, with the reason."""
    kept_back: Sequence[str] = ()
    reboot: Sequence[str] = ()
    """Why a reboot is due already."""
    unreadable: str = ""
    held: bool = False
    """Whether the packages that would bring a refused kernel are held already."""

    @property
    def reboot_due(self) -> bool:
        """Whether a reboot is due, now or after the upgrade."""
        return bool(self.reboot or self.kernels)

    def needed(self, *, reboot: bool) -> str:
        """What an upgrade would do, "" for nothing; ``reboot``: the machine is rebooted if that is due."""
        upgrades = sum(bool(each.old) for each in self.packages)
        parts = [f"{upgrades} package{'' if upgrades == 1 else 's'}"] if upgrades else []
        parts += [f"the kernel {release}" for release in self.kernels]
        parts += [f"a hold of the kernel {release}" for release in self.refused if not self.held]
        if reboot and self.reboot:
            parts.append(f"a reboot: {'; '.join(self.reboot)}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class OsPlans:
    """The results of several machines."""

    security: bool
    machines: Sequence[PlannedOs]
    interrupted: bool = False

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        return exit_code_for(sum(bool(machine.unreadable) for machine in self.machines), len(self.machines))


def planned(name: str, facts: Facts | None, pending: Any, *, security: bool, why: str = "") -> PlannedOs:
    """The result for a machine: ``pending`` is a result of os_pending, None if there is none because of ``why``."""
    if facts is None or pending is None:
        return PlannedOs(name, unreadable=why or "it did not report what is pending")
    if problem := reports.pending_problem(pending):
        return PlannedOs(name, unreadable=f"its report is invalid: {problem}")
    keep = kernels.kept_packages()
    packages = [
        PendingPackage(each["name"], each["old"], each["new"], each["security"])
        for each in pending["packages"]
        if (each["security"] or not security) and not any(fnmatch.fnmatchcase(each["name"], one) for one in keep)
    ]
    names = {each.name for each in packages}
    new = [
        release
        for release in pending["kernels"]
        if names & {f"linux-image-{release}", f"linux-image-unsigned-{release}"}
    ]
    refused = kernels.refused(facts, new)
    # Packages that depend on the newest kernel are held with it, as far as they are installed.
    metas = [each for each in pending["packages"] if each["kernel_meta"]] if refused else []
    bring = {each["name"] for each in metas}
    return PlannedOs(
        name,
        [
            each
            for each in packages
            if each.name not in bring and not any(each.name.endswith(f"-{release}") for release in refused)
        ],
        [release for release in new if release not in refused],
        refused,
        [each for each in pending["kept_back"] if not any(fnmatch.fnmatchcase(each, one) for one in keep)],
        pending["reboot"],
        held={each["name"] for each in metas if each["old"]} <= {*pending["held"]},
    )
