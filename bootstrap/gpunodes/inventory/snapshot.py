"""A static copy of an inventory as it was read and checked, for a playbook: a plugin that ran again could list more."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpunodes.errors import WrongInput

if TYPE_CHECKING:
    from ansible.inventory.group import Group
    from ansible.inventory.manager import InventoryManager

_MARKER = "__ansible_"
"""What a key begins with that Ansible reads."""
_VARIABLES = ("group_vars", "host_vars")


def write(manager: InventoryManager, beside: Path, folder: Path) -> Path:
    """Write the inventory to a file in the new ``folder``, and return that file; Ansible reads it without a plugin.

    The variables in the folders ``group_vars`` and ``host_vars`` of ``beside`` are read from there. The file has mode
    0600: a plugin may list passwords, so delete it after the playbook. Raises WrongInput for a key that Ansible would
    read.
    """
    folder.mkdir(mode=0o700)
    for name in _VARIABLES:
        if (beside / name).is_dir():
            (folder / name).symlink_to((beside / name).absolute())
    hosts = {name: encoded(host.vars, templates=True) for name, host in manager.hosts.items()}
    document = {name: _group(group) for name, group in manager.groups.items()}
    document["all"]["hosts"] = hosts
    path = folder / "hosts.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(document, file, default=str)
    return path


def _group(group: Group) -> dict[str, Any]:
    priority = {} if group.priority == 1 else {"ansible_group_priority": group.priority}
    return {
        "hosts": {host.name: {} for host in group.hosts},
        "children": {child.name: {} for child in group.child_groups},
        "vars": {**encoded(group.vars, templates=True), **priority},
    }


def encoded(value: Any, *, templates: bool = False) -> Any:
    """A value for JSON in which each string is marked as unsafe, so that Ansible does not evaluate it as a template.

    With ``templates`` texts that Ansible trusts as templates stay so, and vaults stay locked.
    """
    if templates and (locked := _locked(value)):
        return {"__ansible_vault": locked}
    if isinstance(value, str):
        return _encodable(value) if templates and _is_template(value) else {"__ansible_unsafe": _encodable(value)}
    if isinstance(value, Mapping):
        return {_key(name): encoded(inner, templates=templates) for name, inner in value.items()}
    if isinstance(value, Sequence):
        return [encoded(inner, templates=templates) for inner in value]
    return value


def _locked(value: Any) -> str:
    from ansible.parsing.vault import VaultHelper

    return VaultHelper.get_ciphertext(value, with_tags=False) or ""


def _is_template(value: str) -> bool:
    from ansible.template import is_trusted_as_template

    return bool(is_trusted_as_template(value))


def _encodable(text: str) -> str:
    """With a lone surrogate Ansible parses the file as YAML, where the mark has no effect."""
    return text.encode(errors="replace").decode()


def _key(name: Any) -> Any:
    """A key of a mapping, which may come from a file of others; raises WrongInput for one that Ansible would read.

    With a marker that is not as Ansible writes it, it parses the file as YAML, too.
    """
    if name is None or isinstance(name, (bool, int, float)):
        return name
    if not isinstance(name, str):
        raise WrongInput(
            f"{str(name)[:60]!a} is a key", "keys that are text or numbers", "correct what the plugin lists"
        )
    if name.startswith(_MARKER):
        raise WrongInput(f"{name[:60]!a} is a key", f"keys that do not begin with {_MARKER}: Ansible reads them", "")
    return _encodable(name)
