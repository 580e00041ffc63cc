"""The arguments of ansible-playbook that decide what gpunodes itself reads in an inventory, too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpunodes import settings
from gpunodes.errors import WrongInput
from gpunodes.inventory.loader import BECOME_FILE, LOGIN_FILE, VAULT_FILES

_INVENTORY = ("-i", "--inventory", "--inventory-file")
_VAULTS = ("--vault-id", "--vault-password-file", "--vault-pass-file")
_VARIABLES = {
    "--ssh-common-args": "ANSIBLE_SSH_COMMON_ARGS",
    "--ssh-extra-args": "ANSIBLE_SSH_EXTRA_ARGS",
    "--become-password-file": BECOME_FILE,
    "--become-pass-file": BECOME_FILE,
    "--connection-password-file": LOGIN_FILE,
    "--conn-pass-file": LOGIN_FILE,
    **dict.fromkeys(_VAULTS, VAULT_FILES),
}
"""Ansible's environment variable with the meaning of an option: SSH connections of gpunodes read these."""

_TAKEN = {
    "inventory": "-i",
    "ssh_common_args": "--ssh-common-args",
    "ssh_extra_args": "--ssh-extra-args",
    "become_password_file": "--become-password-file",
    "connection_password_file": "--connection-password-file",
    "vault_ids": "--vault-id",
    "vault_password_files": "--vault-password-file",
}
"""By Ansible's name: the options above, of which Ansible gets none."""
_ASKED = {"ask_vault_pass": "--ask-vault-pass", "become_ask_pass": "--ask-become-pass", "ask_pass": "--ask-pass"}
"""The same for questions that gpunodes asks itself, on Linux."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of ansible-playbook, without those that are environment variables now, and without the inventory."""

    inventories: Sequence[str]
    rest: Sequence[str]


def read(playbook: Path, words: Sequence[str]) -> Arguments:
    """Set the environment variables for these arguments, and let Ansible's variables have their extra variables.

    Raises WrongInput for an abbreviation of such an option, or of one that asks for a password. What else is wrong
    Ansible reports, and ends this process.
    """
    found = _split(words)
    settings.check_ansible_home()
    settings.import_ansible()
    from ansible import context
    from ansible.cli.playbook import PlaybookCLI
    from ansible.utils.context_objects import CLIArgs

    ansible = PlaybookCLI(["ansible-playbook", str(playbook), *found.rest])
    ansible.init_parser()
    options = ansible.parser.parse_args(ansible.args[1:])
    # Environment variables set some of the defaults.
    defaults = ansible.parser.parse_args([str(playbook)])
    for name, option in {**_TAKEN, **(_ASKED if hasattr(os, "memfd_create") else {})}.items():
        if getattr(options, name) != getattr(defaults, name):
            raise WrongInput(f"{option} is abbreviated, or joined to another option", "the option alone", "correct it")
    context.CLIARGS = CLIArgs.from_options(options)
    return found


def _split(words: Sequence[str]) -> Arguments:
    inventories: list[str] = []
    rest: list[str] = []
    vaults: list[str] = []
    left = iter(words)
    for word in left:
        option, equals, value = word.partition("=")
        if word.startswith("-i") and len(word) > len("-i"):
            inventories.append(word.removeprefix("-i"))
        elif option in _INVENTORY or option in _VARIABLES:
            value = value if equals else next(left, "")
            if option in _INVENTORY:
                inventories.append(value)
            elif option in _VAULTS:
                vaults.append(value)
            else:
                os.environ[_VARIABLES[option]] = value
        else:
            rest.append(word)
    if vaults:
        os.environ[VAULT_FILES] = ",".join([*filter(None, [os.environ.get(VAULT_FILES)]), *vaults])
    return Arguments(inventories, rest)
