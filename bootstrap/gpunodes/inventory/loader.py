"""Loads an inventory with Ansible. Its YAML is checked first, so that errors name the file and the line."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gpunodes import settings
from gpunodes.errors import WrongInput
from gpunodes.inventory import plugins, sources
from gpunodes.inventory.names import NAME
from gpunodes.inventory.sources import Withheld

if TYPE_CHECKING:
    from ansible.inventory.manager import InventoryManager
    from ansible.vars.manager import VariableManager

BECOME_FILE, LOGIN_FILE = "ANSIBLE_BECOME_PASSWORD_FILE", "ANSIBLE_CONNECTION_PASSWORD_FILE"
"""Ansible's environment variables for files with the passwords of sudo and of the login."""
VAULT_FILE, VAULT_FILES = "ANSIBLE_VAULT_PASSWORD_FILE", "ANSIBLE_VAULT_IDENTITY_LIST"
"""The same for a vault's password, and for several vaults: LABEL@FILE, with commas."""
VAULT_REMEDY = f"for a vault, use --ask-vault-pass, or set {VAULT_FILE}: your ansible.cfg does not apply"
_MOST_ENTRIES = 300
"""Files and folders of an inventory: Ansible reads each, and runs those that are executable."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An inventory as Ansible reads it."""

    manager: InventoryManager
    variables: VariableManager
    plugin: str
    """The inventory plugin that lists machines, "" in a static inventory; the first one of several."""
    withheld: Withheld
    """What plugins list beyond what their sources may decide."""


def load(path: Path) -> Loaded:
    """Ansible's managers of the hosts and of their variables; raises WrongInput for a malformed inventory."""
    if not path.exists():
        raise WrongInput(
            f"there is no inventory at {path}",
            "an Ansible inventory",
            "name it with -i",
        )
    settings.check_ansible_home()
    settings.import_ansible()
    dynamic: dict[Path, str] = {}
    for source in files(path) if path.is_dir() else [path]:
        if source.suffix in {".yml", ".yaml"} and source.is_file():
            document = _compose(source)
            if name := plugins.plugin_of(document):
                dynamic[source] = name
            else:
                _check_static(source, document)
    group_vars = path if path.is_dir() else path.parent
    for variables in sorted((*group_vars.glob("group_vars/**/*.yml"), *group_vars.glob("host_vars/**/*.yml"))):
        _check_mapping(variables)

    # Ansible prints warnings about invalid files to standard output; these errors are already checked above.
    from ansible.errors import AnsibleError
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.plugins.loader import init_plugin_loader
    from ansible.utils.collection_loader import AnsibleCollectionConfig
    from ansible.vars.manager import VariableManager

    if AnsibleCollectionConfig.collection_finder is None:
        init_plugin_loader()  # templates may use filters of collections
    loader = DataLoader()
    warnings = io.StringIO()
    try:
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(warnings):
            _unlock(loader)
            _load_extra_variables(loader)
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(warnings), plugins.running(path, dynamic):
            manager = InventoryManager(loader=loader, sources=[str(path)], parse=False)
            withheld = sources.watch(manager, dynamic)
            manager.parse_sources(cache=True)
            variables_of = VariableManager(loader=loader, inventory=manager)
    except AnsibleError as error:
        raise WrongInput(f"{path}: {str(error).splitlines()[0]}", "an Ansible inventory", "correct the file") from error
    _check_parsed(path, dynamic, manager, warnings.getvalue())
    return Loaded(manager, variables_of, next(iter(dynamic.values()), ""), withheld)


def _check_parsed(path: Path, dynamic: Mapping[Path, str], manager: InventoryManager, warnings: str) -> None:
    """Raise WrongInput if a plugin, or none, could read the inventory."""
    plugins.check_parsed(path, dynamic, manager._inventory.processed_sources, warnings)
    if path.is_file() and "Unable to parse" in warnings:
        # The plugins are tried in turn, and the last one is that of the INI form.
        reasons = re.findall(r"plugin: (?:Failed to parse inventory: )?(.+)", warnings)
        raise WrongInput(
            f"{path} is not an inventory" + (f": {reasons[-1].rstrip('.')}" if reasons else ""),
            "an Ansible inventory, in YAML or INI",
            "correct the file",
        )


@functools.cache
def password_of(file: str, variable: str) -> str:
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
            f"no password could be read from {file}, the value of {variable} ({type(error).__name__})",
            f"a file with {'the password of sudo' if variable == BECOME_FILE else 'the password'}, or a program that "
            "prints it",
            f"correct it, or use {'--ask-become-pass' if variable == BECOME_FILE else '--ask-pass'}",
        ) from error
    return found.strip()


def _unlock(loader: Any) -> None:
    """Unlock vaults with the files that Ansible's environment variables name; raises WrongInput for a prompt."""
    from ansible.parsing.vault import VaultSecretsContext, get_file_vault_secret

    # Not by Ansible's constants: it reads the environment only when it is imported.
    pairs = [each.strip().partition("@") for each in os.environ.get(VAULT_FILES, "").split(",")]
    named = [(label, file) if at else ("", label) for label, at, file in pairs]
    secrets = []
    for label, file in [*named, ("", os.environ.get(VAULT_FILE, ""))]:
        if file in {"prompt", "prompt_ask_vault_pass"}:
            raise WrongInput(
                f"{VAULT_FILES} asks for a password", "files, or programs that print one", "use --ask-vault-pass"
            )
        if file:
            secret = get_file_vault_secret(filename=file, vault_id=label or "default", loader=loader)
            secret.load()
            secrets.append((label or "default", secret))
    if secrets:
        loader.set_vault_secrets(secrets)
    # Whole files are read with the loader's secrets, single values (!vault) with those of the process.
    if VaultSecretsContext.current(optional=True) is None:
        VaultSecretsContext.initialize(VaultSecretsContext(secrets=secrets))


def _load_extra_variables(loader: Any) -> None:
    """Let Ansible read its -e, once for all that needs it; raises WrongInput for what it refuses."""
    from ansible import context
    from ansible.errors import AnsibleError
    from ansible.utils.vars import load_extra_vars

    try:
        load_extra_vars(loader)
    except AnsibleError as error:
        given = context.CLIARGS.get("extra_vars", ())
        # Some of Ansible's errors do not name the file. A value may be a password.
        option = f"-e {given[0]}" if len(given) == 1 and given[0].startswith("@") else "-e"
        raise WrongInput(
            f"{option}: {' '.join(str(error).splitlines()[:2]).rstrip('.')}",
            "variables: NAME=VALUE, a mapping in JSON or YAML, or @FILE with one",
            f"correct it; {VAULT_REMEDY}" if "vault" in str(error).lower() else "correct it",
        ) from error


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


def files(folder: Path) -> list[Path]:
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


def _check_static(path: Path, document: yaml.Node | None) -> None:
    """Check the shape of a static YAML inventory: groups, hosts, variables."""
    for group, body in _mapping(path, document, "the inventory"):
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
                if not NAME.fullmatch(bare):
                    raise WrongInput(
                        f"{path}:{entry.start_mark.line + 1}: {entry.value!r} is not a machine name",
                        "letters, digits, dots, dashes and underscores",
                        "rename it, and give the address in ansible_host",
                    )
                _mapping(path, body, f"the machine {entry.value}")
