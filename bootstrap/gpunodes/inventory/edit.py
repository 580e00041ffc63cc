"""Changes an inventory that gpunodes created: adds machines, changes their connection, undoes both."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpunodes.errors import WrongInput
from gpunodes.inventory import GROUPS, addressed, loader, plugins, where_to_add
from gpunodes.inventory.names import machine_name
from gpunodes.model import Machine, Role

# The first line of an inventory that `init-master ADDRESS` created: only such a file is extended by new addresses.
OURS = "# Made by gpunodes; yours to edit. Machines joined by address are added here."


def editable(path: Path) -> Path:
    """The file of the inventory ``path`` that gpunodes edits: the file itself, or the one that it made in a folder.

    A folder without such a file is returned itself. Raises WrongInput for a folder with several.
    """
    files = loader.files(path) if path.is_dir() else []
    made = [file for file in files if _is_ours(file)]
    if len(made) > 1:
        raise WrongInput(
            f"gpunodes created {' and '.join(map(str, made))}",
            "one file of the folder to edit",
            f"delete the first line of the others ({OURS!r})",
        )
    return made[0] if made else path


def add(path: Path, role: Role, addresses: Sequence[str], connection: Mapping[str, object]) -> list[str]:
    """Add machines by their address to the inventory at ``path``, which is created if it does not exist; their names.

    ``connection`` contains Ansible's connection variables for them; if it is empty, those of the control plane are
    used, or for GPU hosts those of the first GPU host. Raises WrongInput if gpunodes did not create the file, or no
    file of the folder.
    """
    file = editable(path)
    document: dict[str, Any] = {}
    if file.exists():
        if not _is_ours(file):
            where = where_to_add(plugins.plugin_in(path))
            raise WrongInput(
                f"{', '.join(addresses)} is not in {path}",
                "a machine of the inventory",
                f"add it to {path if where == 'the inventory' else where} and try again",
            )
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not connection:
        like = Role.GPU_HOST if role is Role.GPU_HOST and GROUPS[role] in document else Role.CONTROL_PLANE
        known = document.get(GROUPS[like], {}).get("hosts", {})
        first: dict[str, object] = next(iter(known.values()), {})
        connection = {name: value for name, value in first.items() if name != "ansible_host"}
    added = {machine_name(address): address for address in addresses}
    for name, address in added.items():
        group = document.setdefault(GROUPS[role], {}).setdefault("hosts", {})
        group[name] = {"ansible_host": address, **connection}
    _write(file, document)
    return list(added)


def create(path: Path, document: Mapping[str, Any]) -> None:
    """Write a new inventory, which later commands extend.

    Raises WrongInput if there is one at ``path``, and as ``addressed.check_plain``.
    """
    addressed.check_plain(document)
    if path.exists():
        raise WrongInput(f"{path} exists already", "a new file for the inventory", "name another one with -i")
    _write(path, document)


def reconnect(path: Path, machines: Iterable[Machine], connection: Mapping[str, object]) -> None:
    """Change the connection variables of machines in the inventory at ``path``.

    Raises WrongInput for machines that are not in a file that gpunodes created.
    """
    file = editable(path)
    document = yaml.safe_load(file.read_text(encoding="utf-8")) if _is_ours(file) else {}
    groups = {machine.name: document.get(GROUPS[machine.role], {}).get("hosts", {}) for machine in machines}
    if foreign := [name for name, hosts in groups.items() if name not in hosts]:
        plugin = plugins.plugin_in(path)
        names = foreign[0] if len(foreign) == 1 else f"{foreign[0]} and {len(foreign) - 1} more"
        made = f"the file that lists {names}" if path.is_dir() or plugin else str(path)
        raise WrongInput(
            f"gpunodes did not create {made}, and does not change its connection variables",
            "--user, --key and --port only for machines that are not in this inventory",
            f"omit these options, or {'set ansible_user and the like in group_vars' if plugin else f'change {path}'}",
        )
    for name, hosts in groups.items():
        hosts[name] = {**(hosts[name] or {}), **connection}
    _write(file, document)


def _is_ours(file: Path) -> bool:
    """Whether gpunodes created this file."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(OURS)) == OURS.encode()


class Tentative:
    """What a command wrote into an inventory, and may undo in part or as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path = editable(path)
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
                group.get("hosts", {}).pop(name, None)
        kept = {name: group for name, group in document.items() if group.get("hosts") or set(group) - {"hosts"}}
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
    """Write a file in one step. One that exists keeps its mode: users write passwords into it. A link stays one."""
    path = Path(os.path.realpath(path))
    # In a shared folder a file of this name may be another user's, or a link.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
