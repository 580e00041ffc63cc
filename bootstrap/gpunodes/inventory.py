"""The inventory of machines: a plain Ansible inventory, checked before Ansible reads it, so that errors name lines."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import io
import ipaddress
import os
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gpunodes import settings
from gpunodes.errors import WrongInput
from gpunodes.model import Machine, Role

if TYPE_CHECKING:
    from ansible.inventory.manager import InventoryManager

SUDO_PASSWORDS = ("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass")
"""The variables for sudo's password that Ansible's become plugin supports."""
_BECOME_FILE = "ANSIBLE_BECOME_PASSWORD_FILE"

GROUPS: Mapping[Role, str] = {Role.CONTROL_PLANE: "control_plane", Role.WORKER: "workers"}

# The first line of an inventory that `init-master ADDRESS` created: only such a file is extended by new addresses.
OURS = "# Made by gpunodes; yours to edit. Machines joined by address are added here."

# A name that is valid in a shell, in a path and (in lower case) as a Kubernetes node name; RFC 1123.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
# The characters of a pattern: names, shell globs, ranges and Ansible's operators.
_PATTERN = re.compile(r"~?[A-Za-z0-9_.:,*?!&\[\]-]+")


class Inventory:
    """The machines of an inventory file or folder, with their variables."""

    def __init__(self, path: Path) -> None:
        """Read the inventory at ``path``; raises WrongInput for a missing or malformed one."""
        self.path = path
        self._manager, self._variables = _load(path)
        for host in self._manager.hosts.values():
            if not _NAME.fullmatch(host.name):
                raise WrongInput(
                    f"{path}: {host.name!r} is not a machine name",
                    "letters, digits, dots, dashes and underscores",
                    "rename it, and give the address in ansible_host",
                )

    def variables(self, name: str) -> dict[str, Any]:
        """All variables of a machine, merged as Ansible merges them; templates are not rendered."""
        from ansible.errors import AnsibleError

        host = self._manager.get_host(name)
        try:
            merged: dict[str, Any] = self._variables.get_vars(host=host, include_hostvars=False)
        except AnsibleError as error:
            raise WrongInput(
                f"the variables of {name} cannot be read: {str(error).splitlines()[0]}",
                "variables that Ansible can read",
                "correct them; for a vault, use --ask-vault-pass, or set ANSIBLE_VAULT_PASSWORD_FILE",
            ) from error
        return merged

    def machines(self, *roles: Role) -> list[Machine]:
        """The machines of these roles, by default of all roles, in the inventory's order."""
        found: dict[str, Machine] = {}
        for role in roles or tuple(Role):
            group = self._manager.groups.get(GROUPS[role])
            for host in group.get_hosts() if group else ():
                found.setdefault(host.name, self._machine(host.name, role))
        return list(found.values())

    @property
    def cluster(self) -> str:
        """The cluster's key in the history: its control plane's address."""
        found = self.machines(Role.CONTROL_PLANE)
        return found[0].address if found else str(self.path.absolute())

    def control_plane(self) -> Machine:
        """The control-plane machine; raises WrongInput unless the inventory has exactly one."""
        machines = self.machines(Role.CONTROL_PLANE)
        if not machines:
            raise WrongInput(
                f"{self.path} has no machine in the group control_plane",
                "one machine",
                "add it, or run `gpunodes init-master ADDRESS` in an empty folder",
            )
        if len(machines) > 1:
            names = ", ".join(machine.name for machine in machines)
            raise WrongInput(
                f"{self.path} has {len(machines)} machines in the group control_plane ({names})",
                "one machine: a replicated control plane is not supported yet",
                "keep one of them",
            )
        return machines[0]

    def select(self, patterns: Sequence[str], *roles: Role) -> list[Machine]:
        """The machines that match ``patterns``: names, addresses, groups, shell or Ansible patterns.

        Without a pattern, all machines of ``roles``. Raises WrongInput for a pattern without a match, with the nearest
        names, and for a machine outside the groups of ``roles``.
        """
        candidates = self.machines(*roles)
        if not patterns:
            if not candidates:
                groups = " or ".join(GROUPS[role] for role in roles or tuple(Role))
                raise WrongInput(f"{self.path} has no machine in the group {groups}", "at least one", "add a machine")
            return candidates
        by_name = {machine.name: machine for machine in candidates}
        chosen: dict[str, Machine] = {}
        for pattern in patterns:
            if pattern.startswith(("!", "&")):
                raise WrongInput(
                    f"{pattern!r} alone names no machines",
                    "one pattern, such as 'workers:!gpu-3'",
                    "join it to the other patterns with a colon",
                )
            for name in self._matches(pattern):
                if name not in by_name:
                    groups = " or ".join(GROUPS[role] for role in roles or tuple(Role))
                    raise WrongInput(
                        f"{name} is not in the group {groups} of {self.path}",
                        "a machine of that group",
                        "move it to that group, or choose another machine",
                    )
                chosen[name] = by_name[name]
        return list(chosen.values())

    def rendered(self, name: str, prefix: str) -> dict[str, Any]:
        """The variables of a machine whose names start with ``prefix``, with rendered templates.

        Raises WrongInput for a template that cannot be rendered, without its value, which may be a secret.
        """
        from ansible.errors import AnsibleError
        from ansible.template import Templar

        variables = self.variables(name)
        templar = Templar(loader=self._manager._loader, variables=variables)
        found: dict[str, Any] = {}
        for key in [key for key in variables if key.startswith(prefix)]:
            try:
                value = templar.template(variables[key])
                found[key] = str(value) if isinstance(value, str) else value
            except AnsibleError as error:
                raise WrongInput(
                    f"{key} of {name} cannot be rendered",
                    "a value, or a template of defined variables",
                    "correct it; for a vault, use --ask-vault-pass, or set ANSIBLE_VAULT_PASSWORD_FILE",
                ) from error
        return found

    def connection(self, name: str) -> dict[str, Any]:
        """All variables of a machine, the connection variables rendered; raises WrongInput as ``rendered``.

        Without a sudo password in the variables, it is read from $ANSIBLE_BECOME_PASSWORD_FILE, as Ansible does.
        """
        found = self.variables(name) | self.rendered(name, "ansible_")
        file = os.environ.get(_BECOME_FILE)
        if file and not any(found.get(each) for each in SUDO_PASSWORDS):
            found[SUDO_PASSWORDS[0]] = _password(file)
        return found

    def knows(self, address: str) -> bool:
        """Whether a machine has this name or address."""
        return any(address in {machine.name, machine.address} for machine in self.machines())

    def _matches(self, pattern: str) -> list[str]:
        check_pattern(pattern)
        machines = self.machines()
        if exact := [machine.name for machine in machines if pattern in {machine.name, machine.address}]:
            return exact
        # A shell's [13] is a set of characters, Ansible's a subscript: a match as in a shell has priority.
        if matching := fnmatch.filter([machine.name for machine in machines], pattern):
            return matching
        # Ansible prints a warning for a pattern without a match; the error below is better.
        with contextlib.redirect_stderr(io.StringIO()):
            names = [host.name for host in self._manager.get_hosts(pattern)] if not is_address(pattern) else []
        if names:
            return names
        known = {machine.address: machine.name for machine in machines}
        known |= {name: name for name in known.values()}
        nearest = {known[near] for near in difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)}
        named = ", ".join(sorted(nearest or set(known.values())))
        raise WrongInput(
            f"{pattern!r} matches no machine of {self.path}",
            f"a machine of this inventory; the nearest: {named}" if known else "an inventory with machines",
            f"`ansible-inventory --graph -i {self.path}` lists them all",
        )

    def _machine(self, name: str, role: Role) -> Machine:
        return Machine(name=name, address=str(self.variables(name).get("ansible_host", name)), role=role)


def check_pattern(pattern: str) -> None:
    """Raise WrongInput if ``pattern`` has characters that are invalid in names and patterns."""
    if is_address(pattern) or _PATTERN.fullmatch(pattern):
        return
    raise WrongInput(
        f"{pattern!r} is not the name, address or pattern of a machine",
        "letters, digits, dots, dashes and the characters * ? [ ] : , & !",
        "quote patterns, as in 'worker-*'",
    )


def is_address(text: str) -> bool:
    """Whether ``text`` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def check_address(text: str) -> None:
    """Raise WrongInput unless ``text`` can be the address of a machine: an IP address or a host name."""
    if is_address(text):
        return
    if re.fullmatch(r"[0-9.]+", text) or not _NAME.fullmatch(text) or ".." in text:
        raise WrongInput(f"{text!r} is not an address", "an IP address such as 10.0.0.1, or a host name", "correct it")


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


def _load(path: Path) -> tuple[InventoryManager, Any]:
    if not path.exists():
        raise WrongInput(
            f"there is no inventory at {path}",
            "an Ansible inventory with the groups control_plane and workers",
            "pass its path with -i, or create one with `gpunodes init-master ADDRESS --user NAME --key FILE`",
        )
    settings.check_ansible_home()
    for source in _files(path) if path.is_dir() else [path]:
        if source.suffix in {".yml", ".yaml"} and source.is_file():
            _check_yaml(source)
    group_vars = path if path.is_dir() else path.parent
    for variables in sorted((*group_vars.glob("group_vars/**/*.yml"), *group_vars.glob("host_vars/**/*.yml"))):
        _check_mapping(variables)

    # Ansible prints warnings about invalid files to standard output; these errors are already checked above.
    from ansible.errors import AnsibleError
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.vars.manager import VariableManager

    loader = DataLoader()
    warnings = io.StringIO()
    try:
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(warnings):
            _unlock(loader)
            manager = InventoryManager(loader=loader, sources=[str(path)])
            variables_of = VariableManager(loader=loader, inventory=manager)
    except AnsibleError as error:
        first = str(error).splitlines()[0]
        raise WrongInput(f"{path}: {first}", "an Ansible inventory", "correct the file") from error
    if path.is_file() and "Unable to parse" in warnings.getvalue():
        # The plugins are tried in turn, and the last one is that of the INI form.
        reasons = re.findall(r"plugin: (?:Failed to parse inventory: )?(.+)", warnings.getvalue())
        raise WrongInput(
            f"{path} is not an inventory" + (f": {reasons[-1].rstrip('.')}" if reasons else ""),
            "an Ansible inventory, in YAML or INI",
            "correct the file",
        )
    return manager, variables_of


_MOST_ENTRIES = 300
"""Files and folders of an inventory: Ansible reads each, and runs those that are executable."""


def _files(folder: Path) -> list[Path]:
    """The files of an inventory folder that Ansible does not ignore; raises WrongInput for too many."""
    from ansible.inventory.manager import IGNORED

    found: list[Path] = []
    entries = 0
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not IGNORED.search(os.fsencode(name))]
        found += [Path(parent, name) for name in files if not IGNORED.search(os.fsencode(name))]
        entries += len(folders)
        if entries + len(found) > _MOST_ENTRIES:
            raise WrongInput(
                f"{folder} holds more than {_MOST_ENTRIES} files and folders",
                "an inventory: a file, or a folder of such files alone",
                "name it with -i",
            )
    return sorted(found)


@functools.cache
def _password(file: str) -> str:
    """The password from a file, or from the output of an executable, as Ansible does; raises WrongInput without one."""
    path = Path(file).expanduser()
    try:
        if os.access(path, os.X_OK) and path.stat().st_mode & 0o111:
            done = subprocess.run([path], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
            found = done.stdout
        else:
            found = path.read_text(encoding="utf-8")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise WrongInput(
            f"no password could be read from {file}, the value of {_BECOME_FILE} ({type(error).__name__})",
            "a file with sudo's password, or a program that prints it",
            "correct it, or use --ask-become-pass",
        ) from error
    return found.strip()


def _unlock(loader: Any) -> None:
    """Unlock vaults with the password file from Ansible's own settings ($ANSIBLE_VAULT_PASSWORD_FILE)."""
    from ansible import constants
    from ansible.parsing.vault import VaultSecretsContext, get_file_vault_secret

    secrets = []
    # Ansible reads the environment only when it is imported.
    file = os.environ.get("ANSIBLE_VAULT_PASSWORD_FILE") or constants.DEFAULT_VAULT_PASSWORD_FILE
    if file:
        secret = get_file_vault_secret(filename=file, vault_id="default", loader=loader)
        secret.load()
        secrets = [("default", secret)]
        loader.set_vault_secrets(secrets)
    # Whole files are read with the loader's secrets, single values (!vault) with those of the process.
    if VaultSecretsContext.current(optional=True) is None:
        VaultSecretsContext.initialize(VaultSecretsContext(secrets=secrets))


def _compose(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise WrongInput(f"{path} is not text in UTF-8", "a YAML file", "correct the file") from error
    except OSError as error:
        raise WrongInput(f"{path} cannot be read: {error.strerror}", "a readable file", "check its mode") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"{path}:{mark.line + 1}" if mark else str(path)
        raise WrongInput(f"{line}: {error.problem}", "valid YAML", "correct the line") from error
    except yaml.YAMLError as error:
        raise WrongInput(f"{path}: {str(error).splitlines()[0]}", "valid YAML", "correct the file") from error


def _mapping(path: Path, node: yaml.Node | None, what: str) -> list[tuple[yaml.Node, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        pairs: list[tuple[yaml.Node, yaml.Node]] = node.value
        return pairs
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
        return []
    kind = {yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value"}.get(type(node), "something else")
    raise WrongInput(
        f"{path}:{node.start_mark.line + 1}: {what} is {kind}", "a mapping (name: ...)", "correct the line"
    )


def _check_mapping(path: Path) -> None:
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("$ANSIBLE_VAULT"):
        _mapping(path, _compose(path), "the file")


def _check_yaml(path: Path) -> None:
    """Check the shape of a YAML inventory: groups, hosts, variables."""
    for group, body in _mapping(path, _compose(path), "the inventory"):
        _check_group(path, str(group.value), body)


def _check_group(path: Path, name: str, node: yaml.Node) -> None:
    for key, value in _mapping(path, node, f"the group {name}"):
        line = key.start_mark.line + 1
        if key.value not in {"hosts", "children", "vars"}:
            raise WrongInput(
                f"{path}:{line}: {key.value!r} in the group {name}",
                "hosts, children or vars",
                "put machines under hosts",
            )
        entries = _mapping(path, value, f"{key.value} of {name}")
        for entry, body in entries:
            if key.value == "children":
                _check_group(path, str(entry.value), body)
            elif key.value == "hosts":
                bare = re.sub(r"\[[0-9a-zA-Z:]+\]", "0", str(entry.value))
                if not _NAME.fullmatch(bare):
                    raise WrongInput(
                        f"{path}:{entry.start_mark.line + 1}: {entry.value!r} is not a machine name",
                        "letters, digits, dots, dashes and underscores",
                        "rename it, and give the address in ansible_host",
                    )
                _mapping(path, body, f"the machine {entry.value}")
