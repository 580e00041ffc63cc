"""What a module reports: the actions that it took or would take, and their differences for Ansible's ``--diff``."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import disk
from .masking import Mask, Secret

GENERATED = "(generated on the machine)\n"
"""Stands for the content of a file that a program would generate."""


@dataclass(frozen=True)
class Difference:
    """A thing before and after: a text, or an object of plain data. None: it does not exist.

    Differences of objects with the same title are shown as one.
    """

    title: str
    before: str | Mapping[str, Any] | None
    after: str | Mapping[str, Any] | None


@dataclass
class Report:
    """The actions of one run, with their differences; none if there was nothing to do."""

    actions: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    def add(self, action: str, *differences: Difference) -> None:
        """Add an action."""
        self.actions.append(action)
        self.differences += differences

    def result(self) -> dict[str, Any]:
        """The result of a module, for ``entry.carry_out``."""
        return {"changed": bool(self.actions), "actions": self.actions, "diff": self.differences}


def of_file(path: str, after: str | None, mode: int = 0, uid: int = 0) -> list[Difference]:
    """The differences if the file at ``path`` gets this content, mode and owner; ``after`` is None if it is removed.

    The content of a file that not every user may read is secret.
    """
    before, old = None, {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        state = os.lstat(path)
        old = _attributes(stat.S_IMODE(state.st_mode), state.st_uid)
        regular = stat.S_ISREG(state.st_mode)
        before = _readable(disk.read(path) or "", state.st_mode) if regular else "(not a regular file)\n"
    new = {} if after is None else _attributes(mode, uid)
    found = [] if before == after else [Difference(path, before, None if after is None else _readable(after, mode))]
    # The difference of two texts shows neither their modes nor an empty file.
    if old != new and ((old and new) or not (before or after)):
        found.append(Difference(f"mode and owner of {path}", old, new))
    return found


def shown(differences: Iterable[Difference]) -> list[dict[str, Any]]:
    """The differences as Ansible expects them in a result, without secrets and without those that show nothing."""
    merged: dict[str, Difference] = {}
    for each in differences:
        first = merged.get(each.title)
        merged[each.title] = each if first is None else _joined(first, each)
    found = []
    for title, each in merged.items():
        mask = Mask()
        before, after = (
            mask.value(side) if isinstance(side, (Mapping, Secret)) else mask.text(side or "")
            for side in (each.before, each.after)
        )
        header = mask.text(title)
        if before != after:
            found.append({"before": before, "after": after, "before_header": header, "after_header": header})
    return found


def _joined(first: Difference, second: Difference) -> Difference:
    """Two differences with the same title, the second one made after the first one."""
    sides = (first.before, first.after, second.before, second.after)
    if not all(isinstance(side, Mapping) for side in sides):
        return Difference(first.title, first.before, second.after)
    return Difference(
        first.title,
        {**second.before, **first.before},  # type: ignore[dict-item]  # each side is a mapping
        {**first.after, **second.after},  # type: ignore[dict-item]  # each side is a mapping
    )


def _attributes(mode: int, uid: int) -> dict[str, Any]:
    return {"mode": f"{mode:04o}", "owner": uid}


def _readable(content: str, mode: int) -> str:
    return content if mode & stat.S_IROTH else Secret(content)
