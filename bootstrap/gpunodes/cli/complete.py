"""Shell completion: of add-ons, and of machines by the inventory, read without Ansible, which is slow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from gpunodes.cli.options import DEFAULT_INVENTORY


def machines(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of machines and groups that begin with ``incomplete``; none for an inventory that cannot be read."""
    given = context.params.get(parameter.name or "") or ()
    chosen = {given} if isinstance(given, str) else set(given)
    path = Path(context.params.get("inventory_path") or DEFAULT_INVENTORY)
    return [CompletionItem(name) for name in _names(path) if name.startswith(incomplete) and name not in chosen]


def machines_or_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For `health`: files after --from, else its sub-commands and machines."""
    if context.params.get("files"):
        return [CompletionItem(incomplete, type="file")]
    found = machines(context, parameter, incomplete)
    if isinstance(context.command, click.Group) and not context.params.get(parameter.name or ""):
        names = [name for name in context.command.list_commands(context) if name.startswith(incomplete)]
        found += [CompletionItem(name) for name in names]
    return found


def addons(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001 - click's signature
    """Names of optional add-ons that begin with ``incomplete``."""
    from gpunodes.planner.addons import optional

    return [CompletionItem(name) for name in optional() if name.startswith(incomplete)]


_MOST_FILES = 20
"""Of an inventory folder: completion must be quick."""


def _names(path: Path) -> list[str]:
    import yaml

    files = [file for file in sorted(path.iterdir()) if file.is_file()][:_MOST_FILES] if path.is_dir() else [path]
    found: dict[str, None] = {}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            if file.suffix in {".yml", ".yaml", ".json"}:
                found |= dict.fromkeys(_of_yaml(yaml.safe_load(text)))
            else:
                found |= dict.fromkeys(_of_ini(text))
        except (OSError, ValueError, yaml.YAMLError):
            continue
    return list(found)


def _of_yaml(groups: Any) -> Iterator[str]:
    if not isinstance(groups, dict) or isinstance(groups.get("plugin"), str):
        return
    for group, body in groups.items():
        yield str(group)
        if isinstance(body, dict):
            hosts = body.get("hosts")
            yield from (str(name) for name in hosts if "[" not in str(name)) if isinstance(hosts, dict) else ()
            yield from _of_yaml(body.get("children"))


def _of_ini(text: str) -> Iterator[str]:
    """Groups, and hosts outside of sections of variables."""
    are_hosts = True
    for line in text.splitlines():
        if section := re.match(r"\[([\w.-]+)(:\w+)?\]", line):
            are_hosts = section[2] != ":vars"
            yield section[1]
        elif are_hosts and (host := re.match(r"[\w.-]+", line)):
            yield host[0]
