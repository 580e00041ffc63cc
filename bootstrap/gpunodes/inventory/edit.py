"""Changes an inventory that gpunodes created: adds machines, changes their connection, undoes both."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from gpunodes.errors import WrongInput
from gpunodes.inventory import GROUPS
from gpunodes.model import Machine, Role

# The first line of an inventory that `init-master ADDRESS` created: only such a file is extended by new addresses.
OURS = "# Made by gpunodes; yours to edit. Machines joined by address are added here."


def add(path: Path, role: Role, addresses: Iterable[str], connection: Mapping[str, object]) -> None:
    """Add machines by their address to the inventory at ``path``; it is created if it does not exist.

    ``connection`` contains Ansible's connection variables for them; if it is empty, those of the control plane are
    used. Raises WrongInput if gpunodes did not create the file.
    """
    document: dict[str, Any] = {}
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if not text.startswith(OURS):
            raise WrongInput(
                f"{', '.join(addresses)} is not in {path}",
                "a machine of the inventory",
                f"add it to {path} and try again",
            )
        document = yaml.safe_load(text)
    if not connection:
        known = document.get(GROUPS[Role.CONTROL_PLANE], {}).get("hosts", {})
        first: dict[str, object] = next(iter(known.values()), {})
        connection = {name: value for name, value in first.items() if name != "ansible_host"}
    for address in addresses:
        group = document.setdefault(GROUPS[role], {}).setdefault("hosts", {})
        group[address] = {"ansible_host": address, **connection}
    _write(path, document)


def reconnect(path: Path, machines: Iterable[Machine], connection: Mapping[str, object]) -> None:
    """Change the connection variables of machines in the inventory at ``path``.

    Raises WrongInput if gpunodes did not create the file.
    """
    document = yaml.safe_load(text) if path.is_file() and (text := path.read_text("utf-8")).startswith(OURS) else {}
    groups = {machine.name: document.get(GROUPS[machine.role], {}).get("hosts", {}) for machine in machines}
    if not all(name in hosts for name, hosts in groups.items()):
        raise WrongInput(
            f"gpunodes did not create {path}, and does not change its connection variables",
            "--user, --key and --port only for machines that are not in this inventory",
            f"omit these options, or change {path}",
        )
    for name, hosts in groups.items():
        hosts[name] = {**(hosts[name] or {}), **connection}
    _write(path, document)


class Tentative:
    """What a command wrote into an inventory, and may undo in part or as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folders = [folder for folder in path.absolute().parents if not folder.exists()]
        self._before = path.read_bytes() if path.is_file() else None

    def undo(self) -> None:
        """Restore the inventory as it was before; not if a user or another command has changed it since."""
        written = _written.pop(self._path.absolute(), None)
        if written is None or not self._path.is_file() or self._path.read_bytes() != written:
            return
        if self._before is not None:
            _replace(self._path, self._before)
            return
        self._path.unlink()
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def drop(self, names: Collection[str]) -> None:
        """Remove machines that this command added."""
        document = yaml.safe_load(self._path.read_text(encoding="utf-8"))
        for group in document.values():
            for name in names:
                group["hosts"].pop(name, None)
        kept = {name: group for name, group in document.items() if group["hosts"] or set(group) - {"hosts"}}
        if kept:
            _write(self._path, kept)
        else:
            self.undo()


@contextlib.contextmanager
def tentative(path: Path, *, dry_run: bool) -> Iterator[Tentative]:
    """Restore the inventory at ``path`` after a dry run, and if the input was wrong."""
    change = Tentative(path)
    try:
        yield change
    except WrongInput:
        change.undo()
        raise
    finally:
        if dry_run:
            change.undo()


_written: dict[Path, bytes] = {}
"""What this process last wrote into each inventory."""


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = yaml.safe_dump(document, sort_keys=False)
    content = f"{OURS}\n---\n{body}".encode()
    _replace(path, content)
    _written[path.absolute()] = content


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
