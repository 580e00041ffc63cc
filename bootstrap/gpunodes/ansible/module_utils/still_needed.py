"""Packages of gpunodes that others need by now, packages or an administrator: they stay when gpunodes leaves a machine.

A package manager that removes a package removes all that depend on it, those of others too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from . import in_use
from .ledger import Ledger
from .packages import Manager

_MOST_NAMES = 5


@dataclass(frozen=True)
class Needed:
    """The packages that stay, and all packages of others that their removal would remove."""

    packages: Sequence[str] = ()
    by: Sequence[str] = ()
    configured: Mapping[str, str] = field(default_factory=dict)
    """Those of the packages that an administrator has configured, with the reason why they stay."""

    def notes(self, known: Collection[str]) -> list[str]:
        """The sentences for the user; none if only packages in ``known`` need them, which gpunodes installed."""
        found = [f"{name} stays: {why}" for name, why in self.configured.items()]
        others = [name for name in self.by if name not in known]
        kept = [name for name in self.packages if name not in self.configured]
        if others and kept:
            stay, need = ("stays", "it") if len(kept) == 1 else ("stay", "them")
            verb = "needs" if len(others) == 1 else "need"
            found.append(f"{_listed(kept)} {stay}: {_listed(others)}, which gpunodes did not install, {verb} {need}")
        return found


def find(manager: Manager, names: Sequence[str], going: Collection[str]) -> Needed:
    """Those of the installed packages ``names`` that are not removed, because packages not in ``going`` depend on them.

    And those that an administrator has configured, with what they depend on. The package manager simulates the removal,
    once if all of them can go. Raises MachineProblem if it cannot.
    """
    configured = in_use.why(names)
    kept: list[str] = [*configured]
    by: list[str] = []
    removable: list[str] = []

    def sort(part: Sequence[str]) -> None:
        """Halves until it is known which ones stay: that is a few of many."""
        lost = [name for name in manager.removals([*removable, *part]) if name not in going or name in kept]
        if not lost:
            removable.extend(part)
        elif len(part) == 1:
            kept.extend(part)
            by.extend(name for name in lost if name not in by)
        else:
            sort(part[: len(part) // 2])
            sort(part[len(part) // 2 :])

    if left := [name for name in names if name not in configured]:
        sort(left)
    packages = [name for name in names if name in kept]
    return Needed(packages, [name for name in by if name not in kept], configured)


def take(ledger: Ledger, manager: Manager, kept: Sequence[str]) -> Ledger:
    """Remove the kept packages from ``ledger``, with their services, users and folders; returns these.

    Members of their groups are removed: what a group may do, gpunodes gave these users.
    """
    files, scripts = manager.contents(kept)
    units = {os.path.basename(path)[: -len(".service")] for path in files if path.endswith(".service")}
    words = {*re.findall(r"[\w.-]+", scripts)}
    taken = Ledger(
        packages=[name for name in ledger.packages if name in kept],
        services={name: state for name, state in ledger.services.items() if name in units},
        users=[name for name in ledger.users if name in words],
        groups=[name for name in ledger.groups if name in words],
        # Programs create folders of their name, such as /var/lib/docker, which no package lists.
        directories=[path for path in ledger.directories if path in files or os.path.basename(path) in units],
    )
    for name in ("packages", "users", "groups", "directories"):
        setattr(ledger, name, [each for each in getattr(ledger, name) if each not in getattr(taken, name)])
    ledger.services = {name: state for name, state in ledger.services.items() if name not in taken.services}
    return taken


def give(ledger: Ledger, taken: Ledger) -> None:
    """Add to another ledger what stays: who undoes that removes it, unless it is needed then, too."""
    ledger.note_packages(taken.packages)
    ledger.note_users(taken.users)
    ledger.note_groups(taken.groups)
    ledger.note_directories(taken.directories)
    for name, state in taken.services.items():
        ledger.note_service(name, state)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
