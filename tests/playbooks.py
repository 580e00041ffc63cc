"""The roles of the playbooks, listed in a play or imported by its tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "playbooks"


def roles_of(play: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The roles of a play in the order in which they run, each as an entry of `roles`."""
    return [*play.get("roles", ()), *_imported(play.get("tasks", ()))]


def _imported(tasks: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for task in tasks:
        if role := task.get("ansible.builtin.import_role"):
            yield {"role": role["name"], **{key: task[key] for key in ("tags", "when") if key in task}}
        else:
            path = FOLDER / task["ansible.builtin.import_tasks"]
            yield from _imported(yaml.safe_load(path.read_text(encoding="utf-8")))


def phases_of(plays: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tags by which the plays' roles can be skipped, in order."""
    return [entry["tags"] for play in plays for entry in roles_of(play) if entry["tags"] not in {"always", "never"}]
