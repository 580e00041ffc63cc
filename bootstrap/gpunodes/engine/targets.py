"""Where a machine of the inventory is reached over SSH, from Ansible's variables and ssh_config(5)."""

from __future__ import annotations

import getpass
import itertools
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpunodes.engine import openssh
from gpunodes.errors import WrongInput
from gpunodes.inventory import SUDO_PASSWORDS

Lookup = Callable[[str, Sequence[str]], Mapping[str, Any]]
"""What ssh_config says of a host that is reached with these other words, by the option's name in lower case."""

DEFAULT_PORT = 22
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
PYTHON = "/usr/bin/python3"

PASSWORDS = ("ansible_ssh_password", "ansible_ssh_pass", "ansible_password")
"""The inventory's names for the password of a login."""
_ALIASES = {
    "host": ("ansible_ssh_host", "ansible_host"),
    "port": ("ansible_ssh_port", "ansible_port"),
    "user": ("ansible_ssh_user", "ansible_user"),
    "identityfile": ("ansible_ssh_private_key_file", "ansible_private_key_file"),
    "password": PASSWORDS,
}
ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
# ssh(1)'s short options that name what a long one does too.
_SHORT = {"-J": "proxyjump", "-p": "port", "-l": "user", "-i": "identityfile"}


@dataclass(frozen=True, slots=True)
class Target:
    """A machine as SSH reaches it. ``jump`` are the machines on the way, the nearest to us first."""

    name: str
    address: str
    port: int = DEFAULT_PORT
    user: str = ""
    key_files: tuple[str, ...] = ()
    password: str = field(default="", repr=False)
    jump: tuple[Target, ...] = ()
    proxy_command: str = ""
    host_key_alias: str = ""
    identities_only: bool = False
    rules: openssh.Rules = field(default_factory=openssh.Rules)
    python: str = PYTHON
    become: bool = True
    become_password: str = field(default="", repr=False)

    @property
    def host_key_name(self) -> str:
        """What its host key is filed under (sshd(8), known_hosts)."""
        if self.host_key_alias:
            return self.host_key_alias
        return openssh.filed(self.address, str(self.port))


def target(name: str, variables: Mapping[str, Any], lookup: Lookup) -> Target:
    """The machine ``name`` with these inventory variables.

    What the inventory says goes before ssh_config, as with Ansible. Raises WrongInput for a value that cannot be used.
    """
    message = {**_arguments(name, variables), **{key: value for key, value in _variables(variables).items() if value}}
    host = str(message.get("host") or name)
    for value in (host, *(str(value) for value in message.values())):
        if "{{" in value:
            raise WrongInput(
                f"the machine {name} is to be reached by {value!r}, a template",
                "a plain value",
                "write it out in the inventory, or set it in ~/.ssh/config",
            )
    arguments = ssh_argv(variables, name)
    found = _reach(name, host, message, lookup, arguments)
    python = str(variables.get("ansible_python_interpreter") or PYTHON)
    become = variables.get("ansible_become")
    jump = message.get("proxyjump") or ("" if message.get("proxycommand") else lookup(host, arguments).get("proxyjump"))
    jumps = bool(jump) and str(jump).lower() != "none"
    return Target(
        **found,
        password=str(message.get("password") or ""),
        jump=_hops(str(jump), lookup, found["key_files"], openssh.other_config(arguments)) if jumps else (),
        python=python if python.startswith("/") else PYTHON,
        become_password=first(variables, SUDO_PASSWORDS),
        become=str(become).lower() not in {"false", "no", "0"} if become is not None else True,
    )


def first(variables: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first of several names that the inventory gives a value; "" where it gives none."""
    return str(next((variables[name] for name in names if variables.get(name)), ""))


def ssh_argv(variables: Mapping[str, Any], machine: str = "a machine") -> list[str]:
    """The words for ssh that reach a machine with these inventory variables, beside its address.

    Raises WrongInput for arguments that cannot be read.
    """
    words: list[str] = []
    for option, name in (("-p", "port"), ("-l", "user"), ("-i", "identityfile")):
        if value := first(variables, _ALIASES[name]):
            words += [option, value]
    return words + [word for name in ARGUMENTS for word in split(variables, name, machine)]


def split(variables: Mapping[str, Any], name: str, machine: str = "a machine") -> list[str]:
    """The words of one of ``ARGUMENTS``, of the inventory or else of the environment, as with Ansible.

    Raises WrongInput.
    """
    try:
        return shlex.split(str(variables.get(name, os.environ.get(name.upper())) or ""))
    except ValueError as error:
        raise WrongInput(f"{name} of {machine} cannot be read: {error}", "ssh arguments", "correct it") from error


def _reach(
    name: str, host: str, message: Mapping[str, Any], lookup: Lookup, arguments: Sequence[str]
) -> dict[str, Any]:
    """The part of a Target that a jump host has too; ``said`` is what ``arguments``, ssh's other words, say."""
    configured = lookup(host, arguments)
    known = {**configured, **message}
    address = str(known.get("hostname") or host).replace("%h", host)
    port = str(known.get("port") or DEFAULT_PORT)
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise WrongInput(f"the machine {name} has the SSH port {port!r}", "a number up to 65535", "correct it")
    user = str(known.get("user") or getpass.getuser())
    files = known.get("identityfile") or ()
    command = known.get("proxycommand") or ""
    return {
        "name": name,
        "address": address,
        "port": int(port),
        "user": user,
        "key_files": tuple(str(Path(file).expanduser()) for file in ((files,) if isinstance(files, str) else files)),
        "proxy_command": "" if command.lower() == "none" else _expand(command, address, port, user),
        "host_key_alias": str(known.get("hostkeyalias") or ""),
        "identities_only": str(known.get("identitiesonly", "no")).lower() == "yes",
        "rules": openssh.rules(configured),
    }


def _variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: next((variables[name] for name in names if variables.get(name) is not None), None)
        for key, names in _ALIASES.items()
    }


def _arguments(name: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """What the ssh arguments of an inventory say, by ssh_config's names; the first one counts."""
    words = [word for variable in ARGUMENTS for word in split(variables, variable, name)]
    found: dict[str, Any] = {}
    for word, following in itertools.pairwise([*words, ""]):
        option, value = word[:2], word[2:] or following
        if option == "-o":
            key, _, rest = value.replace("=", " ", 1).partition(" ")
            found.setdefault(key.lower(), rest.strip().strip('"'))
        elif option in _SHORT:
            found.setdefault(_SHORT[option], value)
    return found


def _hops(jump: str, lookup: Lookup, keys: Sequence[str], config: Sequence[str]) -> tuple[Target, ...]:
    """ssh_config's ProxyJump, ``user@host:port,...``; a hop has the keys of ssh_config, and the machine's own."""
    hops: list[Target] = []
    for part in jump.split(","):
        user, _, place = part.strip().removeprefix("ssh://").rpartition("@")
        host, port = place, ""
        if place.startswith("["):
            host, _, port = place[1:].partition("]")
            port = port.removeprefix(":")
        elif place.count(":") == 1:
            host, _, port = place.partition(":")
        message = {key: value for key, value in (("user", user), ("port", port)) if value}
        words = [*config, *(["-l", user] if user else []), *(["-p", port] if port else [])]
        found = _reach(f"jump host {host}", host, message, lookup, words)
        found["key_files"] = tuple(dict.fromkeys([*found["key_files"], *keys]))
        # A hop is reached by the one before it.
        found["proxy_command"] = "" if hops else found["proxy_command"]
        hops.append(Target(**found))
    return tuple(hops)


def _expand(command: str, address: str, port: str, user: str) -> str:
    """ProxyCommand's tokens (ssh_config(5), TOKENS)."""
    values = {"%h": shlex.quote(address), "%p": port, "%r": shlex.quote(user), "%%": "%"}
    return re.sub("%[hpr%]", lambda found: values[found[0]], command)
